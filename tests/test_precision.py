"""Mixed precision: who holds which dtype, what travels in 16 bits, that masters and parameters stay together."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jzero
from jzero.layout.casts import apply_edits, positions_of, round_stochastically
from tests import models
from tests.tiers import singles, slow, stages

BF16 = jnp.bfloat16
ROWS = 24
LOW = jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16")


def make_config(stage, precision="bf16", **options):
    return jzero.ZeroConfig(stage=stage, precision=precision, **{"persistence_threshold": 0, **options})


def mlp_state(config, tx=None, params=None, **options):
    plain = TrainState.create(apply_fn=None, params=params or models.mlp_params(), tx=tx or optax.adamw(1e-2))
    return jzero.shard_train_state(plain, config=config, **options)


def train(state, num_steps=5, loss_fn=models.mlp_loss, **options):
    step = jzero.make_train_step(loss_fn, **options)
    losses = []
    for _ in range(num_steps):
        state, metrics = step(state, models.mlp_batch(ROWS))
        losses.append(float(metrics["loss"]))
    return state, losses


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, host(a), host(b))


def largest(tree):
    return max(float(np.max(np.abs(x))) for x in jax.tree.leaves(host(tree)))


def gap(a, b):
    return largest(jax.tree.map(lambda x, y: np.asarray(x, np.float32) - np.asarray(y, np.float32), a, b))


@stages(2, 3)
def test_who_holds_which_dtype(stage):
    state = mlp_state(make_config(stage))
    plan, own = jzero.plan_of(state), state.opt_state
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(BF16 if stage < 3 else jnp.float32)}
    if stage == 3:
        assert isinstance(own, tuple)  # the optimizer's own state: the shards are the masters
    else:
        assert isinstance(own, jzero.ZeroOptState)
        for master, param in zip(jax.tree.leaves(own.masters), jax.tree.leaves(models.mlp_params()), strict=True):
            assert master.dtype == jnp.float32
            assert master.addressable_shards[0].data.size < param.size or stage == 0 or param.size < 16
        assert_same(jzero.gather_params(state, masters=True), models.mlp_params())  # given values, not rounded ones
    _, grads = jzero.value_and_grad(models.mlp_loss)(state, models.mlp_batch(ROWS))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(BF16)}
    live = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    assert live == plan.bytes_per_device.params + plan.bytes_per_device.opt_state


@stages(1)
def test_parameters_stay_the_rounded_masters(stage):
    state, losses = train(mlp_state(make_config(stage)))
    masters = jzero.gather_params(state, masters=True)
    assert_same(jax.tree.map(lambda x: x.astype(BF16), masters), jzero.natural_params(state))
    assert losses[-1] < losses[0]
    assert gap(masters, jax.tree.map(lambda x: x.astype(BF16), masters)) > 0  # they do hold more


@stages(1, 3)
def test_equals_one_device_with_masters(stage):
    """Gradients of 8 slices in bf16, summed and applied in fp32 by plain optax: the same up to summation order."""
    policy = jzero.Precision(compute_dtype="bfloat16", reduce_dtype="float32", accumulate_dtype="float32")
    state, losses = train(mlp_state(make_config(stage, policy)))
    tx, masters, want = optax.adamw(1e-2), models.mlp_params(), []
    opt_state = tx.init(masters)

    @jax.jit
    def step(masters, opt_state, batch):
        params = jax.tree.map(lambda x: x.astype(BF16), masters)
        slices = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        each = [
            jax.value_and_grad(models.mlp_loss)(params, jax.tree.map(lambda x, i=i: x[i], slices)) for i in range(8)
        ]
        loss = sum(loss for loss, _ in each) / 8
        grads = jax.tree.map(lambda *g: sum(x.astype(jnp.float32) for x in g) / 8, *(g for _, g in each))
        updates, opt_state = tx.update(grads, opt_state, masters)
        return optax.apply_updates(masters, updates), opt_state, loss

    for _ in range(5):
        masters, opt_state, loss = step(masters, opt_state, models.mlp_batch(ROWS))
        want.append(float(loss))
    # A flip of one bf16 rounding (2^-9) of a parameter, or of a sum inside a product, is the least that can differ.
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    assert gap(jzero.gather_params(state, masters=True), masters) < 2e-3


def gathers(text):
    return re.findall(r'"?stablehlo\.all_gather"?\(.*?-> tensor<([^>]*)>', text, flags=re.DOTALL)


def gpt_case(config, **options):
    model = models.GPT(**options)
    state = jax.eval_shape(lambda: models.gpt_state(model, optax.adamw(1e-3)))
    return jzero.shard_train_state(models.gpt_state(model, optax.adamw(1e-3)), config=config), model, state


@singles(scan=[True, False], remat=[None, {}])
def test_no_gather_of_the_loss_moves_fp32(scan, remat):
    state, model, _ = gpt_case(make_config(3), scan=scan, remat=remat)
    text = jzero.make_train_step(models.gpt_loss(model)).lower(state, models.tokens(8)).as_text()
    found = gathers(text)
    assert len(found) >= 10
    assert all(shape.endswith("xbf16") for shape in found), found


@pytest.mark.parametrize("scan", [True, slow(False)])
def test_a_model_that_casts_by_itself_gathers_16_bits(scan):
    """precision="fp32", but the loss casts its parameters: the cast happens on the shard, before the gather."""
    state, model, _ = gpt_case(make_config(3, "fp32"), scan=scan)
    loss = models.gpt_loss(model)
    cast = lambda params, batch: loss(jax.tree.map(lambda x: x.astype(BF16), params), batch)
    found = gathers(jzero.make_train_step(cast).lower(state, models.tokens(8)).as_text())
    assert len(found) >= 10
    assert all(shape.endswith("xbf16") for shape in found), found


@stages(2, of=(1, 2))
def test_the_gather_after_the_update_moves_16_bits(stage):
    """The compiler inserts it; what becomes whole in the lowered program is bf16, never fp32."""
    state = mlp_state(make_config(stage))
    text = jzero.make_train_step(models.mlp_loss).lower(state, models.mlp_batch(ROWS)).as_text()
    whole = re.findall(r"sdy\.sharding_constraint %\S+ <@\w+, \[(?:\{\}(?:, )?)+\]> : tensor<([^>]*)>", text)
    large = [x for x in whole if x.count("x") == 2]  # matrices
    assert len(large) >= 3
    assert all(x.endswith("xbf16") for x in large), whole


@singles(precision=["bf16", "fp16"], stage=[2, 3, 0])
def test_an_edit_by_replace_is_taken_over(stage, precision):
    """The element that was edited moves in the master; the others keep every bit of theirs."""
    state, _ = train(mlp_state(make_config(stage, precision)))
    before = host(jzero.gather_params(state, masters=True))
    params = jax.tree.map(lambda x: x, state.params)
    params["layer_1"]["kernel"] = params["layer_1"]["kernel"].at[3, 5].set(7.0)
    zero = jax.tree.map(jnp.zeros_like, state.params)
    sgd = mlp_state(make_config(stage, precision), tx=optax.sgd(1.0), params=before)
    edited = sgd.replace(params={**sgd.params, "layer_1": params["layer_1"]})
    after = host(jzero.gather_params(edited.apply_gradients(grads=zero), masters=True))
    assert after["layer_1"]["kernel"][3, 5] == 7.0
    after["layer_1"]["kernel"][3, 5] = before["layer_1"]["kernel"][3, 5]
    assert_same(after, before)


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


@singles(stage=[2, 3, 0], sign=[1.0, -1.0])
def test_masters_too_small_for_fp16_go_on(stage, sign):
    """Their parameters are zeros of either sign, which no comparison may take for an edit."""
    plain = jzero.TrainState.create(params={"w": jnp.zeros((16, 8))}, tx=optax.sgd(1.0))
    state = jzero.shard_train_state(plain, config=make_config(stage, "fp16"))
    step = jax.jit(lambda state: state.apply_gradients(grads={"w": jnp.full((16, 8), -sign * 1e-9)}))
    for _ in range(10):
        state = step(state)
    np.testing.assert_allclose(jzero.gather_params(state, masters=True)["w"], sign * 1e-8, rtol=1e-5)


@stages(2, of=(0, 2))
def test_an_edit_is_seen_wherever_masters_are_read(stage):
    state, _ = train(mlp_state(make_config(stage)), 2)
    masters = host(jzero.gather_params(state, masters=True))
    kernel = state.params["layer_1"]["kernel"].at[2, 2].set(5.0)
    state = state.replace(params={**state.params, "layer_1": {**state.params["layer_1"], "kernel": kernel}})
    masters["layer_1"]["kernel"][2, 2] = 5.0
    assert_same(jzero.gather_params(state, masters=True), masters)
    assert_same(jzero.unshard_train_state(state).params, masters)
    assert_same(jzero.get_full_param(state, "layer_1/kernel"), masters["layer_1"]["kernel"])
    assert_same(jzero.gather_params(jzero.update_params(state, lambda p: p), masters=True), masters)
    for config in (make_config(3), make_config(stage)):
        assert_same(jzero.gather_params(jzero.shard_train_state(state, config=config), masters=True), masters)


@pytest.mark.parametrize("policy", [jzero.Precision(state_dtype="bfloat16"), "low"])
def test_laid_out_anew_low_precision_goes_on_to_the_bit(policy):
    """State dtypes, and the counter that drives stochastic rounding, survive another layout."""
    policy = LOW if policy == "low" else policy
    tx = optax.adam(1e-2)
    state, _ = train(mlp_state(make_config(2, policy), tx=tx), 3)
    moved = jzero.shard_train_state(state, config=make_config(3, policy), donate=False)
    moved = jzero.shard_train_state(moved, config=make_config(2, policy))
    assert jzero.plan_of(moved) == jzero.plan_of(state)
    assert int(moved.opt_state.num_updates) == 3
    on, _ = train(state, 2)
    again, _ = train(moved, 2)
    jax.tree.map(np.testing.assert_array_equal, host(on.params), host(again.params))
    moments = jzero.unshard_train_state(again).opt_state[0].nu  # in the optimizer's own dtype
    assert {x.dtype for x in jax.tree.leaves(moments)} == {jnp.dtype(jnp.float32)}


@stages(1, 3)
def test_update_params_writes_parameter_and_master(stage):
    state, _ = train(mlp_state(make_config(stage)), 2)
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
    state, _ = train(state, 1, loss)
    assert seen == {"kernel": BF16, "bias": jnp.float32}
    assert state.params["layer_0"]["bias"].dtype == jnp.float32
    if stage == 1:
        assert state.opt_state.masters["layer_0"]["bias"] is None  # it is its own master
    _, grads = jzero.value_and_grad(models.mlp_loss)(state, models.mlp_batch(ROWS))
    assert grads["layer_0"]["bias"].dtype == jnp.float32


def test_integers_and_wide_floats():
    params = {**models.mlp_params(), "table": jnp.arange(64), "flag": jnp.ones(9, bool)}
    tx = optax.multi_transform(
        {"train": optax.adam(1e-2), "none": optax.set_to_zero()},
        lambda p: jax.tree.map(lambda x: "train" if jnp.issubdtype(x.dtype, jnp.floating) else "none", p),
    )
    loss = lambda p, b: models.mlp_loss({k: p[k] for k in models.mlp_params()}, b) + 0.0 * p["table"].sum()
    for stage in (2, 3):
        state, losses = train(mlp_state(make_config(stage), tx=tx, params=params), 3, loss)
        assert losses[-1] < losses[0]
        assert_same(
            {"table": params["table"], "flag": params["flag"]},
            {k: jzero.gather_params(state)[k] for k in ("table", "flag")},
        )


def test_parameters_that_come_in_16_bits_get_masters_and_fp32_moments():
    params = models.mlp_params(BF16)
    state = mlp_state(make_config(2), params=params)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.masters)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.inner[0].mu)} == {jnp.dtype(jnp.float32)}
    state, losses = train(state)
    assert losses[-1] < losses[0]


def test_fp32_leaves_every_dtype_alone():
    params = models.mlp_params(BF16)
    state = mlp_state(make_config(3, "fp32"), params=params)
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {jnp.dtype(BF16)}


@stages(2, 3, of=(1, 2, 3))
def test_own_loops_follow_the_train_step(stage):
    """`value_and_grad` and plain `jax.jit` with `natural_params`: the same masters as the train step's."""
    tx = optax.sgd(0.1)
    want, _ = train(mlp_state(make_config(stage), tx=tx), 3)
    own = mlp_state(make_config(stage), tx=tx)
    loss_and_grads = jzero.value_and_grad(models.mlp_loss)
    plain = mlp_state(make_config(stage), tx=tx)

    @jax.jit
    def step(state, batch):
        natural = jzero.natural_params(state)
        assert {x.dtype for x in jax.tree.leaves(natural)} == {jnp.dtype(BF16)}
        return state.apply_gradients(grads=jax.grad(models.mlp_loss)(natural, batch))

    for _ in range(3):
        _, grads = loss_and_grads(own, models.mlp_batch(ROWS))
        own = own.apply_gradients(grads=grads)
        plain = step(plain, models.mlp_batch(ROWS))
    # One mean over the whole batch in bf16 (plain) against a sum of 8 means: bf16 rounding of gradients of order 1.
    assert gap(jzero.gather_params(own, masters=True), jzero.gather_params(want, masters=True)) < 1e-6
    assert gap(jzero.gather_params(plain, masters=True), jzero.gather_params(want, masters=True)) < 5e-3
    kinds = [[(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(state)] for state in (plain, own)]
    assert kinds[0] == kinds[1]


@stages(2, of=(0, 2, 3))
def test_born_sharded_equals_sharded_later(stage):
    def make_state(key):
        params = jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), models.mlp_params())
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    born = jzero.init_train_state(make_state, jax.random.key(0), config=make_config(stage))
    later = jzero.shard_train_state(make_state(jax.random.key(0)), config=make_config(stage))
    kinds = [[(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(state)] for state in (born, later)]
    assert kinds[0] == kinds[1]
    assert gap(jzero.gather_params(born, masters=True), jzero.gather_params(later, masters=True)) < 1e-6
    train(born, 1)


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


@singles(stage=[1, 3], precision=["bf16", "fp16"])
def test_natural_params_are_differentiable(stage, precision):
    state = mlp_state(make_config(stage, precision))
    loss = lambda p: models.mlp_loss(jzero.natural_params(state.replace(params=p)), models.mlp_batch(ROWS))
    have = jax.jit(lambda p: optax.tree.norm(jax.tree.map(jnp.float32, jax.grad(loss)(p))))(state.params)
    want = optax.tree.norm(jax.grad(models.mlp_loss)(models.mlp_params(), models.mlp_batch(ROWS)))
    assert float(have) == pytest.approx(float(want), rel=2e-2)


@stages(3, of=(0, 2, 3))
def test_bf16_beside_a_tensor_parallel_axis(stage):
    """XLA on CPUs ends the process where bf16 is summed over some axes of a mesh: jzero sums fp32 there."""
    mesh = jzero.make_mesh(data=4, model=2)
    _, losses = train(mlp_state(make_config(stage), mesh=mesh), 3)
    _, want = train(mlp_state(make_config(stage)), 3)
    np.testing.assert_allclose(losses, want, rtol=2e-2)


def test_a_tree_of_another_dtype_is_refused():
    state = mlp_state(make_config(2))
    wide = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), state.params))
    with pytest.raises(ValueError, match=r"layer_0/bias: float32, but the plan stores bfloat16[\s\S]*update_params"):
        train(wide, 1)


