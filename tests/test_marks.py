"""`Max` and `Min` in what a loss returns, and constants: what the step returns is that of the whole batch.

The reference is the same function of the whole batch, on one device without jzero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from tests import shared

ROWS, WIDTH = 48, 5
W = np.random.default_rng(0).normal(size=(WIDTH, 3)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
BATCH = {"x": X, "label": (7 * X[:, 0]).astype(np.int32)}
RECORDS = jzero.Offload(optimizer="host", compute="host", delay=1)


def make_state(mesh=None, **fields):
    return shared.sharded({"w": jnp.asarray(W)}, optax.adam(0.1), mesh=jzero.make_mesh(**mesh or {}), **fields)


def extremes(params, batch):
    """Largest and smallest values of several dtypes and shapes."""
    y, label = batch["x"] @ params["w"], batch["label"]
    largest = {
        "each": y.max(0),
        "nested": [y.max().astype(jnp.bfloat16), {"fp8": y.max().astype(jnp.float8_e4m3fn)}],
        "label": label.max(),
        "byte": jnp.abs(label).max().astype(jnp.uint8),
        "any": (y > 4).any(),
    }
    return largest, {"each": y.min(0), "label": label.min().astype(jnp.int16), "all": (y > -9).all()}


def loss_fn(params, batch):
    largest, smallest = extremes(params, batch)
    size = jnp.abs(batch["x"] @ params["w"]).max()
    marked = {"max": jzero.Max(largest), "deep": {"min": jzero.Min(smallest)}, "size": jzero.Max(size)}
    constants = {"layers": 12, "causal": True, "sizes": np.array([3, 5])}
    return jnp.square(batch["x"] @ params["w"]).mean(), {**marked, **constants}


def check(aux):
    largest, smallest = jax.jit(extremes)({"w": W}, BATCH)
    expected = {
        "max": largest,
        "deep": {"min": smallest},
        "size": np.abs(X @ W).max(),
        "layers": np.int32(12),
        "causal": np.bool_(True),
        "sizes": np.array([3, 5], np.int32),
    }
    assert jax.tree.structure(aux) == jax.tree.structure(expected)
    for x, want in zip(jax.tree.leaves(aux), jax.tree.leaves(expected), strict=True):
        assert x.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(want, np.float64), rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 1},
        {},
        {"mesh": {"replica": 2, "data": 4}, "replica_axis": "replica"},
        {"mesh": {"data": 2, "model": 4}},
        {"offload": RECORDS},
    ],
)
def test_extremes_and_constants_are_those_of_the_whole_batch(fields, steps):
    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=steps)
    check(step(make_state(**fields), BATCH)[1]["aux"])


def test_other_steps_return_them_too():
    (_, aux), _ = jzero.value_and_grad(loss_fn, has_aux=True)(make_state(), BATCH)
    check(aux)
    check(jzero.make_eval_step(lambda params, batch: loss_fn(params, batch)[1])(make_state(), BATCH))


@pytest.mark.parametrize("steps", [1, 2])
def test_what_is_not_a_number_is_not_lost(steps):
    x = X.copy()
    x[30, 1] = np.nan
    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=steps)
    aux = step(make_state(), {**BATCH, "x": x})[1]["aux"]
    for found in jax.tree.leaves([aux["size"], aux["max"]["nested"], aux["max"]["each"], aux["deep"]["min"]["each"]]):
        assert np.isnan(np.asarray(found, np.float32)).all()


@pytest.mark.filterwarnings("ignore:The mesh has one device")
@pytest.mark.parametrize("options", [{}, {"check_rows": False}])
def test_constants_pass_on_one_device_and_unchecked(options):
    step = jzero.make_eval_step(lambda params, batch: {"layers": 12}, **options)
    for mesh in ({"data": 8}, {"data": 1, "devices": jax.devices()[:1]}):
        assert int(step(make_state(mesh), BATCH)["layers"]) == 12


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda batch: len(batch["x"]), "aux['n']: int32[]"),
        (lambda batch: jnp.arange(len(batch["x"])), "aux['n']: int32[6]"),
        (lambda batch: batch["label"].max(), "aux['n']: int32[]"),
        (lambda batch: lax.axis_index("data"), "aux['n']: int32[]"),
        (lambda batch: jzero.Max(batch["x"]), "aux['n']: Max of float32[6, 5], one value per example"),
        (lambda batch: jzero.Min(batch["x"].max() * 1j), "aux['n']: Min of complex64, which has no order"),
        (lambda batch: jzero.Max(jzero.Summed(batch["x"].sum())), "aux['n']: Summed inside of Max"),
    ],
)
def test_what_has_no_extreme_and_is_no_constant_is_named(value, said):
    with pytest.raises(TypeError) as error:
        jzero.make_eval_step(lambda params, batch: {"n": value(batch)})(make_state(), BATCH)
    assert said in str(error.value)
    assert "jzero.Max(x)" in str(error.value) or "jzero.PerExample(x)" in str(error.value)


def test_a_weighted_metric_is_the_sum_divided_by_the_weights():
    """Of rows with other weights on each device: no mean of means, nor its inverse."""
    weights = np.arange(ROWS, dtype=np.float32)
    metric = lambda params, b: {"nested": [jzero.Weighted((b["w"] * b["x"][:, 0]).sum(), b["w"].sum())]}
    found = jzero.make_eval_step(metric)(make_state(), {"x": X, "w": weights})
    np.testing.assert_allclose(found["nested"][0], np.average(X[:, 0], weights=weights), rtol=1e-5)
