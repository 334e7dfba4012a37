"""Training from a ds_config gives the numbers of recorded DeepSpeed and FSDP2 runs of the same model on four ranks.

`tests/data/deepspeed_runs.json` holds the settings of each run, the global mean loss and the gradient norm before
clipping of 30 steps. The order of summation alone makes any two of them differ: tolerances are a little more than plain
optax on one device, with the batch summed in four slices, is away. In 16 bits with sums in fp32 `test_precision.py`
follows one device.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from tests import deepspeed_model as model

RUNS = json.loads((pathlib.Path(__file__).parent / "data" / "deepspeed_runs.json").read_text())
NUM_DEVICES = 4  # as many as the ranks of the recorded runs
NUM_STEPS = 10


class Deviation(NamedTuple):
    """Relative, the largest over all steps."""

    loss: float
    norm: float


# PyTorch's own fp32 runs are 8e-7 (loss) and 2e-6 (norm) from float64, so nothing can be much nearer to them.
FP32 = Deviation(2e-6, 1e-5)
# The order of summation costs a few units in the last place, 2e-16 each; any wrong term costs orders more.
FP64 = Deviation(1e-14, 1e-13)
# Rounding noise: DeepSpeed's and FSDP2's runs are up to 8e-4 and 9e-3 from each other and from fp32, and the
# norm of a control that sums other slices up to 1.2e-2; jzero's are up to 7e-4 and 1.1e-2 (8e-3 if LLVM optimizes).
# With jax 0.12, whose bf16 products are YNNPACK's on CPUs, the control's loss is up to 1.8e-3 away, jzero's 2.1e-3.
# Forgetting to clip would cost 2e-2 and 1.3e-1.
BF16 = Deviation(1e-3 if jax.__version_info__ < (0, 11) else 2.5e-3, 1.3e-2)
# Three bits more than bf16: DeepSpeed's run is 1e-4 and 2e-3 from fp32.
FP16 = Deviation(3e-4, 6e-3)


def file_of(run: dict[str, Any]) -> dict[str, Any]:
    """Returns the ds_config of a recorded run."""
    adam = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    config = {
        "train_batch_size": model.ROWS,
        "gradient_accumulation_steps": run["gas"],
        "gradient_clipping": run["clip"],
        "optimizer": {"type": "Adam", "params": adam},
        "zero_optimization": {"stage": run["stage"], "stage3_param_persistence_threshold": 0},
    }
    if run["dtype"] != "fp32":
        config[run["dtype"]] = {"enabled": True} | run.get("fp16", {})
    if "grad_accum_dtype" in run:
        config["data_types"] = {"grad_accum_dtype": run["grad_accum_dtype"]}
        config["communication_data_type"] = run["communication_data_type"]
    return config


def train(run: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Returns the metrics of each step. In 16 bits the weights start rounded, as DeepSpeed's masters do."""

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        return model.loss_fn(params, batch)

    config, report = jzero.from_deepspeed(file_of(run), num_devices=NUM_DEVICES)
    report.verify()
    stored = jnp.promote_types(dtype, jnp.float32)
    params = jax.tree.map(lambda x: x.astype(dtype).astype(stored), model.initial_params())
    state = jzero.TrainState.create(params=params, tx=report.optimizer)
    mesh = jzero.make_mesh(devices=jax.devices()[:NUM_DEVICES])
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    step = jzero.make_train_step(loss_fn, **report.step_arguments())
    history = []
    for batch in model.tokens()[:NUM_STEPS]:
        state, metrics = step(state, batch)
        history.append(jax.tree.map(float, metrics))
    return {name: np.array([metrics[name] for metrics in history]) for name in history[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "peers"),
    [
        ("ds_main_z3_fp32_g1_clip0", "float32", {"ds_main_z3_fp32_g1_clip0": FP32}),
        ("ds_main_z1_fp32_g2", "float32", {"ds_main_z1_fp32_g2": FP32, "fsdp_main_fp32_g2": FP32}),
        pytest.param(
            "ds_main_z3_fp32_g2",
            "float64",
            {"ds_main_z3_fp32_g2": FP32, "ref_main_fp64": FP64},
            marks=pytest.mark.smoke,
        ),
        ("ds_main_z1_bf16_g1", "bfloat16", {"ds_main_z1_bf16_g1": BF16, "fsdp_main_bf16_g1": BF16}),
        ("ds_main_z2_bf16_g2_acc32", "bfloat16", {"ds_main_z2_bf16_g2_acc32": BF16, "ds_main_z2_fp32_g2": BF16}),
        ("ds_main_z1_fp16_g1", "float16", {"ds_main_z1_fp16_g1": FP16}),
    ],
)
def test_a_file_trains_as_deepspeed_did(name, dtype, peers):
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        found = train(RUNS[name], dtype)
    for peer, tolerance in peers.items():
        run = {key: np.array(RUNS[peer][key][:NUM_STEPS]) for key in ("losses", "grad_norms")}
        np.testing.assert_allclose(found["loss"], run["losses"], rtol=tolerance.loss, err_msg=peer)
        np.testing.assert_allclose(found["grad_norm"], run["grad_norms"], rtol=tolerance.norm, err_msg=peer)
    if dtype == "float16":
        np.testing.assert_array_equal(found["loss_scale"], RUNS[name]["loss_scales"][:NUM_STEPS])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_beside_deepspeeds(stage):
    """What one rank of the recorded bf16 runs held between backward and step, term by term, against the plan."""
    run = RUNS[f"ds_main_z{stage}_bf16_g1"]
    theirs, (config, report) = run["memory_bytes_rank0"], jzero.from_deepspeed(file_of(run), num_devices=NUM_DEVICES)
    create = lambda params: jzero.TrainState.create(params=params, tx=report.optimizer)
    state, mesh = jax.eval_shape(create, model.initial_params()), jzero.make_mesh(devices=jax.devices()[:NUM_DEVICES])
    ours = jzero.plan_train_state(state, config=config, mesh=mesh).bytes_per_device
    deepspeeds_state = theirs["params"] + theirs["master"] + theirs["optimizer_state"]
    if stage < 3:
        assert ours.params == theirs["params"]
        assert ours.params + ours.opt_state == pytest.approx(deepspeeds_state, rel=0.01)
    else:  # no 16-bit copy of the shard: 12 bytes per parameter where DeepSpeed holds 14, then 2 of gradients each
        assert (ours.params + ours.opt_state) / deepspeeds_state == pytest.approx(12 / 14, rel=0.01)
        assert ours.total / (deepspeeds_state + theirs["grads_before_step"]) == pytest.approx(14 / 16, rel=0.01)
