"""Mixed precision: who holds which dtype, what travels in 16 bits, that masters and parameters stay together."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jzero
from jzero.core.layout.casts import apply_edits
from jzero.core.layout.padded import is_padded
from tests import light_decoder, models, shared
from tests.precision_states import (
    ADAMW,
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
from tests.stablehlo import in_line


def largest(tree):
    return max(float(np.max(np.abs(x))) for x in jax.tree.leaves(host(tree)))


def gap(a, b):
    return largest(jax.tree.map(lambda x, y: np.asarray(x, np.float32) - np.asarray(y, np.float32), a, b))


@pytest.mark.parametrize("stage", [2, 3])
def test_who_holds_which_dtype(stage):
    state = mlp_state(make_config(stage))
    plan, own = jzero.plan_of(state), state.opt_state
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(BF16 if stage < 3 else jnp.float32)}
    if stage == 3:
        assert isinstance(own, tuple)  # the optimizer's own state: the shards are the masters
    else:
        assert isinstance(own, jzero.ZeroOptState)
        for master, param in zip(jax.tree.leaves(own.masters), jax.tree.leaves(mlp_params()), strict=True):
            assert master.dtype == jnp.float32
            assert master.addressable_shards[0].data.size < param.size or param.size < 16
        assert_same(jzero.gather_params(state, masters=True), mlp_params())  # given values, not rounded ones
    _, grads = jzero.value_and_grad(models.mlp_loss)(state, models.mlp_batch(ROWS))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(BF16)}
    live = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    assert live == plan.bytes_per_device.params + plan.bytes_per_device.opt_state


@functools.cache
def trained_on_one_device(dtype, loss_scale):
    """Gradients of 8 slices in 16 bits, summed and applied in fp32 by plain optax: the losses, and the masters."""
    masters, losses = mlp_params(), []
    opt_state = ADAMW.init(masters)

    def scaled_loss(params, part):
        loss = models.mlp_loss(params, part)
        return loss * loss_scale, loss

    @jax.jit
    def step(masters, opt_state, batch):
        params = jax.tree.map(lambda x: x.astype(dtype), masters)
        slices = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        grads, losses = jax.lax.map(lambda part: jax.grad(scaled_loss, has_aux=True)(params, part), slices)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32).mean(0) / loss_scale, grads)
        updates, opt_state = ADAMW.update(grads, opt_state, masters)
        return optax.apply_updates(masters, updates), opt_state, losses.mean()

    for _ in range(5):
        masters, opt_state, loss = step(masters, opt_state, models.mlp_batch(ROWS))
        losses.append(float(loss))
    return losses, masters


@pytest.mark.parametrize(("stage", "dtype", "loss_scale"), [(3, "bfloat16", None), (1, "float16", 2.0**10)])
def test_equals_one_device_with_masters(stage, dtype, loss_scale):
    """The same up to summation order; parameters stay the rounded masters."""
    policy = jzero.Precision(
        compute_dtype=dtype, reduce_dtype="float32", accumulate_dtype="float32", loss_scale=loss_scale
    )
    state, losses = train(mlp_state(make_config(stage, policy)))
    want, expected = trained_on_one_device(dtype, loss_scale or 1.0)
    # A flip of one bf16 rounding (2^-9) of a parameter, or of a sum inside a product, is the least that can differ.
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    assert losses[-1] < losses[0]
    masters = host(jzero.gather_params(state, masters=True))
    assert gap(masters, expected) < 2e-3
    rounded = jax.tree.map(lambda x: x.astype(dtype), masters)
    assert_same(rounded, jzero.natural_params(state))
    assert gap(masters, rounded) > 0  # they do hold more


def gathers(text):
    return re.findall(r'"?stablehlo\.all_gather"?\(.*?-> tensor<([^>]*)>', text, flags=re.DOTALL)


@pytest.mark.parametrize(("scan", "remat"), [(True, False), (False, True)])
def test_no_gather_of_the_loss_moves_fp32(scan, remat):
    layer = jax.checkpoint(light_decoder.apply_layer) if remat else light_decoder.apply_layer
    plain = light_decoder.make_state(shared.sgd(0.1), layers=2, width=37, vocab=61, scan=scan)
    state = jzero.abstract_train_state(plain, config=make_config(3))
    step = jzero.make_train_step(light_decoder.loss_with(layer))
    found = gathers(in_line(step.lower(state, models.tokens(8, vocab=61)).as_text()))
    assert len(found) >= len(jax.tree.leaves(plain.params))
    assert all(shape.endswith("xbf16") for shape in found), found


def test_the_gather_after_the_update_moves_16_bits():
    """The compiler inserts it; what becomes whole in the lowered program is bf16, never fp32."""
    state = mlp_state(make_config(2), params=models.mlp_params())
    text = jzero.make_train_step(models.mlp_loss).lower(state, models.mlp_batch(ROWS)).as_text()
    whole = re.findall(r"sdy\.sharding_constraint %\S+ <@\w+, \[(?:\{\}(?:, )?)+\]> : tensor<([^>]*)>", text)
    large = [x for x in whole if x.count("x") == 2]  # matrices
    assert len(large) >= 3
    assert all(x.endswith("xbf16") for x in large), whole


def test_parameters_that_come_in_16_bits_get_masters_and_fp32_moments():
    params = mlp_params(BF16)
    state = mlp_state(make_config(2), params=params)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.masters)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.inner[0].mu)} == {jnp.dtype(jnp.float32)}
    state, losses = train(state)
    assert losses[-1] < losses[0]


def test_layouts_and_precisions_into_each_other():
    state, _ = train(mlp_state(make_config(2)), 2)
    masters, moments = host(jzero.gather_params(state, masters=True)), host(state.opt_state.inner[0].nu)
    whole = jzero.unshard_train_state(state)
    assert_same(whole.params, masters)
    assert isinstance(whole.opt_state, tuple)
    for config in (make_config(3), make_config(3, "fp32"), make_config(1, "fp16"), make_config(2)):
        state = jzero.shard_train_state(state, config=config, donate=True)
        assert_same(jzero.gather_params(state, masters=True), masters)
    assert_same(
        jax.tree.map(lambda x, m: x[tuple(map(slice, m.shape))], host(state.opt_state.inner[0].nu), moments), moments
    )
    again, _ = train(jzero.shard_train_state(whole, config=make_config(2)), 2)
    on, _ = train(state, 2)
    assert_same(jzero.gather_params(again, masters=True), jzero.gather_params(on, masters=True))


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "fp16")])
def test_natural_params_are_differentiable(stage, precision):
    state = mlp_state(make_config(stage, precision))
    loss = lambda p: models.mlp_loss(jzero.natural_params(state.replace(params=p)), models.mlp_batch(ROWS))
    norm = lambda tree: np.sqrt(sum(np.square(np.asarray(x, np.float32)).sum() for x in jax.tree.leaves(tree)))
    want = jax.jit(jax.grad(models.mlp_loss))(mlp_params(), models.mlp_batch(ROWS))
    assert norm(jax.jit(jax.grad(loss))(state.params)) == pytest.approx(norm(want), rel=2e-2)


def test_bf16_beside_a_tensor_parallel_axis():
    """XLA on CPUs ends the process where bf16 is summed over some axes of a mesh: jzero sums fp32 there."""
    mesh = jzero.make_mesh(data=4, model=2)
    _, losses = train(mlp_state(make_config(3), mesh=mesh), 3)
    want, _ = trained_on_one_device("bfloat16", 1.0)
    np.testing.assert_allclose(losses, want[:3], rtol=2e-2)


def test_a_tree_of_another_dtype_is_refused():
    state = mlp_state(make_config(2))
    wide = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), state.params))
    with pytest.raises(ValueError, match=r"layer_0/bias: .*stores bfloat16"):
        train(wide, 1)


def test_flax_serialization():
    fresh = mlp_state(make_config(2, "fp16"))
    rng = np.random.default_rng(0)
    drawn = lambda x: jax.device_put(rng.integers(1, 99, x.shape).astype(x.dtype), x.sharding)
    state = jax.tree.map(drawn, fresh)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    natural = lambda tree: jax.tree.map(np.asarray, tree, is_leaf=is_padded)  # padding is not written
    assert_same(natural(restored.params), natural(state.params))
    assert_same(natural(restored.opt_state), natural(state.opt_state))


def test_dtypes_may_be_given_as_dtypes():
    policy = jzero.Precision(compute_dtype=jnp.bfloat16, state_dtype=jnp.bfloat16, reduce_dtype=np.float32)
    assert policy == jzero.Precision(compute_dtype="bfloat16", state_dtype="bfloat16", reduce_dtype="float32")
    assert jzero.Precision(compute_dtype="float16", loss_scale=np.float32(8)).loss_scale == 8


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
