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
# # What the compiler did
#
# ZeRO is a promise about communication: stages 1 and 2 send no more than plain data-parallel training, and stage 3
# sends 1.5 times as much. But the compiler decides what a program sends. `jzero.analyze` compiles a step, runs nothing,
# and reads the program. This notebook compares it with ZeRO's arithmetic, and then writes a loss that breaks the
# promise.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # counts only without an accelerator
os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for eight virtual devices on few cores

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jzero

NUM_DEVICES = jax.device_count()
assert NUM_DEVICES > 1, "ZeRO needs two devices. Start Jupyter with JAX_PLATFORMS=cpu to get eight virtual ones."
print(f"{NUM_DEVICES} {jax.devices()[0].platform} devices")

# %% [markdown]
# The model is one array, a stack of square matrices that a `lax.scan` runs over, so you can check all numbers by hand.
# Its parameters are a plain pytree, for which jzero has `jzero.TrainState`. Ψ is the number of parameters.

# %%
NUM_LAYERS, WIDTH = 8, 240
SIZE = NUM_LAYERS * WIDTH**2  # Ψ


def block(x, w):
    return x + jnp.tanh(x @ w), None


def loss_fn(params, batch):
    x, _ = jax.lax.scan(block, batch, params["stack"])
    return jnp.square(x).mean()


stack = 0.02 * jax.random.normal(jax.random.key(0), (NUM_LAYERS, WIDTH, WIDTH))
plain = jzero.TrainState.create(params={"stack": stack}, tx=optax.adam(1e-3))
batch = np.random.default_rng(0).normal(size=(16 * NUM_DEVICES, WIDTH)).astype(np.float32)
step = jzero.make_train_step(loss_fn)
print(f"Ψ = {SIZE:,} parameters in {NUM_LAYERS} layers")

# %% [markdown]
# ## One report
#
# Stage 3 gathers each layer inside the loop, once in the forward pass and once in the backward pass, and reduces and
# scatters its gradient as soon as it exists.

# %%
state = jzero.shard_train_state(plain, stage=3)
print("Compiling stage 3.")
report = jzero.analyze(step, state, batch)
print(report)

# %% [markdown]
# The table counts *elements* as the ZeRO paper does: a gather or a reduce-scatter of Ψ elements counts Ψ, an all-reduce
# 2Ψ, since it is a reduce-scatter and a gather in one. In a ring a device sends (N-1)/N of that: the last column.
# `per step` includes the trip counts of loops.
#
# `verify` compares the program with the plan. It raises nothing here, so the program follows the plan.

# %%
report.verify()

# %% [markdown]
# ## The arithmetic, stage by stage

# %%
EXPECTED = {0: 2, 1: 2, 2: 2, 3: 3}  # in units of Ψ
KINDS = {"all-reduce": "#D55E00", "reduce-scatter": "#009E73", "all-gather": "#E69F00"}

reports = {}
for stage, expected in EXPECTED.items():
    reports[stage] = jzero.analyze(step, jzero.shard_train_state(plain, stage=stage), batch)
    reports[stage].verify()
    assert abs(reports[stage].communication_elements / SIZE - expected) < 0.1

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
left = np.zeros(len(reports))
for kind, color in KINDS.items():
    sizes = [sum(row.elements for row in r.collectives if row.kind == kind) / SIZE for r in reports.values()]
    axes.barh([f"stage {stage}" for stage in reports], sizes, left=left, color=color, label=kind)
    left += np.array(sizes)
figure.legend(loc="outside upper center", ncols=3, frameon=False)
axes.set_xlabel("elements per step, in units of the parameters Ψ")
axes.set_xlim(0, 3.2)
axes.spines[["top", "right"]].set_visible(False)
axes.invert_yaxis()

# %% [markdown]
# Stage 0 sums gradients with an all-reduce. Stages 1 and 2 do the two halves of that separately: they scatter the sum,
# update one part of the parameters, and gather the parameters. Stage 3 skips the gather after the update, and gathers
# twice while it computes.
#
# ## Trading memory for communication
#
# `reshard_after_forward=False` keeps the gathered parameters until the backward pass. That saves the second gather, and
# costs the memory that stage 3 is meant to save.

# %%
# The output varies with versions and machines.
keeping = jzero.ZeroConfig(stage=3, reshard_after_forward=False)
kept = jzero.analyze(step, jzero.shard_train_state(plain, config=keeping), batch)
kept.verify()

print(kept)
assert abs(kept.communication_elements / SIZE - 2) < 0.1
assert kept.memory.temporaries - report.memory.temporaries > 4 * SIZE * (1 - 2 / NUM_LAYERS)

# %% [markdown]
# By default, stage 3 saves only activations that are expensive to recompute. `"as_written"` saves the same as plain
# jax; `True` recomputes each iteration of a scan as a whole, which saves more memory and adds arithmetic. Communication
# does not change, because stage 3 gathers each layer for the backward pass anyway.

