"""Leaves of a state that are stored padded, as code sees them that is given `state.params`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jzero

CONFIG = jzero.ZeroConfig(stage=3, persistence_threshold=0)
TOKENS = np.arange(32) % 61


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embed": (61, 15), "layers": (3, 15, 15), "kernel": (3, 15, 5)}  # padded, flattened
    return {name: jax.random.normal(key, shape) / 4 for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def sharded(tx):
    plain = TrainState.create(apply_fn=None, params=params(), tx=tx)
    return plain, jzero.shard_train_state(plain, config=CONFIG)


def loss(params, tokens):
    """What padding would change: a softmax over a tied vocabulary, means, layers, sizes."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["embed"][tokens], params["layers"])
    logits = x @ params["embed"].T
    rest = params["kernel"].mean() * params["kernel"].size + jnp.take(params["kernel"], 1, axis=0).std()
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean() + rest / 100


def test_a_loop_of_ones_own_over_padded_leaves_is_right():
    plain, state = sharded(optax.adamw(1e-2, weight_decay=0.1))

    def steps(state):
        for _ in range(2):
            value, grads = jax.value_and_grad(loss)(state.params, TOKENS)
            state = state.apply_gradients(grads=grads)
        return state, value, optax.tree.norm(grads)

    (want, *numbers), (new, *got) = steps(plain), jax.jit(steps)(state)
    np.testing.assert_allclose(got, numbers, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), jzero.gather_params(new), want.params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert [x.sharding for x in jax.tree.leaves(new)] == [x.sharding for x in jax.tree.leaves(state)]
    assert all(not np.any(x[61:]) for x in jax.tree.leaves(new.params["embed"])), "padding stays zero"


def test_a_padded_leaf_is_used_as_an_array():
    plain, state = sharded(optax.sgd(0.1))
    w, want = state.params["embed"], plain.params["embed"]
    assert (w.shape, w.ndim, w.size, w.dtype, len(w)) == (want.shape, 2, want.size, want.dtype, 61)
    x = np.ones((2, 61), np.float32)
    pairs = [(x @ w, x @ want), (1 - w, 1 - want), (w.at[-1].set(1), want.at[-1].set(1)), (np.asarray(w), want)]
    for got, expected in [*pairs, (jnp.where(w > 0, w, 0), jnp.where(want > 0, want, 0))]:
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    edited = state.replace(params={**state.params, "embed": w.at[0].set(2)})
    assert jax.tree.structure(edited) == jax.tree.structure(state)
    with pytest.raises(ValueError, match=r"'embed' is stored as \(64, 15\).*`jzero.update_params`"):
        state.replace(params={**state.params, "embed": w * 2}).apply_gradients(grads=state.params)
    loaded = serialization.from_bytes(state, serialization.to_bytes(state))
    np.testing.assert_array_equal(jzero.gather_params(loaded)["embed"], want)


def test_layers_take_padded_leaves():
    module, x = nn.Dense(9), jnp.ones((16, 13))
    variables = module.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=module.apply, params=variables["params"], tx=optax.sgd(0.1))
    state = jzero.shard_train_state(state, config=CONFIG)
    np.testing.assert_allclose(state.apply_fn({"params": state.params}, x), module.apply(variables, x), rtol=1e-5)

    model = nnx.Linear(13, 9, rngs=nnx.Rngs(0))
    want = model(x)
    model, _ = jzero.shard_train_state((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), config=CONFIG)
    np.testing.assert_allclose(model(x), want, rtol=1e-5)


def test_what_is_made_of_padding_is_refused():
    _, state = sharded(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"'embed' has the shape \(61, 15\) and is stored padded.*natural_params"):
        float(jax.tree.map(jnp.mean, state.params)["embed"])
    with pytest.raises(ValueError, match="'embed' has the shape"):
        jax.lax.scan(lambda total, row: (total + row.max(), None), 0.0, state.params["embed"])
