"""Parameters on the host: fetched where they are gathered, written back by the update; and activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

import jzero
from jzero.core.engine.placed import PLACED, operations_of
from jzero.core.engine.recompute import recompute
from jzero.core.jaxpr.primitives import REMAT
from tests import light_decoder, models, shared
from tests.checkpoint_states import arrays, assert_same_bits
from tests.drawn import to_jax
from tests.tiers import slow

ALL = jzero.Offload(params="host", optimizer="host", chunk_bytes=4096)
PARAMS = jzero.Offload(params="host", chunk_bytes=4096)
NONE = jzero.Offload()
ADAMW = optax.adamw(1e-3)


def config(offload, precision="fp32", **options):
    return jzero.ZeroConfig(stage=3, precision=precision, persistence_threshold=50, offload=offload, **options)


def kinds(tree):
    return {jax.tree_util.keystr(path): x.sharding.memory_kind for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def layers_state(tx):
    """Returns a state of as little as has layers, to loop over, and a parameter beside them."""
    draw = np.random.default_rng(0).normal
    shapes = {"up": (3, 40, 160), "bias": (3, 160), "down": (3, 160, 40)}
    layers = {name: to_jax(draw(size=shape) / shape[-2] ** 0.5, jnp.float32) for name, shape in shapes.items()}
    params = {"layers": layers, "out": to_jax(draw(size=(40, 24)) / 6, jnp.float32)}
    return jzero.TrainState.create(apply_fn=apply_layers, params=params, tx=tx)


def apply_layers(params, x, remat=False):
    layer = lambda x, p: (x + jnp.tanh(x @ p["up"] + p["bias"][None]) @ p["down"], None)
    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])[0] @ params["out"]


def layers_loss(params, batch, remat=False):
    x = batch.astype(params["out"].dtype)
    return jnp.square(apply_layers(params, x, remat).astype(jnp.float32) - 1).mean()


def evaluate_layers(params, batch):
    return {"loss": layers_loss(params, batch)}


def layers_batch(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 40)).astype(np.float32)


def train(plain, loss_fn, batches, offload, precision, **options):
    state = jzero.shard_train_state(plain, config=config(offload, precision))
    return shared.train(jzero.make_train_step(loss_fn, clip_norm=1.0, **options), state, batches)


@pytest.mark.parametrize(
    ("remat", "precision", "offload", "options"),
    [
        (True, "bf16", ALL, {"accumulate_steps": 2}),
        slow(False, "fp32", PARAMS, {}),
    ],
)
def test_the_numbers_are_those_without_offload(remat, precision, offload, options):
    plain, loss_fn = layers_state(optax.adamw(1e-3, eps=1e-6)), functools.partial(layers_loss, remat=remat)
    batches = [layers_batch(32, seed) for seed in range(3)]
    (expected, losses), (state, found) = (
        train(plain, loss_fn, batches, way, precision, **options) for way in (NONE, offload)
    )
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    whole = [jax.tree.leaves(jzero.gather_params(x, masters=True)) for x in (state, expected)]
    for a, b in zip(*whole, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)  # of steps of 1e-3
    plan = jzero.plan_of(state)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(state.params)] == [
        "pinned_host" if leaf.param.memory == "host" else "device" for leaf in plan.leaves
    ]
    away = [leaf for leaf in plan.leaves if leaf.param.memory == "host"]
    assert sum(x.param.size for x in away) > 0.95 * sum(leaf.param.size for leaf in plan.leaves)
    assert all(leaf.param.cut is not None for leaf in away)


def device_puts(jaxpr, inside=()):
    """Yields `(shape, where to, primitives around it)` of everything that is moved between memories."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in PLACED:
            yield from device_puts(operations_of(eqn), inside)
        if eqn.primitive.name == "device_put":
            yield from ((tuple(v.aval.shape), v.aval.memory_space.name, inside) for v in eqn.outvars)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from device_puts(getattr(inner, "jaxpr", inner), (*inside, eqn.primitive.name))