# %%
wide = np.tile(batch, (32, 1))  # a larger batch, so that activations dominate
choices = {"as written": "as_written", "default": None, "recomputed": True}
found = {name: jzero.analyze(jzero.make_train_step(loss_fn, remat=x), state, wide) for name, x in choices.items()}
for name, r in found.items():
    print(
        f"{name:12}{r.memory.temporaries / 2**20:6.1f} MiB of temporaries, {r.communication_elements / SIZE:.2f} Ψ sent"
    )
sizes = [r.memory.temporaries for r in found.values()]
assert sizes == sorted(sizes, reverse=True)
assert sizes[-1] < sizes[0]
assert len({r.communication_elements for r in found.values()}) == 1

# %% [markdown]
# ## A loss that departs from the plan
#
# Suppose that each matrix must be normalized before its use. The first loss below normalizes the whole stack before the
# loop, so it gathers all layers at once. The result is right, but the memory saved by stage 3 is gone. `verify` says
# so, and names the array.


# %%
def normalized(w):
    return w / jnp.linalg.norm(w, axis=-2, keepdims=True)


def loss_ahead(params, batch):
    x, _ = jax.lax.scan(block, batch, normalized(params["stack"]))
    return jnp.square(x).mean()


def loss_inside(params, batch):
    x, _ = jax.lax.scan(lambda x, w: block(x, normalized(w)), batch, params["stack"])
    return jnp.square(x).mean()


ahead = jzero.analyze(jzero.make_train_step(loss_ahead), state, batch)
try:
    ahead.verify()
except jzero.PlanViolation as violation:
    print(violation)
else:
    raise AssertionError("the stack is gathered ahead of the loop, and nobody said so")

# %% [markdown]
# The second loss normalizes inside the loop, one layer at a time.

# %%
inside = jzero.analyze(jzero.make_train_step(loss_inside), state, batch)
inside.verify()
for name, r in {"ahead of the loop": ahead, "inside the loop": inside}.items():
    print(f"{name:18}{r.memory.temporaries / 2**20:6.2f} MiB of temporaries")
assert inside.memory.temporaries < ahead.memory.temporaries

np.testing.assert_allclose(loss_inside(plain.params, batch), loss_ahead(plain.params, batch), rtol=1e-5)

# %% [markdown]
# ## The timeline
#
# Whether communication costs time depends on the computation beside it. With `topology=`, `analyze` compiles the
# program for another machine, here one host with eight H200, and runs its schedule through a model of that machine at
# peak rates. This needs the compiler of that machine, not the machine: `pip install 'jzero[gpu]'`. `save_figure` draws
# memory and timeline.
#
# The layers are now those of a larger model. Shapes are enough, so nothing is allocated.

# %%
# The output varies with versions and machines.
TOPOLOGY = "h200:8"
layers = {"stack": jax.ShapeDtypeStruct((32, 8192, 8192), jnp.float32)}
large = jax.eval_shape(lambda params: jzero.TrainState.create(params=params, tx=optax.adam(1e-3)), layers)
tokens = jax.ShapeDtypeStruct((8 * 4096, 8192), jnp.bfloat16)
configs = {
    "as it is": jzero.ZeroConfig(stage=3, precision="bf16"),
    "nothing ahead": jzero.ZeroConfig(stage=3, precision="bf16", prefetch_bytes=0),
}


def show_figure(report):
    """Shows the figure of `save_figure`."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "report.png")
        report.save_figure(str(path))
        image = plt.imread(path)
    figure = plt.figure(figsize=(9, 9 * image.shape[0] / image.shape[1]))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(image)
    axes.set_axis_off()


print("Compiling for eight H200, twice.")
small_step = jzero.make_train_step(loss_fn, remat="cheap")  # gathers and recomputes, though all would fit
try:
    timed = {
        name: jzero.analyze(small_step, large, tokens, topology=TOPOLOGY, config=config)
        for name, config in configs.items()
    }
except (ImportError, RuntimeError) as error:  # no such compiler, or jax has refused it
    print(f"No timeline here. {error}")
    timed = {}

for name, r in timed.items():
    r.verify()
    print(f"{name:13} {r.exposed_communication:.0%} of the time of collectives has no computation beside it")
show_figure(timed.get("as it is", report))

# %% [markdown]
# On GPUs jzero's scans gather the first parameters of the next layer while this one computes. With `prefetch_bytes=0`
# they do not, so each layer waits for its parameters.

# %%
show_figure(timed.get("nothing ahead", kept))

# %% [markdown]
# Without that compiler, the figures above show only memory, from the reports of this machine. A modelled timeline is
# not a measurement: to measure, profile the step on the machine itself.