@pytest.mark.parametrize("precision", [slow("bf16"), "fp16"])
def test_flax_serialization(precision):
    state, _ = train(mlp_state(make_config(2, precision)), 1)
    fresh = mlp_state(make_config(2, precision))
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert_same(restored.params, state.params)
    assert_same(restored.opt_state, state.opt_state)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compute_dtype", "int8"),
        ("compute_dtype", 3),
        ("reduce_dtype", "float64"),
        ("state_dtype", "float16"),
        ("loss_scale", 0),
        ("loss_scale", float("nan")),
        ("loss_scale", 2**2000),
        ("loss_scale", True),
        ("loss_scale", "static"),
        ("loss_scale", np.array([0, 1])),
        ("master_dtype", "float16"),
        ("skip_nonfinite", 1),
    ],
)
def test_bad_policies(field, value):
    with pytest.raises(ValueError, match=f"`Precision.{field}`"):
        jzero.Precision(**{"compute_dtype": "bfloat16", field: value})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: jzero.ZeroConfig(precision="int8"), "`precision` must be one of"),
        (lambda: jzero.Precision(master_dtype="float32"), "set `compute_dtype` too"),
        (lambda: jzero.Precision(compute_dtype="float16", master_dtype="bfloat16"), "goes with"),
        (lambda: jzero.ZeroConfig(rules={"a": jzero.LeafRule(compute_dtype="float32")}), "set `precision` too"),
        (lambda: jzero.DynamicLossScale(initial=1e39), "`DynamicLossScale.initial`"),
        (lambda: jzero.DynamicLossScale(minimum=2.0, initial=1.0), "above `initial`"),
        (lambda: jzero.DynamicLossScale(window=0), "`DynamicLossScale.window`"),
        (lambda: jzero.DynamicLossScale(hysteresis=1.5), "`DynamicLossScale.hysteresis`"),
        (lambda: jzero.DynamicLossScale(consecutive_hysteresis=3), "`DynamicLossScale.consecutive_hysteresis`"),
    ],
)
def test_contradictions(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_dtypes_may_be_given_as_dtypes():
    policy = jzero.Precision(compute_dtype=jnp.bfloat16, state_dtype=jnp.bfloat16, reduce_dtype=np.float32)
    assert policy == jzero.Precision(compute_dtype="bfloat16", state_dtype="bfloat16", reduce_dtype="float32")
    assert jzero.Precision(compute_dtype="float16", loss_scale=np.float32(8)).loss_scale == 8


# Bytes.


def large_state(layers=4, d=256, vocab=8192):
    """Abstract; sizes as of a decoder, so that biases and norms weigh what they do in one."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    block = {
        "qkv": shape(d, 3 * d),
        "out": shape(d, d),
        "up": shape(d, 4 * d),
        "down": shape(4 * d, d),
        "norm": shape(d),
    }
    params = {"embed": shape(vocab, d), **{f"layer_{i}": block for i in range(layers)}}
    return jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=optax.adamw(1e-3)), params)


def psi(state):
    return sum(x.size for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("num_devices", [8, 64])
def test_bytes_of_zeros_table(num_devices):
    """16-bit parameters and gradients, fp32 master, momentum, variance: 2Ψ, 2Ψ, 12Ψ with ZeRO's divisions.

    At stage 3 the masters are the parameters: 12Ψ/N for both, and 2Ψ/N of gradients.
    """
    state, n = large_state(), num_devices
    mesh = jax.sharding.AbstractMesh((n,), ("data",))
    size = psi(state)
    wants = [(2, 2, 12), (2, 2, 12 / n), (2, 2 / n, 12 / n), (4 / n, 2 / n, 8 / n)]
    for stage, want in enumerate(wants):
        have = jzero.plan_train_state(state, config=make_config(stage), mesh=mesh).bytes_per_device
        for term, bytes_per_param in zip(have, want, strict=True):
            assert term == pytest.approx(bytes_per_param * size, rel=0.02)
        assert have.total == pytest.approx(sum(want) * size, rel=0.02)


def test_stage_3_holds_14_bytes_per_parameter_over_n():
    """Under ZeRO's 16Ψ/N; DeepSpeed's stage 3 holds 18Ψ/N (its fp16 copy beside fp32 gradients)."""
    state = large_state()
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    total = jzero.plan_train_state(state, config=make_config(3), mesh=mesh).bytes_per_device.total
    assert total / (psi(state) / 8) == pytest.approx(14.0, rel=0.001)


def test_gathered_bytes_count_16_bits():
    state, mesh = large_state(), jax.sharding.AbstractMesh((8,), ("data",))
    plan = jzero.plan_train_state(state, config=make_config(3), mesh=mesh)
    assert plan.gathered_bytes == 2 * 2 * psi(state)


# Less than fp32 between steps.


def test_stochastic_rounding_is_fair_and_exact_where_it_can_be():
    x = jnp.full((1 << 16,), 1.0 + 2.0**-9)  # a quarter of the way to the next bf16 above 1
    rounded = round_stochastically(x, jax.random.key(0), positions_of(x.shape)).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1.0, 1.0 + 2.0**-7}
    # Mean of 65536 draws of a coin with p = 1/4: standard error 1.3e-5.
    assert abs(float(rounded.mean()) - (1 + 2.0**-9)) < 6e-5
    special = jnp.array([0.0, -0.0, 1.0, -2.5, jnp.inf, -jnp.inf, 3.3895314e38])
    at = positions_of(special.shape)
    np.testing.assert_array_equal(np.asarray(round_stochastically(special, jax.random.key(1), at), np.float32), special)
    assert np.isnan(round_stochastically(jnp.array([jnp.nan]), jax.random.key(1), at[:1])[0])


@stages(2, 3, of=(0, 2, 3))
def test_no_fp32_between_steps(stage):
    state = mlp_state(make_config(stage, LOW), tx=optax.adam(1e-2))
    floating = [x for x in jax.tree.leaves((state.params, state.opt_state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floating} == {jnp.dtype(BF16)}
    state, losses = train(state, 20)
    _, want = train(mlp_state(make_config(stage), tx=optax.adam(1e-2)), 20)
    assert losses[-1] == pytest.approx(want[-1], rel=0.05)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.inner[0].nu)} == {jnp.dtype(BF16)}


def test_small_updates_are_not_lost():
    """Updates of a 2^-10 part of a weight vanish when rounded to nearest; stochastically they add up."""
    params = {"w": jnp.ones((64, 64))}
    loss = lambda p, batch: (p["w"].astype(jnp.float32) * batch.mean()).sum()
    config = make_config(3, jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16"))
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(2.0**-10)), config=config)
    step = jzero.make_train_step(loss)
    for _ in range(64):
        state, _ = step(state, jnp.ones((8,)))
    mean = float(jnp.asarray(jzero.gather_params(state)["w"], jnp.float32).mean())
    assert mean == pytest.approx(1 - 64 * 2.0**-10, abs=2e-3)


def test_stochastic_rounding_does_not_depend_on_the_mesh():
    runs = []
    for n in (1, 2, 8):
        mesh = jzero.make_mesh(devices=jax.devices()[:n])
        params = {"w": jnp.linspace(0.5, 2, 48 * 16).reshape(48, 16)}
        tx = optax.sgd(0.37)
        config = make_config(3, jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16"))
        with pytest.warns(match="one device") if n == 1 else contextlib.nullcontext():
            state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=tx), config=config, mesh=mesh)
        for _ in range(3):
            grads = {"w": jnp.linspace(0, 1e-2, 48 * 16, dtype=BF16).reshape(48, 16)}
            state = state.apply_gradients(grads=grads)
        runs.append(host(jzero.gather_params(state)))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_state_dtype_by_path():
    rules = {"layer_0/kernel": jzero.LeafRule(state_dtype="bfloat16")}
    state = mlp_state(make_config(2, rules=rules))
    nu = state.opt_state.inner[0].nu
    assert nu["layer_0"]["kernel"].dtype == BF16
    assert nu["layer_1"]["kernel"].dtype == jnp.float32
    train(state, 2)


# NNX.


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(37, 64, rngs=rngs)
        self.down = nnx.Linear(64, 11, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


@singles(stage=[1, 3], precision=["bf16", "fp16"])
def test_nnx(stage, precision):
    loss = lambda model, batch: jnp.square(model(batch["x"]) - batch["y"]).mean()
    model = Net(nnx.Rngs(0))
    pair = jzero.shard_train_state(
        (model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)), config=make_config(stage, precision)
    )
    step, losses = jzero.make_train_step(loss), []
    for _ in range(4):
        pair, metrics = step(pair, models.mlp_batch(ROWS))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    model, optimizer = pair
    # NNX's own update takes the same road.
    _, grads = jzero.value_and_grad(loss)(pair, models.mlp_batch(ROWS))
    before = host(jzero.gather_params(pair, masters=True))
    optimizer.update(model, grads)
    after = jzero.gather_params((model, optimizer), masters=True)
    assert gap(before, after) > 0
    assert int(optimizer.step[...]) == 5


@pytest.mark.parametrize(("dtype", "stage", "offload"), [("float8_e4m3fn", 1, "none"), ("float8_e5m2", 3, "host")])
def test_parameters_of_8_bits_train_as_optax_trains_them(dtype, stage, offload):
    """Gradients of 300 on each device: a sum of eight leaves the range of e4m3, 448, if it is taken in 8 bits."""
    params = {"w": jnp.linspace(-1, 1, 16 * 13).reshape(16, 13).astype(dtype)}
    loss_fn = lambda params, batch: 300 * (params["w"].astype(jnp.float32).sum() * batch.mean())
    tx, batch = optax.sgd(1e-3, momentum=0.5), np.ones((16, 1), np.float32)
    plain = jzero.TrainState.create(params=params, tx=tx)
    config = make_config(stage, "fp32", offload=jzero.Offload(optimizer=offload))
    state = jzero.shard_train_state(plain, config=config)
    step = jzero.make_train_step(loss_fn, accumulate_steps=2 if offload == "none" else 1)
    # Compilers for CPUs add 8-bit numbers in wider ones by themselves, so that results alone would not tell.
    text = step.lower(state, batch).as_text()
    reduced = re.findall(r'"?stablehlo\.reduce_scatter"?\(.*?-> tensor<([^>]*)>', text, flags=re.DOTALL)
    assert [shape.rpartition("x")[2] for shape in reduced] == ["f32"]
    for _ in range(2):
        plain = plain.apply_gradients(grads=jax.grad(loss_fn)(plain.params, batch))
        state, _ = step(state, batch)
    assert state.params["w"].dtype == dtype
    assert_same(jzero.unshard_train_state(state).params, plain.params)
