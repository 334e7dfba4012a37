"""Masters: edits of 16-bit parameters reach them, wherever they are read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.layout.casts import apply_edits
from tests import models
from tests.precision_states import (
    BF16,
    LOW,
    ROWS,
    assert_same,
    host,
    make_config,
    mlp_params,
    mlp_state,
    train,
)


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 2), ("fp16", 3), ("bf16", 0)])
def test_an_edit_by_replace_is_taken_over(stage, precision):
    """The element that was edited moves in the master; the others keep every bit of theirs."""
    state = mlp_state(make_config(stage, precision), tx=optax.sgd(1.0))
    before = host(jzero.gather_params(state, masters=True))
    layer = state.params["layer_0"]
    edited = state.replace(params={"layer_0": {**layer, "kernel": layer["kernel"].at[3, 5].set(7.0)}})
    zero = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), state.params)
    after = host(jzero.gather_params(edited.apply_gradients(grads=zero), masters=True))
    assert after["layer_0"]["kernel"][3, 5] == 7.0
    after["layer_0"]["kernel"][3, 5] = before["layer_0"]["kernel"][3, 5]
    assert_same(after, before)
    assert_same(before, mlp_params())  # not rounded


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_edit_is_told_from_the_rounding_of_any_number(dtype):
    """A master keeps its bits beside its own rounding; any other parameter, infinite or tiny, replaces it."""
    bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 6e-8, 65519.0, 65520.0, 3.4e38, 1.00390625], np.float32
    )
    master = np.concatenate([bits.view(np.float32), special])
    master = master[~np.isnan(master)]
    with np.errstate(over="ignore"):
        rounded = master.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(apply_edits(master, rounded)).view(np.uint32), master.view(np.uint32))
    other = np.roll(rounded, 1)
    expected = np.where(other == rounded, master, other.astype(np.float32))
    assert np.mean(other == rounded) < 0.4  # fp16 has no number for most of fp32's: those are infinite, or zero
    np.testing.assert_array_equal(apply_edits(master, other), expected)


def test_an_edit_is_seen_wherever_masters_are_read():
    state = mlp_state(make_config(2))
    masters = host(mlp_params())
    layer = state.params["layer_0"]
    state = state.replace(params={"layer_0": {**layer, "kernel": layer["kernel"].at[2, 2].set(5.0)}})
    masters["layer_0"]["kernel"][2, 2] = 5.0
    assert_same(jzero.gather_params(state, masters=True), masters)
    assert_same(jzero.unshard_train_state(state).params, masters)
    assert_same(jzero.get_full_param(state, "layer_0/kernel"), masters["layer_0"]["kernel"])
    assert_same(jzero.gather_params(jzero.update_params(state, lambda p: p), masters=True), masters)
    for config in (make_config(3), make_config(2)):
        assert_same(jzero.gather_params(jzero.shard_train_state(state, config=config), masters=True), masters)


@pytest.mark.slow
def test_laid_out_anew_low_precision_goes_on_to_the_bit():
    """State dtypes, and the counter that drives stochastic rounding, survive another layout."""
    state, _ = train(mlp_state(make_config(2, LOW), tx=optax.adam(1e-2)), 3)
    moved = jzero.shard_train_state(state, config=make_config(3, LOW), donate=False)
    moved = jzero.shard_train_state(moved, config=make_config(2, LOW))
    assert jzero.plan_of(moved) == jzero.plan_of(state)
    assert int(moved.opt_state.num_updates) == 3
    on, _ = train(state, 2)
    again, _ = train(moved, 2)
    jax.tree.map(np.testing.assert_array_equal, host(on.params), host(again.params))
    moments = jzero.unshard_train_state(again).opt_state[0].nu  # in the optimizer's own dtype
    assert {x.dtype for x in jax.tree.leaves(moments)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("stage", [1, 3])
def test_update_params_writes_parameter_and_master(stage):
    state = mlp_state(make_config(stage), params=mlp_params(sizes=models.TWO_LAYERS))
    before = host(jzero.gather_params(state, masters=True))
    same = jzero.update_params(state, lambda p: p)
    assert_same(before, jzero.gather_params(same, masters=True))  # nothing is rounded on the way
    new = jzero.update_params(state, lambda p: jax.tree.map(lambda x: x * 0.75, p), paths="layer_0/.*")
    part = jax.tree.map(lambda x: x * np.float32(0.75), before["layer_0"])
    assert_same(part, jzero.gather_params(new, masters=True)["layer_0"])
    assert_same(jax.tree.map(lambda x: x.astype(BF16), part), jzero.natural_params(new)["layer_0"])
    assert_same(before["layer_1"], jzero.gather_params(new, masters=True)["layer_1"])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rule_keeps_a_leaf_in_fp32(stage):
    rules = {".*/bias": jzero.LeafRule(compute_dtype="float32")}
    seen = {}

    def loss(params, batch):
        seen.update(jax.tree.map(lambda x: x.dtype, params)["layer_0"])
        return models.mlp_loss(params, batch)

    state = mlp_state(make_config(stage, rules=rules))
    after, _ = jzero.make_train_step(loss).trace(state, models.mlp_batch(ROWS)).out_info
    assert seen == {"kernel": BF16, "bias": jnp.float32}
    for x in (state, after):
        assert x.params["layer_0"]["bias"].dtype == jnp.float32
        if stage == 1:
            assert x.opt_state.masters["layer_0"]["bias"] is None  # it is its own master
    _, grads = jzero.value_and_grad(models.mlp_loss)(state, models.mlp_batch(ROWS))
    assert grads["layer_0"]["bias"].dtype == jnp.float32
