# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: jupytext,kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # ZeRO in ten minutes
#
# Data-parallel training keeps the same parameters, gradients and optimizer state on every device. ZeRO keeps only a
# part of them on each:
#
# | stage | parameters | gradients | optimizer state |
# |---|---|---|---|
# | 0 | whole | whole | whole |
# | 1 | whole | whole | cut |
# | 2 | whole | cut | cut |
# | 3 | cut | cut | cut |
#
# The numbers stay the same. This notebook trains a small model at all four stages, draws which device holds what, and
# measures the memory.
#
# It runs on two or more accelerators, or on eight virtual CPU devices if there is no accelerator. Start Jupyter in this
# folder of a checkout, after `pip install -e '.[notebooks]'`.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # counts only without an accelerator
os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for eight virtual devices on few cores

import pathlib
import sysconfig

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero

NUM_DEVICES = jax.device_count()
assert NUM_DEVICES > 1, "ZeRO needs two devices. Start Jupyter with JAX_PLATFORMS=cpu to get eight virtual ones."
print(f"{NUM_DEVICES} {jax.devices()[0].platform} devices")

# %% [markdown]
# ## A model, a loss, a train state
#
# This is ordinary Flax: a scanned stack of residual blocks that predicts the next byte from the sixteen before it. The
# text is source code of Python's standard library. Nothing in this cell is about ZeRO.

