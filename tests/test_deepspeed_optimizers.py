"""Schedules and optimizers of a ds_config have the numbers that DeepSpeed's own have, step by step.

`data/deepspeed_golden.json` was written by DeepSpeed 0.19.8 itself, see `data/make_deepspeed_golden.py`. LAMB runs on
GPUs alone; its formula stands below, in float64.
"""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

DATA = pathlib.Path(__file__).parent / "data"
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


# Schedules


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

    found = np.stack(jax.jit(lambda: jax.lax.scan(step, tx.init(params), length=100)[1])(), axis=1)
    checked = [i for i, step in enumerate(STEPS) if step < 100]
    expected = [(row["lr"][i], row["betas"][i][0]) for i in checked]
    np.testing.assert_allclose(found[STEPS[checked]], expected, rtol=5e-7)
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


# Optimizers


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
