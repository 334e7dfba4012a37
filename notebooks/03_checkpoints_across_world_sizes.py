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
# # Checkpoints across world sizes
#
# A checkpoint of a partitioned state should not depend on the partition. jzero writes the state of a plain Flax and
# optax program: natural shapes, no padding. So a run may resume at another stage, on another number of devices. This
# notebook trains on all devices, resumes on fewer, breaks a file on purpose, and exports the result.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # counts only without an accelerator
os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for eight virtual devices on few cores

import atexit
import dataclasses
import math
import pathlib
import shutil
import sysconfig
import tempfile
import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import safetensors.numpy

import jzero

NUM_DEVICES = jax.device_count()
assert NUM_DEVICES > 1, "ZeRO needs two devices. Start Jupyter with JAX_PLATFORMS=cpu to get eight virtual ones."
print(f"{NUM_DEVICES} {jax.devices()[0].platform} devices")

directory = pathlib.Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, directory, ignore_errors=True)


def show(x):
    """Prints without the name of the temporary folder."""
    print(str(x).replace(str(directory), "..."))


# %% [markdown]
# ## A run on all devices
#
# A small network predicts the next byte of Python's standard library from the fifteen before it. Its hidden layer is
# 105 × 211, which eight devices do not divide, so it is stored with padding.

# %%
CONTEXT, WIDTH = 15, 211
MANY, SOME, TWO = NUM_DEVICES, NUM_DEVICES // 2 + 1, 2  # 8, 5 and 2 of eight devices

source = pathlib.Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(source, np.uint8), CONTEXT + 1).astype(np.int32)
batches = np.random.default_rng(0).choice(windows, (30, 4 * math.lcm(MANY, SOME, TWO)))  # each divides a batch


def make_state(key):
    keys = jax.random.split(key, 3)
    shapes = {"embed": (256, 7), "hidden": (7 * CONTEXT, WIDTH), "head": (WIDTH, 256)}
    params = {
        name: jax.random.normal(k, shape) / math.sqrt(shape[0])
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }
    return jzero.TrainState.create(params=params, tx=optax.adam(3e-3))


def loss_fn(params, batch):
    x = params["embed"][batch[:, :-1]].reshape(len(batch), -1)
    logits = jnp.tanh(x @ params["hidden"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()


step = jzero.make_train_step(loss_fn)


def train(state, batches):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


config = jzero.ZeroConfig(stage=3, persistence_threshold=1_000)  # the default keeps arrays of this size whole
state = jzero.init_train_state(make_state, jax.random.key(0), config=config)
print(jzero.plan_of(state))

# %% [markdown]
# `CheckpointManager` numbers checkpoints by step, keeps the latest ones, and writes while training continues. Pass
# other values that the run needs in `extra`.

# %%
run = directory / "run"
print("Compiling the step, then training.")
losses = []
with jzero.CheckpointManager(run, max_to_keep=2) as manager:
    for start in (0, 5, 10):
        state, more = train(state, batches[start : start + 5])
        losses += more
        manager.save(state, extra={"next_batch": start + 5})
    manager.wait()
    assert manager.all_steps() == [10, 15]

# %% [markdown]
# `inspect_checkpoint` reads only the metadata. The shapes are natural: no padding, no trace of the shards.

# %%
info = jzero.inspect_checkpoint(run)
show(info)
assert {leaf.path: leaf.shape for leaf in info.leaves}["params/hidden"] == (7 * CONTEXT, WIDTH)

# %% [markdown]
# ## Resuming elsewhere
#
# `abstract_train_state` describes the new state: shapes and shardings, no arrays. `restore` reads each shard directly
# from the files. Below, one run resumes unchanged, one on some of the devices at stage 1, one on two devices at stage
# 2.

# %%
plain = jax.eval_shape(make_state, jax.random.key(0))
layouts = {
    f"stage 3 on {MANY}": (config, MANY),
    f"stage 1 on {SOME}": (dataclasses.replace(config, stage=1), SOME),
    f"stage 2 on {TWO}": (dataclasses.replace(config, stage=2), TWO),
}
curves, restored = {}, {}
with jzero.CheckpointManager(run) as manager:
    for name, (new_config, count) in layouts.items():
        mesh = jzero.make_mesh(devices=jax.devices()[:count])
        like = jzero.abstract_train_state(plain, config=new_config, mesh=mesh)
        new_state = manager.restore(like)
        restored[name] = jax.device_get(jzero.unshard_train_state(new_state))
        curves[name] = train(new_state, batches[manager.restore_extra()["next_batch"] :])[1]

# %% [markdown]
# The restored states equal the saved one, bit for bit, optimizer state included. From there on, the losses agree up to
# the order of summation.

# %%
saved = jax.tree.leaves(jax.device_get(jzero.unshard_train_state(state)))
for other in restored.values():
    for a, b in zip(saved, jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
for curve in curves.values():
    np.testing.assert_allclose(curve, curves[f"stage 3 on {MANY}"], rtol=1e-3)

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(range(1, 16), losses, color="black", label=f"before: stage 3 on {MANY}")
for (name, curve), width, color in zip(curves.items(), (7, 4, 1.5), ("#56B4E9", "#E69F00", "#D55E00"), strict=True):
    axes.plot(range(15, 31), [losses[-1], *curve], linewidth=width, color=color, label=name)
axes.axvline(15, color="#BBBBBB", linewidth=1)
axes.set_xlabel("step")
axes.set_ylabel("nats per byte")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## A damaged checkpoint
#
# Disks fail, and copies are cut short. Every chunk has a checksum, so jzero finds and names the damaged leaf. Here we
# flip one byte of the newest checkpoint.

# %%
# The output varies with versions and machines.
victim = max((run / "15").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
data = bytearray(victim.read_bytes())
data[len(data) // 2] ^= 0xFF
victim.write_bytes(data)

damaged = jzero.inspect_checkpoint(run / "15", verify=True).damaged
assert damaged
for path, what in damaged.items():
    show(f"{path}: {what}")

# %% [markdown]
# `restore` warns, and restores the step before. `jzero inspect run --verify` checks the same on the command line.

# %%
# The output varies with versions and machines.
with jzero.CheckpointManager(run) as manager, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fallback = manager.restore(like)
assert int(fallback.step) == 10
show(next(str(w.message) for w in caught if "damaged" in str(w.message)).splitlines()[0])

try:
    jzero.restore_checkpoint(run / "15", like)  # only this step: an error
except jzero.CheckpointError as error:
    show(error)
else:
    raise AssertionError("a damaged checkpoint was read")

# %% [markdown]
# ## Export
#
# `export_params` writes safetensors, one leaf at a time, for programs without jzero. Here the safetensors package reads
# them.

# %%
file = directory / "model.safetensors"
report = jzero.export_params(state, file)
tensors = safetensors.numpy.load_file(file)
print({name: tensor.shape for name, tensor in tensors.items()}, f"{report.num_bytes:,} bytes")

for name, whole in jzero.gather_params(state).items():
    np.testing.assert_array_equal(tensors[name], whole)

# %% [markdown]
# `load_params` reads them back, shard by shard, here into a fresh state on two devices.

# %%
fresh = jzero.init_train_state(
    make_state, jax.random.key(1), stage=3, mesh=jzero.make_mesh(devices=jax.devices()[:TWO])
)
loaded = jzero.load_params(fresh, file)
for name, whole in jzero.gather_params(loaded).items():
    np.testing.assert_array_equal(tensors[name], whole)

# %% [markdown]
# Next: [what the compiler did](04_what_the_compiler_did.ipynb).
