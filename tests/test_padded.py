"""Leaves of a state that are stored padded, as code sees them that is given `state.params`."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx, serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState
from optax import contrib

import jzero
from tests import models, shared
from tests.drawn import initializer, to_jax
from tests.shared import whole

CONFIG = jzero.ZeroConfig(stage=3, persistence_threshold=0)
TOKENS = np.arange(32) % 61


def params():
    rng = np.random.default_rng(0)
    shapes = {"embed": (61, 15), "layers": (3, 15, 15), "kernel": (3, 15, 5)}  # padded, flattened
    return {name: to_jax(rng.normal(size=shape) / 4, jnp.float32) for name, shape in shapes.items()}


SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)


def sharded(tx=SGD, names=("embed", "layers", "kernel"), stage=3):
    some = {name: x for name, x in params().items() if name in names}
    plain = TrainState.create(apply_fn=None, params=some, tx=tx)
    return plain, jzero.shard_train_state(plain, config=dataclasses.replace(CONFIG, stage=stage))


def loss(params, tokens):
    """What padding would change: a softmax over a tied vocabulary, means, layers, sizes."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["embed"][tokens], params["layers"])
    logits = x @ params["embed"].T
    rest = params["kernel"].mean() * params["kernel"].size + jnp.take(params["kernel"], 1, axis=0).std()
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean() + rest / 100


