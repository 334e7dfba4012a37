"""A base in integers, or in 4 bits, under adapters: it trains them, keeps its bits, and counts by them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax

import jzero
from jzero.core.plan.choice import choose_packed_cut
from tests import shared
from tests.compiled import analyze
from tests.drawn import to_jax
from tests.plan_states import plan_for
from tests.quantized import BATCH, FLAT, SECONDARY, TWO, WIDTH, config_of, numpy_rounded
from tests.test_two_hops import LAYERS
from tests.tiers import slow

TX = optax.sgd(0.05, momentum=0.9)


def lora_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / 8).astype(np.float32)
    base = {"w": draw(LAYERS, WIDTH, WIDTH), "b": draw(LAYERS, WIDTH)}
    return {"base": base, "a": draw(LAYERS, WIDTH, 4), "c": draw(LAYERS, 4, WIDTH)}


def lora_loss(params, batch):
    def layer(h, p):
        return h + jnp.tanh(h @ p["base"]["w"] + p["base"]["b"][None] + h @ p["a"] @ p["c"]), None

    return jnp.square(lax.scan(layer, batch, params)[0]).mean()


def lora_state(config, sizes=FLAT):
    plain = jzero.TrainState.create(params=lora_params(), tx=TX)
    mesh = jzero.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    return jzero.shard_train_state(plain, config=config, mesh=mesh, trainable="(?!base).*")


KINDS = {"gather": "int8", "reduce": "int8"}


@pytest.mark.parametrize(
    ("sizes", "precision", "kinds", "frozen"),
    [(TWO, "bf16", KINDS, "nf4"), slow({"data": 3}, "fp32", {}, "int8")],
)
def test_lora_trains_on_an_integer_base(tmp_path, sizes, precision, kinds, frozen):
    """As dense training on the rounded base; its bytes and gathers are those of integers."""
    fields = SECONDARY if "node" in sizes else {}
    state = lora_state(config_of(frozen=frozen, precision=precision, **kinds, **fields), sizes)
    plan, step = jzero.plan_of(state), jzero.make_train_step(lora_loss)
    (leaf,) = [leaf.param for leaf in plan.leaves if leaf.path == "base/w"]
    assert str(leaf.stored_dtype) == "int8"
    num_bytes = {"int8": 62 + 4, "nf4": 31 + 4}[frozen]  # of a row of 61: an even number of elements, and a scale
    assert leaf.bytes_per_device == LAYERS * -(-WIDTH // plan.num_shards) * num_bytes
    base = jax.device_get(jzero.gather_params(state))["base"]["w"]
    np.testing.assert_allclose(base, numpy_rounded(lora_params()["base"]["w"], 1, frozen, 1), rtol=1e-6)
    report = jzero.analyze(step, state, BATCH)
    report.verify()
    assert any(r.kind == "all-gather" and r.dtype == "s8" for r in report.collectives)
    shards = np.asarray(jax.tree.leaves(state.params["base"]["w"])[0])
    rounded = lora_params()
    rounded["base"]["w"] = base
    as_it_is = {"base/.*": jzero.LeafRule(quantize=False)}  # levels of nf4 are none of int8
    exact_config = config_of(precision=precision, rules=as_it_is, **kinds, **fields)
    plain = jzero.TrainState.create(params=rounded, tx=TX)
    exact = jzero.shard_train_state(plain, config=exact_config, mesh=plan.mesh, trainable="(?!base).*")
    for _ in range(3):
        state, metrics = step(state, BATCH)
        exact, want = step(exact, BATCH)
        assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
    np.testing.assert_array_equal(np.asarray(jax.tree.leaves(state.params["base"]["w"])[0]), shards)


@pytest.mark.slow
def test_an_integer_base_keeps_its_bits(tmp_path):
    """To other numbers of devices and back, through checkpoints, as numbers and as integers again."""
    config = config_of(frozen="nf4")
    state = lora_state(config)
    bits = np.asarray(jax.tree.leaves(state.params["base"]["w"])[0])
    natural = np.asarray(jzero.get_full_param(state, "base/w"))
    np.testing.assert_array_equal(np.asarray(state.params["base"]["w"]), natural)
    assert state.params["base"]["w"].dtype == jnp.float32
    jzero.save_checkpoint(tmp_path / "saved", state)
    other = jzero.abstract_train_state(state, config=config, mesh=jzero.make_mesh(devices=jax.devices()[:3]))
    moved = jzero.restore_checkpoint(tmp_path / "saved", other)
    np.testing.assert_array_equal(jzero.get_full_param(moved, "base/w"), natural)
    again = jzero.shard_train_state(moved, mesh=jzero.make_mesh())
    np.testing.assert_array_equal(np.asarray(jax.tree.leaves(again.params["base"]["w"])[0]), bits)
    numbers = jzero.restore_checkpoint(tmp_path / "saved", jzero.abstract_train_state(state, config=config_of()))
    np.testing.assert_array_equal(jzero.get_full_param(numbers, "base/w"), natural)
    new = jzero.set_full_param(state, "base/w", value=2 * natural)
    np.testing.assert_array_equal(jzero.get_full_param(new, "base/w"), 2 * natural)
    whole = jzero.unshard_train_state(new)
    np.testing.assert_array_equal(whole.params["base"]["w"], 2 * natural)
    born = jzero.init_train_state(
        lambda key: jzero.TrainState.create(params=lora_params(), tx=TX),
        jax.random.key(0),
        config=config,
        mesh=jzero.make_mesh(),
        trainable="(?!base).*",
    )
    np.testing.assert_array_equal(np.asarray(jax.tree.leaves(born.params["base"]["w"])[0]), bits)


def test_an_integer_base_keeps_its_bits_where_its_numbers_would_be_cut_otherwise():
    """8 divides one dimension, 3 the other."""
    x = np.random.default_rng(0).normal(size=(40, 63)).astype(np.float32)
    state = jzero.TrainState.create(params={"base": x, "adapter": np.ones(3, np.float32)}, tx=TX)
    meshes = [jzero.make_mesh(devices=jax.devices()[:n]) for n in (8, 3, 8)]
    plans = [jzero.plan_train_state(state, config=config_of(), mesh=mesh) for mesh in meshes]
    dims = [leaf.param.cut.dim for plan in plans for leaf in plan.leaves if leaf.path == "base"]
    assert dims[0] != dims[1]
    held = []
    for mesh in meshes:
        state = jzero.shard_train_state(state, config=config_of(frozen="int8"), mesh=mesh, trainable="adapter")
        held.append(np.asarray(state.params["base"]))
    assert 0 < np.abs(held[0] - x).max() < np.abs(x).max() / 127
    np.testing.assert_array_equal(held[1], held[0])
    np.testing.assert_array_equal(held[2], held[0])


def test_a_base_is_cut_where_any_number_of_devices_pads_little():
    """Of a stack, the first dimension that 128 devices pad by an eighth at most; else the largest."""
    for shape, dim in (((3, 1024, 2048), 1), ((3, 1023, 2048), 2), ((3, 900, 800), 1), ((1024, 2048), 1)):
        plans = [plan_for({"w": shape}, num_shards=n, stage=3) for n in (2, 8, 128)]
        cuts = [dataclasses.replace(plan.leaves[0].param.cut, num_stacked=len(shape) - 2) for plan in plans]
        assert [choose_packed_cut(cut).dim for cut in cuts] == 3 * [dim]


# Frozen parameters of 4 bits: they train adapters, count by their bits, and come back from checkpoints.

D, V, R, B = 36, 61, 4, 24
"""On 8 devices `odd` is padded, `even` is not."""
LR = 1e-2


def make_params(dtype):
    rng = np.random.default_rng(0)
    low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    draw = lambda *shape: to_jax(rng.integers(low, high + 1, shape), dtype)
    return {
        "odd": draw(V, D),
        "even": draw(64, D),
        "scale": to_jax(np.full(D, 0.05)),
        "lora_a": to_jax(rng.normal(size=(V, R))),
        "lora_b": to_jax(rng.normal(size=(R, D)) / 9),
    }


def loss_fn(params, batch):
    real = batch.dtype
    w = params["odd"].astype(real) * params["scale"].astype(real)[None]
    y = batch @ w + batch @ params["lora_a"].astype(real) @ params["lora_b"].astype(real)
    return jnp.square(y @ params["even"].astype(real).T / 36).mean()


def sharded(params, *, num_devices=8, stage=3, precision="fp32", place=jzero.shard_train_state):
    plain = jzero.TrainState.create(params=params, tx=optax.adam(LR))
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices])
    return place(plain, config=shared.config(stage, precision=precision), mesh=mesh, trainable="lora_.")


def batch_of(precision):
    x = np.random.default_rng(1).normal(size=(B, V))
    return x.astype(jnp.bfloat16 if precision == "bf16" else np.float32)


def whole(state):
    return {path: np.asarray(x) for path, x in jzero.gather_params(state, masters=True).items()}


@functools.cache
def losses_on_one_device(dtype):
    params = make_params(dtype)
    adapters = {name: params[name] for name in ("lora_a", "lora_b")}
    loss = lambda adapters, batch: loss_fn(params | adapters, batch)
    return shared.by_optax(loss, adapters, optax.adam(LR), [batch_of("fp32")] * 4).losses


@pytest.mark.smoke
@pytest.mark.parametrize(("dtype", "stage", "precision"), [("int4", 3, "fp32"), slow("uint4", 1, "bf16")])
def test_adapters_train_and_the_base_keeps_its_bits(dtype, stage, precision):
    """As one device trains them, in fp32; in bf16 the loss falls alike."""
    params, batch = make_params(dtype), batch_of(precision)
    state = sharded(params, stage=stage, precision=precision)
    state, losses = shared.train(jzero.make_train_step(loss_fn), state, [batch] * 4)
    np.testing.assert_allclose(losses, losses_on_one_device(dtype), rtol=1e-5 if precision == "fp32" else 0.03)
    assert losses[-1] < losses[0]
    found = whole(state)
    for name in ("odd", "even"):
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], np.asarray(params[name]))


def test_two_numbers_take_a_byte():
    """By hand, and by the compiler: what it reuses of the state is all of it."""
    state = sharded(make_params("uint4"))
    plan = jzero.plan_of(state)
    parts = [x.addressable_shards[0].data for x in jax.tree.leaves(state.params)]
    assert plan.bytes_per_device.params == sum(x.size // 2 if x.dtype == "uint4" else 4 * x.size for x in parts)
    report = analyze(jzero.make_train_step(loss_fn), state, batch_of("fp32"))
    report.verify()


@pytest.mark.slow
def test_checkpoints_keep_every_bit(tmp_path):
    """From 8 devices at stage 3 to 3 at stage 1; plain Orbax reads the same numbers."""
    params = make_params("uint4")
    state = sharded(params, precision="bf16")
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(state, step=1)
        manager.wait()
        like = sharded(params, num_devices=3, stage=1, precision="bf16", place=jzero.abstract_train_state)
        restored = manager.restore(like)
        assert not [path for path, *_ in manager.last_restore.cast if path in ("params/odd", "params/even")]
    found = whole(restored)
    for name, want in params.items():
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(found[name], np.asarray(want))
    with ocp.StandardCheckpointer() as plain:
        there = plain.restore((tmp_path / "run" / "1" / "default").absolute())["params"]
    for name in ("odd", "even"):
        np.testing.assert_array_equal(np.asarray(there[name]).astype(int), np.asarray(params[name]).astype(int))


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    """Bytes that were never of 4 bits."""
    state = sharded(make_params("uint8"))
    jzero.save_checkpoint(tmp_path / "bytes", state)
    with pytest.raises(ValueError, match=r"params/odd: uint8 .* uint4"):
        jzero.restore_checkpoint(tmp_path / "bytes", sharded(make_params("uint4")))