def test_scanned_layers_are_fetched_one_by_one():
    state = jzero.shard_train_state(layers_state(ADAMW), config=config(ALL))
    evaluate, step = jzero.make_eval_step(evaluate_layers), jzero.make_train_step(layers_loss)
    for fn, passes in ((evaluate, 1), (step, 2)):
        moved = list(device_puts(fn.trace(state, layers_batch(8)).jaxpr.jaxpr))
        shards_of_a_layer = [(5, 160), (20, 40)]  # up and down
        found = {"Device": [], "Host": []}
        for shape, where, inside in moved:
            if "scan" in inside and shape in shards_of_a_layer:
                found[where].append(shape)
        assert sorted(found["Device"]) == sorted(shards_of_a_layer * passes)
        assert sorted(found["Host"]) == sorted(shards_of_a_layer * (passes - 1)), "gradients leave layer by layer"
        stacks = [shape for shape, where, _ in moved if len(shape) == 3 and shape[0] == 3 and where == "Device"]
        assert all(4 * np.prod(shape) <= 4096 for shape in stacks), "of stacks no more than a chunk"


def test_what_passes_through_the_host_is_not_reckoned_as_the_devices():
    step, plain, batch = jzero.make_train_step(layers_loss), layers_state(ADAMW), layers_batch(8)
    near, away = (jzero.estimate_step_memory(step, plain, batch, config=config(offload)) for offload in (NONE, ALL))
    plan = jzero.plan_train_state(plain, config=config(ALL))
    assert away.host == plan.host_bytes_per_device.total
    assert away.arguments < 0.05 * near.arguments
    assert away.at_peak["gradients"] < 0.2 * near.at_peak["gradients"], "vectors have theirs on the device"


@pytest.mark.slow
def test_evaluation_and_gradients():
    plain, batch = layers_state(ADAMW), layers_batch(16)
    away = jzero.shard_train_state(plain, config=config(ALL))
    same, expected = jax.jit(jax.value_and_grad(layers_loss))(plain.params, batch)
    evaluate = jzero.make_eval_step(evaluate_layers)
    assert float(evaluate(away, batch)["loss"]) == pytest.approx(float(same), rel=1e-6)
    loss, grads = jzero.value_and_grad(layers_loss)(away, batch)
    assert float(loss) == pytest.approx(float(same), rel=1e-6)
    found = arrays(jzero.natural_params(away.replace(params=grads)))
    for path, x in arrays(expected).items():
        np.testing.assert_allclose(found[path], x, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"lie on the host .*updated by"):
        away.apply_gradients(grads=grads)
    predict = jax.jit(lambda s: s.apply_fn(jzero.natural_params(s), batch))
    want = jax.jit(apply_layers)(plain.params, batch)
    np.testing.assert_allclose(predict(away), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_born_saved_restored_and_moved(tmp_path):
    def make(key):
        return jzero.TrainState.create(params={"w": jax.random.normal(key, (129, 41))}, tx=optax.adam(1e-3))

    loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
    state = jzero.init_train_state(make, jax.random.key(0), config=config(ALL, "bf16"))
    assert set(kinds(state.params).values()) == {"pinned_host"}
    assert jzero.plan_of(state).host_bytes_per_device == (136 * 41 // 8 * 2, 0, 136 * 41 // 8 * 12)  # 129 rows padded
    step = jzero.make_train_step(loss_fn)
    state, _ = step(state, np.ones((8, 129), np.float32))
    jzero.save_checkpoint(tmp_path / "x", state)
    back = jzero.restore_checkpoint(tmp_path / "x", jzero.abstract_train_state(state, config=config(ALL, "bf16")))
    assert_same_bits(arrays(back), arrays(state))
    assert [x.sharding for x in jax.tree.leaves(back)] == [x.sharding for x in jax.tree.leaves(state)]
    before = arrays(back)
    away = jzero.offload_train_state(back)
    back = jzero.reload_train_state(away)
    assert_same_bits(arrays(back), before)
    near = jzero.shard_train_state(back, config=config(NONE, "bf16"))
    assert_same_bits(arrays(jzero.gather_params(near)), arrays(jzero.gather_params(back, masters=True)))
    edited = jzero.set_full_param(back, "w", value=np.full((129, 41), 0.3))
    assert edited.params["w"].sharding.memory_kind == "pinned_host"
    edited, _ = step(edited, np.zeros((8, 129), np.float32))
    np.testing.assert_allclose(jzero.get_full_param(edited, "w"), 0.3, atol=2e-3)


def test_a_state_with_its_own_apply_gradients_cannot():
    """It could compute on parameters, before or after the update; what stands for them would give wrong numbers."""

    class Clipped(TrainState):
        def apply_gradients(self, *, grads):
            new = super().apply_gradients(grads=grads)
            return new.replace(params=jax.tree.map(lambda x: jnp.clip(x, -0.01, 0.01), new.params))

    state = Clipped.create(apply_fn=None, params={"w": jnp.ones((64, 64))}, tx=optax.sgd(0.1))
    step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
    batch = np.ones((8, 64), np.float32)
    with pytest.raises(TypeError, match=r"`Clipped` .*`apply_gradients`"):
        step(jzero.shard_train_state(state, config=config(ALL)), batch)
    near, _ = step(jzero.shard_train_state(state, config=config(jzero.Offload(optimizer="host"))), batch)
    assert float(jnp.abs(jzero.gather_params(near)["w"]).max()) == np.float32(0.01)


LAYERS, WIDTH = 3, 41


def train_decoder(loss_fn, remat, **options):
    plain = light_decoder.make_state(optax.adamw(1e-3), layers=LAYERS, width=WIDTH, vocab=128)
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, persistence_threshold=50))
    step = jzero.make_train_step(loss_fn, remat=remat, **options)
    found = []
    for seed in range(2):
        state, metrics = step(state, models.tokens(16, seed, vocab=128))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return found, step, state