@pytest.mark.slow
def test_a_loop_of_ones_own_over_padded_leaves_is_right():
    plain, state = sharded(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)))

    @jax.jit
    def step(state):
        value, grads = jax.value_and_grad(loss)(state.params, TOKENS)
        return state.apply_gradients(grads=grads), value, optax.tree.norm(grads)

    (want, *numbers), (new, *got) = step(step(plain)[0]), step(step(state)[0])
    np.testing.assert_allclose(got, numbers, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole(new.params), want.params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert [x.sharding for x in jax.tree.leaves(new)] == [x.sharding for x in jax.tree.leaves(state)]
    assert all(not np.any(x[61:]) for x in jax.tree.leaves(new.params["embed"])), "padding stays zero"


def test_a_padded_leaf_is_used_as_an_array():
    plain, state = sharded()
    w, want = state.params["embed"], plain.params["embed"]
    assert (w.shape, w.ndim, w.size, w.dtype, len(w)) == (want.shape, 2, want.size, want.dtype, 61)
    x = np.ones((2, 61), np.float32)
    pairs = [(x @ w, x @ want), (1 - w, 1 - want), (w.at[-1].set(1), want.at[-1].set(1)), (np.asarray(w), want)]
    for got, expected in [*pairs, (jnp.where(w > 0, w, 0), jnp.where(want > 0, want, 0))]:
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    edited = state.replace(params={**state.params, "embed": w.at[0].set(2)})
    assert jax.tree.structure(edited) == jax.tree.structure(state)
    with pytest.raises(ValueError, match=r"'embed' .*`jzero.update_params`"):
        state.replace(params={**state.params, "embed": w * 2}).apply_gradients(grads=state.params)


@pytest.mark.parametrize("stage", [1, 3])
def test_flax_reads_and_writes_natural_shapes(stage):
    plain, _ = sharded(MOMENTUM)
    drawn = lambda tree: jax.tree.map(lambda x: np.cos(np.arange(x.size, dtype=x.dtype).reshape(x.shape)), tree)
    plain = plain.replace(step=3, params=drawn(plain.params), opt_state=drawn(plain.opt_state))
    state = jzero.shard_train_state(plain, config=dataclasses.replace(CONFIG, stage=stage))
    written = serialization.to_bytes(state)
    assert jax.tree.structure(serialization.msgpack_restore(written)) == jax.tree.structure(
        serialization.to_state_dict(plain)
    )
    jax.tree.map(np.testing.assert_array_equal, serialization.from_bytes(plain, written), plain)
    like = sharded(MOMENTUM, stage=stage)[1]
    for target in (like, jax.device_get(like)):
        again = serialization.from_bytes(target, serialization.to_bytes(plain))
        jax.tree.map(np.testing.assert_array_equal, again, state)


def parted(tree):
    """What Equinox makes of arguments of `filter_jit` (`eqx.partition`): arrays, and all the rest."""
    mask = jax.tree.map(lambda x: isinstance(x, jax.Array), tree)
    return [
        jax.tree.map(lambda is_array, x, own=own: x if is_array == own else None, mask, tree) for own in (True, False)
    ]


def joined(arrays, rest):
    """What it makes of both (`eqx.combine`)."""
    return jax.tree.map(lambda x, y: y if x is None else x, arrays, rest, is_leaf=lambda x: x is None)


@pytest.mark.parametrize("stage", [1, 3])
def test_libraries_that_do_not_know_padded_leaves_get_an_error_that_does(stage, tmp_path):
    _, state = sharded(ADAM, ("embed",), stage)
    calls = [
        lambda: orbax.checkpoint.PyTreeCheckpointer().save(tmp_path / "a", state),
        lambda: orbax.checkpoint.StandardCheckpointer().save(tmp_path / "b", state),
        lambda: checkpoints.save_checkpoint(str(tmp_path), state, 1),
        lambda: joined(*parted(state)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"jzero\.save_checkpoint.*jzero\.unshard_train_state"):
            call()


@pytest.mark.slow
def test_layers_take_padded_leaves():
    module, x = nn.Dense(9), np.ones((16, 13), np.float32)
    variables = {"params": models.draw_params(module, x)}
    state = TrainState.create(apply_fn=module.apply, params=variables["params"], tx=SGD)
    state = jzero.shard_train_state(state, config=CONFIG)
    np.testing.assert_allclose(state.apply_fn({"params": state.params}, x), module.apply(variables, x), rtol=1e-5)

    model = nnx.Linear(13, 9, rngs=nnx.Rngs(0))
    want = model(x)
    model, _ = jzero.shard_train_state((model, nnx.Optimizer(model, SGD, wrt=nnx.Param)), config=CONFIG)
    np.testing.assert_allclose(model(x), want, rtol=1e-5)


def test_what_is_made_of_padding_is_refused():
    _, state = sharded()
    with pytest.raises(ValueError, match=r"'embed' .*natural_params"):
        float(jax.tree.map(jnp.mean, state.params)["embed"])
    with pytest.raises(ValueError, match="'embed' has the shape"):
        jax.lax.scan(lambda total, row: (total + row.max(), None), 0.0, state.params["embed"])


def small_loss(params, tokens=TOKENS):
    logits = jnp.tanh(params["embed"][tokens]) @ params["embed"].T
    rest = [jnp.square(x).mean() for name, x in params.items() if name != "embed"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean() + sum(rest)


@jax.jit
def step_by_hand(plain):
    grads = jax.grad(small_loss)(plain.params)
    return plain.apply_gradients(grads=grads), grads


def assert_close(found, want, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **(tolerance or {"atol": 1e-5})), found, want)


def test_functions_of_parameters_gradients_and_optimizer_state_see_one_shape():
    plain, state = sharded(contrib.schedule_free_adamw(1e-2), ("embed",))
    _, grads = jzero.value_and_grad(small_loss)(state, TOKENS)
    (want, plain_grads), new = step_by_hand(plain), state.apply_gradients(grads=grads)
    z = np.asarray(want.opt_state.z["embed"])
    pairs = [
        (contrib.schedule_free_eval_params, (want.params["embed"] - (1 - 0.9) * z) / 0.9),
        (lambda opt_state, params: opt_state.z, z),
    ]
    for made, expected in pairs:
        found = made(new.opt_state, new.params)["embed"]
        assert found.shape == (61, 15)
        assert_close(np.asarray(found), expected)
    moved = jax.tree.map(lambda p, g: p - g, state.params, grads)
    assert_close(np.asarray(moved["embed"]), np.asarray(plain.params["embed"]) - np.asarray(plain_grads["embed"]))


def test_the_gradient_that_a_line_search_keeps_is_that_of_the_stored_parameters():
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True))
    plain, state = sharded(tx, ("embed",))
    value_fn = lambda params: jnp.square(params["embed"]).sum() / 4  # whose gradient is half of the parameters

    def step(params_of, state):
        value, grads = optax.value_and_grad_from_state(value_fn)(params_of(state), state=state.opt_state)
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, **extra)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    stored = jax.jit(functools.partial(step, lambda state: state.params))
    assert_close(np.asarray(stored(stored(state)).params["embed"]), plain.params["embed"] / 4)
    with pytest.raises(TypeError, match="stored with padding"):
        jax.eval_shape(functools.partial(step, jzero.natural_params), state)
    with pytest.raises(ValueError, match=r"stored with padding: .*plain arrays"):
        jax.tree.map(jnp.add, state.params, plain.params)


