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
# # Will it fit?
#
# How many devices does a model need, and at which stage? This notebook answers that for models of 7 and 70 billion
# parameters, on machines that you may not have. Nothing is allocated: shapes are enough. The answers become more exact
# from step to step:
#
# 1. DeepSpeed's estimators: formulas over the number of parameters;
# 2. the plan, which knows every array, and an estimate of activations from the trace of the step;
# 3. the machine's own compiler.
#
# The models come from `examples/decoder_models.py`: Flax Linen, scanned layers, recomputed in the backward pass.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # counts only without an accelerator
os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for eight virtual devices on few cores

import pathlib
import sys
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AbstractMesh

import jzero

checkout = (pathlib.Path(jzero.__file__).parents[1], *pathlib.Path.cwd().resolve().parents)
sys.path.append(str(next(x / "examples" for x in checkout if (x / "examples/decoder_models.py").exists())))

import decoder_models

GIB = 2**30
print(f"{jax.device_count()} {jax.devices()[0].platform} devices, for the last section")

# %% [markdown]
# ## Shapes of a model
#
# Each function of `decoder_models` returns a function from a key to a Flax `TrainState`, a loss, and the shape of a
# batch. `jax.eval_shape` makes the state without its numbers.

# %%
make_state, loss_fn, batch = decoder_models.llama_7b()
state = jax.eval_shape(make_state, jax.random.key(0))
num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
print(f"{num_params / 1e9:.2f} billion parameters, batch {batch.shape}")
print(f"replicated in fp32, with gradients and Adam: {16 * num_params / GIB:.0f} GiB on every device")

# %% [markdown]
# ## Formulas
#
# The estimators have DeepSpeed's names, arguments and tables. They return the numbers, and by default also print the
# table.

# %%
for estimate in (
    jzero.estimate_zero2_model_states_mem_needs_all_live,
    jzero.estimate_zero3_model_states_mem_needs_all_live,
):
    table = estimate(state.params, num_gpus_per_node=8, verbose=False)
    print(table, end="\n\n")

# %% [markdown]
# Without offload, the last table counts 18 bytes per parameter over 8 devices, plus the whole largest layer in fp32.
# DeepSpeed assumes 16-bit training, with another gradient in fp32.

# %%
(row,) = (row for row in table.rows if not row.cpu_offload and row.zero_init)
assert row.gpu_bytes == 4 * table.largest_layer_params + 18 * num_params // 8
print(f"{row.options.strip()}: {row.gpu_bytes / GIB:.2f} GiB")

# %% [markdown]
# ## Plans
#
# A plan knows how each array is cut or padded, or why it stays whole. It needs a mesh, which may be an `AbstractMesh`,
# so you do not need 64 devices.

# %%
bf16 = jzero.ZeroConfig(stage=3, precision="bf16")
plan = jzero.plan_train_state(state, config=bf16, mesh=AbstractMesh((64,), ("data",)))
print(plan)

# %% [markdown]
# With `precision="bf16"` at stage 3, jzero keeps an fp32 master and two fp32 moments per parameter, and a 16-bit
# gradient while a step runs: 14 bytes, divided by N devices. Stage 0 adds a 16-bit parameter: 16 bytes in all. The
# plans agree with this arithmetic, except for the arrays that stay whole.
#
# These are the plans of all stages for 70 billion parameters.


# %%
BYTES = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 14)}  # per parameter: whole, and divided by N
COUNTS = 2 ** np.arange(3, 11)  # 8 to 1024 devices

large = jax.eval_shape(decoder_models.llama_70b()[0], jax.random.key(0))
size = sum(leaf.size for leaf in jax.tree.leaves(large.params))

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (stage, (whole, cut)), color in zip(BYTES.items(), ("#D55E00", "#E69F00", "#0072B2", "#009E73"), strict=True):
    config = jzero.ZeroConfig(stage=stage, precision="bf16")
    totals = []
    for count in COUNTS:
        mesh = AbstractMesh((int(count),), ("data",))
        totals.append(jzero.plan_train_state(large, config=config, mesh=mesh).bytes_per_device.total)
    np.testing.assert_allclose(totals, whole * size + cut * size / COUNTS, rtol=0.01)
    axes.loglog(COUNTS, np.array(totals) / GIB, marker="o", markersize=4, color=color, label=f"stage {stage}")
USABLE = 0.9 * 79.1  # GiB of an H100, sold as 80 GB, without what the runtime takes
axes.axhline(USABLE, color="#999999", linestyle="--")
axes.text(COUNTS[-1], 0.9 * USABLE, "usable on an H100", ha="right", va="top", color="#666666")
axes.set_xticks(COUNTS, COUNTS, minor=False)
axes.minorticks_off()
axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
axes.set_xlabel("devices")
axes.set_ylabel("GiB of states per device")
axes.set_title(f"{size / 1e9:.0f} billion parameters in bf16")
axes.legend(frameon=False, loc="lower left")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Activations
#
# States are only a part. `estimate_step_memory` traces the step and adds saved activations, gathered parameters, and
# the temporaries at the peak. The states are exact; the rest follows a model of the compilers.