def to_host(jaxpr):
    """Returns the shapes of what is moved to the host, of a slice of a loop or as a whole."""
    return sorted(shape for shape, where, _ in device_puts(jaxpr) if where == "Host")


@pytest.mark.slow
def test_what_goes_between_layers():
    loss_fn = light_decoder.loss_with(jax.checkpoint(light_decoder.apply_layer))
    expected, _, _ = train_decoder(loss_fn, True, accumulate_steps=2)
    found, step, state = train_decoder(loss_fn, "offload", accumulate_steps=2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jaxpr = step.trace(state, models.tokens(16, vocab=128)).jaxpr.jaxpr
    assert to_host(jaxpr) == [(1, models.SEQ, WIDTH)], "one array per layer: what it is called with"
    back = [shape for shape, _, inside in device_puts(jaxpr) if "scan" in inside]
    assert back.count((1, models.SEQ, WIDTH)) == 2, "there and back"


def test_loops_in_a_layer_recompute_as_written():
    def layer(x, w):
        parts = jax.lax.map(jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x))), x.reshape(4, -1))
        return parts.reshape(x.shape) @ w, None

    loss = lambda w, x: jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()
    jaxpr = jax.make_jaxpr(loss)(jnp.ones((3, 8, 8)), jnp.ones((2, 8)))

    def depths(jaxpr, depth=0):
        for eqn in jaxpr.eqns:
            is_remat = eqn.primitive.name in REMAT
            yield from [depth] * is_remat
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from depths(getattr(inner, "jaxpr", inner), depth + is_remat)

    assert list(depths(recompute(jaxpr, "offload", []).jaxpr)) == [0, 1], "the layer once, and each part in it"


@pytest.mark.slow
def test_named_activations():
    params = {f"w{i}": jnp.asarray(np.random.default_rng(i).normal(size=(64, 64)) / 8) for i in range(3)}

    def layer(w, x):
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return checkpoint_name(jnp.sin(hidden) * 2, "out")

    def loss(policy, params, batch):
        apply = jax.checkpoint(layer, policy=policy) if policy else layer
        for name in sorted(params):
            batch = apply(params[name], batch)
        return jnp.square(batch).mean()

    def run(policy):
        config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
        state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)
        step = jzero.make_train_step(functools.partial(loss, policy))
        batch = np.random.default_rng(9).normal(size=(16, 64)).astype(np.float32)
        moved = to_host(step.trace(state, batch).jaxpr.jaxpr)
        state, metrics = step(state, batch)
        return moved, float(metrics["loss"]), float(metrics["grad_norm"])

    moved, *found = run(jzero.offload_activations("hidden", keep=["out"]))
    none, *expected = run(None)
    assert (moved, none) == ([(2, 64)] * 3, []), "the device's rows, and no gathered parameter"
    np.testing.assert_allclose(found, expected, rtol=1e-6)