CREATE = {"jzero": jzero.TrainState.create, "flax": functools.partial(TrainState.create, apply_fn=None)}


@pytest.mark.parametrize("library", CREATE)
def test_a_second_optimizer_over_padded_parameters(library):
    plain, first = sharded(SGD, ("embed", "kernel"))
    second = functools.partial(CREATE[library], tx=optax.adafactor(1e-2, min_dim_size_to_factor=2))
    if library == "flax":  # rows and columns of padded matrices
        with pytest.raises(ValueError, match=r"(?s)v_col/embed: .*\(61,\)"):
            jzero.shard_train_state(second(params=first.params), config=CONFIG)
        second = functools.partial(CREATE[library], tx=ADAM)
    of_plain = jzero.shard_train_state(second(params=plain.params), config=CONFIG)
    state = jzero.shard_train_state(second(params=first.params), config=CONFIG, donate=True)
    assert jzero.plan_of(state).leaves == jzero.plan_of(of_plain).leaves
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, of_plain.opt_state)
    jax.tree.map(np.testing.assert_array_equal, state.params, of_plain.params)


def test_a_step_refuses_leaves_that_another_plan_laid_out():
    plain, state = sharded()
    config = dataclasses.replace(CONFIG, rules={"embed": jzero.LeafRule(dim=1)})
    mixed = state.replace(params=jzero.shard_train_state(plain, config=config).params)
    with pytest.raises(ValueError, match=r"\(61, 16\), .*\(64, 15\)"):
        jzero.make_train_step(loss)(mixed, TOKENS)
    with pytest.raises(ValueError, match=r"\(64, 15\), .*shard_train_state"):
        mixed.apply_gradients(grads=plain.params)


def test_small_odd_leaves_train_whole_beside_others():
    plain, _ = sharded(MOMENTUM)
    state = jzero.shard_train_state(plain, config=shared.config(2, padding_threshold=800))
    assert {x.path for x in jzero.plan_of(state).leaves if x.grad.cut is None} == {"layers", "kernel"}
    step = jzero.make_train_step(small_loss, accumulate_steps=2, clip_norm=0.1)
    tokens = np.repeat(TOKENS, 4)
    jzero.analyze(step, state, tokens).verify()
    for _ in range(2):
        state, _ = step(state, tokens)
    tx = optax.chain(optax.clip_by_global_norm(0.1), plain.tx)
    want = TrainState.create(apply_fn=None, params=plain.params, tx=tx)
    for _ in range(2):
        want = step_by_hand(want)[0]
    assert_close(whole(state.params), want.params)
    moments = whole(state.opt_state[0].trace)
    assert_close(moments, want.opt_state[1][0].trace)


def test_flattened_leaves_are_updated_as_they_are_stored():
    """Elements, sums over them (norms that scale each leaf), and numbers that are not zero where padding is."""
    shifted = optax.stateless(lambda updates, params: jax.tree.map(lambda g, p: g + 0.1 * jnp.cos(p), updates, params))
    tx = optax.chain(shifted, optax.trace(0.9), optax.scale_by_trust_ratio(), optax.sgd(0.1))
    rng, shapes = np.random.default_rng(0), {"embed": (61, 15), "matrix": (11, 12), "layers": (3, 11, 11)}
    drawn = {name: to_jax(rng.normal(size=shape) / 4, jnp.float32) for name, shape in shapes.items()}
    plain = TrainState.create(apply_fn=None, params=drawn, tx=tx)
    state = jzero.shard_train_state(plain, config=CONFIG)
    assert {x.path for x in jzero.plan_of(state).leaves if x.grad.cut.flat} == {"matrix", "layers"}
    step = jzero.make_train_step(small_loss)
    for _ in range(2):
        state, _ = step(state, TOKENS)
        plain = step_by_hand(plain)[0]
    assert_close(whole(state.params), plain.params)
    layers = state.opt_state[1].trace["layers"].stored  # each 11 · 11 elements and 7 zeros
    assert layers.shape == (3, 1, 128)
    assert not np.asarray(layers)[..., 121:].any()


