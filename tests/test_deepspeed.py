"""Training, schedules and optimizers of a ds_config give the numbers of recorded DeepSpeed and FSDP2 runs.

`tests/data/deepspeed_runs.json` holds the settings of each run of one model on four ranks, the global mean loss and the
gradient norm before clipping of 30 steps. The order of summation alone makes any two of them differ: tolerances are a
little more than plain optax on one device, with the batch summed in four slices, is away. In 16 bits with sums in fp32
`test_precision.py` follows one device.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import deepspeed_model as model

DATA = pathlib.Path(__file__).parent / "data"
RUNS = json.loads((DATA / "deepspeed_runs.json").read_text())
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


# Schedules and optimizers, step by step. `deepspeed_golden.json` was written by DeepSpeed 0.19.8 itself, see
# `data/make_deepspeed_golden.py`. LAMB runs on GPUs alone; its formula stands below, in float64.

GOLDEN = json.loads((DATA / "deepspeed_golden.json").read_text())
STEPS = np.array(GOLDEN["steps"])
BATCH = {"train_batch_size": 8}


def report_of(optimizer=None, schedule=None, **config):
    blocks = {"optimizer": optimizer, "scheduler": schedule}
    blocks = {key: block for key, block in blocks.items() if block is not None}
    return jzero.from_deepspeed({**BATCH, **blocks, **config})[1]


def refused(*args, **kwargs):
    with pytest.warns(UserWarning, match="does not honour"):
        return report_of(*args, **kwargs)


def block(row):
    return {"type": row["type"], "params": row["params"]}


def verdict(report, key):
    (found,) = [row.verdict for row in report.rows if row.key == key]
    return found


def ids(rows):
    return [f"{row['type']}-{i}" for i, row in enumerate(rows)]


@pytest.mark.parametrize("row", GOLDEN["schedules"], ids=ids(GOLDEN["schedules"]))
def test_schedule_is_deepspeeds(row):
    """Among the first 400 steps. A few roundings of 6e-8 each; a schedule off by one step misses by 1e-3 and more."""
    adam = {"type": "AdamW", "params": {"lr": GOLDEN["optimizer_lr"]}}
    schedule = report_of(adam, block(row)).schedule
    np.testing.assert_allclose(jax.jit(jax.vmap(schedule))(STEPS), row["lr"], rtol=5e-7)
    if row is GOLDEN["schedules"][0]:
        one_by_one = [float(schedule(int(step))) for step in STEPS[:3]]
        np.testing.assert_allclose(one_by_one, row["lr"][:3], rtol=5e-7)


@pytest.mark.parametrize("row", [row for row in GOLDEN["schedules"] if "betas" in row])
def test_momentum_cycles_as_deepspeeds(row):
    tx = report_of({"type": "AdamW", "params": {"lr": 1.0}}, block(row)).optimizer
    params = jnp.ones(2)

    def step(state, _):
        _, state = tx.update(params, state, params)
        return state, (state.hyperparams["learning_rate"], state.hyperparams["b1"])

    found = np.stack(jax.jit(lambda: jax.lax.scan(step, tx.init(params), length=max(STEPS) + 1)[1])(), axis=1)
    expected = [(lr, betas[0]) for lr, betas in zip(row["lr"], row["betas"], strict=True)]
    np.testing.assert_allclose(found[STEPS], expected, rtol=5e-7)
    assert {betas[1] for betas in row["betas"]} == {0.99}


def test_which_rate_counts():
    adam = {"type": "Adam", "params": {"lr": 0.5}}
    own = report_of(adam, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}})
    assert float(own.schedule(10**6)) == 0.25
    assert verdict(own, "optimizer.params.lr") == "ignored"
    theirs = report_of(adam, {"type": "WarmupLR", "params": {}})
    assert float(theirs.schedule(10**6)) == 0.5
    assert verdict(theirs, "optimizer.params.lr") == "honoured"
    alone = refused(schedule={"type": "WarmupCosineLR", "params": {"total_num_steps": 10}})
    assert (verdict(alone, "scheduler.type"), alone.schedule) == ("refused", None)


def weights_after(tx, grads, start):
    """Returns the weights after each update, in one program."""

    def step(carried, grad):
        params, state = carried
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    train = lambda params, grads: jax.lax.scan(step, (params, tx.init(params)), grads)[1]
    start = jnp.asarray(start)
    return np.asarray(jax.jit(train)(start, jnp.asarray(grads, start.dtype)))


@pytest.mark.parametrize("row", GOLDEN["optimizers"], ids=ids(GOLDEN["optimizers"]))
def test_optimizer_is_deepspeeds(row):
    """Twelve steps of 1e-2 in float32. DeepSpeed's C++ takes 1 - beta in float32, which costs it up to 4e-6."""
    found = weights_after(report_of(block(row)).optimizer, GOLDEN["grads"], np.float32(GOLDEN["start"]))
    np.testing.assert_allclose(found[1], row["weights_after_2"], atol=2e-6)
    np.testing.assert_allclose(found[-1], row["weights"], atol=6e-6)