# %%
CONTEXT, WIDTH, NUM_LAYERS = 16, 64, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        hidden = nn.tanh(nn.Dense(4 * WIDTH, use_bias=False, name="expand")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="contract")(hidden), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, context):  # [B, CONTEXT] bytes
        x = nn.Embed(256, WIDTH // CONTEXT, name="embed")(context).reshape(len(context), WIDTH)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=NUM_LAYERS)
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(256, name="head")(x)


def loss_fn(params, batch):  # batch: [B, CONTEXT + 1] bytes
    logits = Model().apply({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()


source = pathlib.Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(source, np.uint8), CONTEXT + 1).astype(np.int32)
batches = np.random.default_rng(0).choice(windows, (20, 16 * NUM_DEVICES))

params = jax.jit(Model().init)(jax.random.key(0), batches[0, :, :-1])["params"]
plain = TrainState.create(apply_fn=Model().apply, params=params, tx=optax.adamw(3e-3))
num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
print(f"{num_params:,} parameters; {len(batches)} batches of {batches.shape[1]} windows")

# %% [markdown]
# ## One call
#
# `shard_train_state` cuts the state and spreads it over the devices. It returns a `TrainState` of the same class.
# `make_train_step` makes a jitted step from the loss, which you still write for whole parameters.

# %%
state = jzero.shard_train_state(plain, stage=3)
step = jzero.make_train_step(loss_fn)
assert type(state) is TrainState

# %% [markdown]
# The plan shows the layout of each array.

# %%
print(jzero.plan_of(state))

# %% [markdown]
# The last section lists the arrays that stay whole, and why. Stage 3 keeps parameters of up to 100,000 elements whole,
# because gathering a small array takes time and saves little memory. It cuts their optimizer state anyway.
#
# This model is small, so the rest of the notebook lowers the threshold.

# %%
THRESHOLD = 1_000


def config_of(stage):
    return jzero.ZeroConfig(stage=stage, persistence_threshold=THRESHOLD)


for whole in jzero.plan_train_state(plain, config=config_of(3)).replicated:
    print(f"{whole.term:10}{whole.path:30}{whole.shape!s:10}{whole.reason}")

# %% [markdown]
# ## The same training at every stage
#
# Train twenty steps at each stage, from the same parameters on the same batches.

# %%
STAGES = (0, 1, 2, 3)
print("Compiling the step of each stage, then training.")
states, losses = {}, {}
for stage in STAGES:
    state = jzero.shard_train_state(plain, config=config_of(stage))
    losses[stage] = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses[stage].append(float(metrics["loss"]))
    states[stage] = state

for stage in STAGES:
    np.testing.assert_allclose(losses[stage], losses[0], rtol=1e-3)
assert losses[3][-1] < losses[3][0] - 1
for stage, values in losses.items():
    print(f"stage {stage}: loss {values[0]:.4f} at first, {values[-1]:.4f} at last")

# %% [markdown]
# ## Which device holds what
#
# Take one matrix, the head. A `jax.Array` knows its shards, so the picture comes from the arrays themselves: each row
# is a device, each block an array, and the filled part is what that device holds. The gradient is that of
# `value_and_grad`. It is cut at stage 1, too: stage 1 keeps whole gradients only to sum several micro-batches.

# %%
COLORS = {"parameter": "#0072B2", "gradient": "#E69F00", "Adam's mu": "#009E73", "Adam's nu": "#CC79A7"}
loss_and_grads = jzero.value_and_grad(loss_fn)


def held(array):
    """Returns the part of an array on each device: (start, size) as shares of the cut dimension."""
    parts = {}
    for shard in array.addressable_shards:
        spans = [(*s.indices(n)[:2], n) for s, n in zip(shard.index, array.shape, strict=True)]
        start, stop, size = min(spans, key=lambda span: (span[1] - span[0]) / span[2])
        parts[shard.device] = (start / size, (stop - start) / size)
    return parts


def arrays_of_head(state):
    """Returns the arrays that belong to the kernel of the head."""
    grads = loss_and_grads(state, batches[0])[1]
    adam = state.opt_state[0]
    trees = (state.params, grads, adam.mu, adam.nu)
    return dict(zip(COLORS, (tree["head"]["kernel"] for tree in trees), strict=True))


figure, panels = plt.subplots(1, 4, figsize=(11, 2.8), sharey=True, layout="constrained")
for stage, axes in zip(STAGES, panels, strict=True):
    for column, (name, array) in enumerate(arrays_of_head(states[stage]).items()):
        for row, (start, size) in enumerate(held(array).values()):
            axes.barh(row, 0.9, left=column, height=0.86, color="#EEEEEE")
            axes.barh(row, 0.9 * size, left=column + 0.9 * start, height=0.86, color=COLORS[name])
    axes.set_title(f"stage {stage}")
    axes.set_xticks([column + 0.45 for column in range(4)], ["P", "G", "mu", "nu"])
    axes.set_frame_on(False)
    axes.tick_params(length=0)
handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
figure.legend(handles, COLORS, loc="outside lower center", ncols=4, frameon=False)
panels[0].set_ylabel("device")
panels[0].invert_yaxis()

# %% [markdown]
# ## What it saves
#
# For parameters and optimizer state, we measure the bytes of the buffers on one device. Gradients, activations and
# gathered parameters live only inside a step, so we ask the compiler how much temporary memory it reserves.
# `jzero.analyze` compiles the step and reads that number.


# %%
def bytes_on_one_device(tree):
    """Returns the bytes of a tree's buffers on the first device."""
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.local_devices()[0])


print("Compiling the step of each stage.")
bars = {"parameters": [], "optimizer state": [], "temporaries": []}
for stage in STAGES:
    bars["parameters"].append(bytes_on_one_device(states[stage].params))
    bars["optimizer state"].append(bytes_on_one_device(states[stage].opt_state))
    bars["temporaries"].append(jzero.analyze(step, states[stage], batches[0]).memory.temporaries)

    planned = jzero.plan_of(states[stage]).bytes_per_device
    assert (bars["parameters"][-1], bars["optimizer state"][-1]) == (planned.params, planned.opt_state)

assert bars["parameters"][0] == 4 * num_params  # fp32
assert bars["optimizer state"][0] == 2 * 4 * num_params + 4  # two moments and a counter
assert bars["optimizer state"][1] < 1.05 * bars["optimizer state"][0] / NUM_DEVICES
assert bars["parameters"][3] < 1.05 * bars["parameters"][0] / NUM_DEVICES

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
left = np.zeros(len(STAGES))
for (name, sizes), color in zip(bars.items(), ("#0072B2", "#009E73", "#BBBBBB"), strict=True):
    axes.barh([f"stage {stage}" for stage in STAGES], np.array(sizes) / 2**20, left=left, color=color, label=name)
    left += np.array(sizes) / 2**20
for row, total in enumerate(left):
    axes.text(total, row, f" {total:.1f}", va="center")
figure.legend(loc="outside upper center", ncols=3, frameon=False)
axes.set_xlabel("MiB on one device")
axes.margins(x=0.08)
axes.spines[["top", "right"]].set_visible(False)
axes.invert_yaxis()

# %% [markdown]
# A real model has the same bars with larger numbers. Notebook 2 draws them for a model of 70 billion parameters.
#
# ## Shapes that do not divide
#
# Any shape works on any number of devices. If no dimension divides evenly, the array is stored with a little padding.
# Neither your loss nor the optimizer sees the padding; it is zero after every step.

# %%
odd = jzero.TrainState.create(params={"w": jnp.ones((131, 127))}, tx=optax.adam(0.1))
odd = jzero.shard_train_state(odd, config=config_of(3))
odd, _ = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())(
    odd, jnp.ones((NUM_DEVICES, 131))
)

(stored,), natural = jax.tree.leaves(odd.params), jzero.natural_params(odd)["w"]
assert natural.shape == (131, 127)
assert stored.size - natural.size == jzero.plan_of(odd).padding["w"] < 0.125 * natural.size
np.testing.assert_allclose(natural, 0.9, rtol=1e-5)  # Adam's first step moves each weight by the learning rate
assert np.count_nonzero(stored) == natural.size  # the padding is zero
print(f"stored {stored.shape}, natural {natural.shape}")

# %% [markdown]
# ## Back to whole parameters
#
# `gather_params` returns whole parameters, all or some, in the model's shapes; `unshard_train_state` returns the whole
# state. After twenty steps, the parameters of stages 0 and 3 are equal, up to the order of summation.

# %%
trained = [jzero.gather_params(states[stage]) for stage in (0, 3)]
deviations = jax.tree.map(lambda a, b: float(jnp.abs(a - b).mean()), *trained)
assert max(jax.tree.leaves(deviations)) < 1e-4
for path, deviation in jax.tree_util.tree_leaves_with_path(deviations):
    print(f"{jax.tree_util.keystr(path, simple=True, separator='/'):25} deviates by {deviation:.1e} on average")

# %% [markdown]
# Next: [will it fit?](02_will_it_fit.ipynb), for machines that you don't have.