class Two(nnx.Module):
    def __init__(self):
        linear = lambda m, n, seed: nnx.Linear(m, n, kernel_init=initializer(seed), rngs=nnx.Rngs(0))
        self.a, self.b = linear(5, 23, 0), linear(23, 3, 1)
        self.c, self.d = linear(5, 23, 2), linear(23, 3, 3)

    def __call__(self, x):
        softmax = lambda h: jax.nn.softmax(h * 5)  # padding would change it
        return self.b(softmax(self.a(x))) - self.d(softmax(self.c(x)))


def test_two_optimizers_of_one_nnx_model_take_turns():
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    loss = lambda model, x: jnp.square(model(x) - 1).mean()
    wrts = [nnx.All(nnx.Param, lambda path, _, names=names: path[0] in names) for names in ("ab", "cd")]
    txs = [SGD, MOMENTUM]

    @nnx.jit
    def plain_steps(model, optimizers, x):
        for optimizer, wrt in zip(optimizers, wrts, strict=True):
            optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model, x))

    model, want = Two(), Two()
    optimizers = [nnx.Optimizer(want, tx, wrt=wrt) for tx, wrt in zip(txs, wrts, strict=True)]
    steps, pairs = [jzero.make_train_step(loss) for _ in wrts], []
    for tx, wrt in zip(txs, wrts, strict=True):  # the second one is made for a model that is sharded already
        model, optimizer = jzero.shard_train_state((model, nnx.Optimizer(model, tx, wrt=wrt)), config=CONFIG)
        pairs.append(optimizer)
    for _ in range(2):
        for i, step in enumerate(steps):
            (model, pairs[i]), _ = step((model, pairs[i]), x)
        plain_steps(want, optimizers, x)
    assert_close(jzero.gather_params((model, pairs[0])), nnx.as_pure(nnx.state(want, wrts[0])))


@pytest.mark.slow
def test_a_padded_leaf_is_not_assigned_to_in_place():
    model = nnx.Linear(5, 23, rngs=nnx.Rngs(0))
    model, _ = jzero.shard_train_state((model, nnx.Optimizer(model, SGD, wrt=nnx.Param)), config=CONFIG)
    with pytest.raises(TypeError, match=r"'kernel' .*update_params"):
        model.kernel[...] = jnp.clip(model.kernel[...], -0.1, 0.1)
    model.kernel.set_value(model.kernel.at[...].set(jnp.clip(model.kernel[...], -0.1, 0.1)))
    np.testing.assert_allclose(jnp.abs(model.kernel[...]).max(), 0.1)


@pytest.mark.parametrize("where", ["none", "host"])
def test_parameters_of_a_state_begin_another_one_whole(where):
    plain, _ = sharded(names=("embed", "kernel"))
    config = dataclasses.replace(CONFIG, offload=jzero.Offload(params=where))
    state = jzero.shard_train_state(plain, config=config)
    again = jzero.TrainState.create(params=state.params, tx=SGD)
    for name, x in again.params.items():
        assert type(x) is type(jnp.ones(3))
        assert (x.sharding.is_fully_replicated, x.sharding.memory_kind) == (True, "device")
        assert x.sharding.device_set == set(jax.devices())
        np.testing.assert_array_equal(x, plain.params[name])
    jax.tree.map(lambda x: x.delete(), jax.tree.leaves(state.params))
    with pytest.raises(RuntimeError, match="was consumed"):
        jzero.TrainState.create(params=state.params, tx=SGD)