def lamb_by_hand(grads, w, *, lrs, betas, eps, eps_inside_sqrt, weight_decay, bounds, bias_correction):
    """What `fused_lamb_cuda_kernel.cu` computes."""
    b1, b2 = betas
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (lr, g) in enumerate(zip(lrs, grads, strict=True), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = m / (np.sqrt(v + eps) if eps_inside_sqrt else np.sqrt(v) + eps) + weight_decay * w
        w_norm, u_norm = np.sqrt((w * w).sum()), np.sqrt((update * update).sum())
        coeff = min(max(w_norm / u_norm, bounds[0]), bounds[1]) if w_norm and u_norm else 1.0
        w = w - (lr * np.sqrt(1 - b2**t) / (1 - b1**t) if bias_correction else lr) * coeff * update
        yield w


LAMB = {"betas": (0.9, 0.999), "eps": 1e-8, "eps_inside_sqrt": False, "weight_decay": 0.0, "bias_correction": True}


@pytest.mark.parametrize(
    ("params", "scale"),
    [
        ({}, 1),
        ({"bias_correction": False, "weight_decay": 0.1}, 1),
        ({"max_coeff": 0.3}, 1),
        ({"min_coeff": 2.0, "betas": [0.8, 0.95]}, 1),
        ({"eps_inside_sqrt": True, "eps": 1e-3}, 1),
        ({"weight_decay": 0.01}, 0),
    ],
)
def test_lamb_is_the_kernels(params, scale):
    bounds = (params.get("min_coeff", 0.01), params.get("max_coeff", 10.0))
    options = {**LAMB, **{key: value for key, value in params.items() if not key.endswith("coeff")}}
    start, grads = scale * np.array(GOLDEN["start"]), np.array(GOLDEN["grads"])
    with jax.enable_x64(True):
        report = report_of({"type": "Lamb", "params": {"lr": 0.01, **params}})
        found = weights_after(report.optimizer, grads, start)
    expected = list(lamb_by_hand(grads, start, lrs=[0.01] * len(grads), bounds=bounds, **options))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_torchs_adamw_decays_by_default():
    report = report_of({"type": "Adam", "params": {"torch_adam": True}})
    assert [row.note for row in report.rows if row.key == "optimizer.params.weight_decay"] == [
        "torch's default for AdamW, 0.01"
    ]
    zero_grad = weights_after(report.optimizer, [[0.0]], [1.0])
    np.testing.assert_allclose(zero_grad[0], 1 - 1e-3 * 0.01)
    own = weights_after(report_of({"type": "Adam", "params": {}}).optimizer, [[0.0]], [1.0])
    assert float(own[0][0]) == 1.0


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("OneBitAdam", "compresses"),
        ("ZeroOneAdam", "compresses"),
        ("OneBitLamb", "compresses"),
        ("Muon", "optax.contrib.muon"),
        ("MuAdam", "multi_transform"),
        ("RMSprop", "optax transformation"),
    ],
)
def test_optimizers_that_jzero_does_not_have(name, advice):
    report = refused({"type": name, "params": {"lr": 1e-3, "freeze_step": 10}})
    assert report.optimizer is None
    (row,) = report.refused
    assert (row.key, row.value) == ("optimizer.type", name)
    assert advice in row.note


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("optimizer.Adam", {"amsgrad": True}),
        ("optimizer.Adam", {"max_grad_norm": 1.0}),
        ("optimizer.Adam", {"lr": [1e-3, 1e-4]}),
        ("optimizer.SGD", {"dampening": 0.1}),
        ("optimizer.Adagrad", {"lr_decay": 0.1}),
        ("scheduler.WarmupLR", {"warmup_max_lr": [0.1, 0.2]}),
        ("scheduler.WarmupLR", {"last_batch_iteration": 5}),
    ],
)
def test_parameters_that_jzero_would_get_wrong(kind, params):
    block, _, name = kind.partition(".")
    blocks = {"optimizer": {"type": "Adam", "params": {}}, block: {"type": name, "params": params}}
    report = refused(blocks["optimizer"], blocks.get("scheduler"))
    assert [row.key for row in report.refused] == [f"{block}.params.{key}" for key in params]
    assert (report.optimizer, report.schedule) == (None, None)