# %%
step = jzero.make_train_step(loss_fn, remat=jzero.Keep())  # as small as it can be
memories = {
    stage: jzero.estimate_step_memory(
        step, state, batch, topology="h200:8", config=jzero.ZeroConfig(stage=stage, precision="bf16")
    )
    for stage in range(4)
}
print(memories[3])

# %%
terms = {f"stage {stage}": {"states": m.arguments, **m.at_peak} for stage, m in memories.items()}
names = list(dict.fromkeys(name for sizes in terms.values() for name in sizes))
colors = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#BBBBBB", "#56B4E9")

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
left = np.zeros(len(terms))
for name, color in zip(names, colors, strict=False):
    sizes = np.array([sizes.get(name, 0) for sizes in terms.values()]) / GIB
    axes.barh(list(terms), sizes, left=left, color=color, label=name)
    left += sizes
np.testing.assert_allclose(left * GIB, [m.peak for m in memories.values()], rtol=0.01)
for row, total in enumerate(left):
    axes.text(total, row, f" {total:.0f}", va="center")
figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
axes.axvline(USABLE, color="#999999", linestyle="--")
axes.margins(x=0.08)
axes.set_xlabel("GiB per device: 7 billion parameters in bf16 on 8 devices (dashed: usable on an H100)")
axes.spines[["top", "right"]].set_visible(False)
axes.invert_yaxis()

# %% [markdown]
# ## The fastest layout that fits
#
# `fit` searches stages, replicas, micro-batches and recomputation, and chooses the layout that fits and takes
# least time. With `confirm=False` it only estimates; by default it also compiles the best ones.

# %%
print("Tracing the layouts.")
choice = jzero.fit(make_state, loss_fn, batch, topology="h100:8", config=bf16, confirm=False)
print(choice)

# %% [markdown]
# `save_figure` draws the layouts by time and memory, and what lives in memory through a step of the chosen one.


# %%
def show_figure(report):
    """Shows the figure of `save_figure`."""
    with tempfile.TemporaryDirectory() as folder:
        report.save_figure(f"{folder}/figure.png")
        image = plt.imread(f"{folder}/figure.png")
    figure = plt.figure(figsize=(9, 9 * image.shape[0] / image.shape[1]))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(image)
    axes.set_axis_off()


show_figure(choice)

# %% [markdown]
# Pass the result to the calls of a training script:
#
# ```python
# mesh = jzero.make_mesh(**choice.mesh_shape)
# state = jzero.init_train_state(make_state, key, config=choice.config, mesh=mesh)
# step = jzero.make_train_step(loss_fn, accumulate_steps=choice.accumulate_steps, remat=choice.remat)
# ```
#
# With 20 GiB per device, only stage 3 is left. Look at the room that it leaves: if that is less than a tenth, compile
# before you trust it.

# %%
small = jzero.fit(make_state, loss_fn, batch, topology="h100:8", config=bf16, hbm_bytes=20 * GIB, confirm=False)
print(small)
assert choice.chosen.peak <= choice.limit
assert small.chosen is None or small.chosen.peak <= 20 * GIB
assert small.chosen is None or small.config.stage >= choice.config.stage

# %% [markdown]
# ## Asking the compiler
#
# `analyze` compiles the step for a machine that you do not have. It needs that machine's compiler:
# `pip install 'jzero[gpu]'` or `'jzero[tpu]'`. Without it, the cell says so and compiles for the devices here, which
# shows what does not depend on the compiler: state and batch.

# %%
# The output varies with versions and machines.
print("Compiling for eight H200.")
try:
    report = jzero.analyze(step, state, batch, topology="h200:8", config=bf16)
except (ImportError, RuntimeError) as error:  # no such compiler, or jax has refused it
    print(f"{error}\n\nThis machine's compiler in its place:\n")
    shape = jax.ShapeDtypeStruct((jax.device_count(), batch.shape[1]), batch.dtype)
    report = jzero.analyze(step, state, shape, config=bf16)
print(report if report.machine == "h200:8" else report.plan.bytes_per_device)

# %% [markdown]
# State and batch are equal. For eight H200 the estimated peak is within 15 % of the compiler's; what CPUs take beside
# state and batch is not compared, since the estimate does not model their compiler.

# %%
# The output varies with versions and machines.
report.verify()
np.testing.assert_allclose(report.estimated.arguments, report.memory.arguments, rtol=0.01)
pairs = {"state and batch": (report.estimated.arguments, report.memory.arguments)}
if report.machine == "h200:8":
    pairs["peak"] = report.estimated.peak, report.memory.peak
    np.testing.assert_allclose(*pairs["peak"], rtol=0.15)
for name, (estimated, compiled) in pairs.items():
    print(f"{name}: {estimated / GIB:.2f} GiB estimated, {compiled / GIB:.2f} GiB compiled")

# %% [markdown]
# Next: [checkpoints across world sizes](03_checkpoints_across_world_sizes.ipynb).
