"""Derivative rules of the loss's own (`custom_vjp`, `custom_jvp`) and the values that they close over."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

RANDOM = np.random.default_rng(0)
PARAMS = {"w": RANDOM.normal(size=(6, 5)).astype(np.float32)}
X = RANDOM.normal(size=(8, 6)).astype(np.float32)


def scaled_backward(factor):
    @jax.custom_vjp
    def scaled(h):
        return h

    scaled.defvjp(lambda h: (h, None), lambda _, g: (g * factor,))
    return scaled


def scaled_tangents(factor):
    @jax.custom_jvp
    def scaled(h):
        return h

    scaled.defjvp(lambda primals, tangents: (primals[0], tangents[0] * factor))
    return scaled


def scaled_forward(factor):
    @jax.custom_vjp
    def scaled(h):
        return h * factor

    scaled.defvjp(lambda h: (h * factor, None), lambda _, g: (g,))
    return scaled


WAYS = {
    "plain": lambda fn, h: fn(h),
    "scan": lambda fn, h: jax.lax.scan(lambda h, _: (jnp.sin(fn(h)), None), h, None, length=2)[0],
    "checkpoint": lambda fn, h: jax.checkpoint(lambda h: jnp.sin(fn(h)))(h),
    "jit": lambda fn, h: jax.jit(lambda h: jnp.sin(fn(h)))(h),
    "vmap": lambda fn, h: jax.vmap(fn)(h),
}


def loss_of(make, way, factor_of):
    """A loss with a rule that closes over `factor_of(batch)`."""
    return lambda params, x: jnp.square(jnp.tanh(WAYS[way](make(factor_of(x)), x @ params["w"]))).mean()


@functools.cache
def sharded(stage):
    """A state for tracing, which consumes none."""
    plain = jzero.TrainState.create(params=PARAMS, tx=optax.sgd(0.1))
    return jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))


@pytest.mark.parametrize(
    ("way", "make"), [*zip(WAYS, itertools.cycle([scaled_backward, scaled_forward, scaled_tangents]))]
)
def test_a_rule_that_closes_over_a_value_of_the_loss_is_named(make, way):
    kind = "custom_jvp" if make is scaled_tangents else "custom_vjp"
    loss = loss_of(make, way, lambda x: 1 + jnp.abs(x).mean())
    step = jzero.make_train_step(loss, check_rows=False)  # the value is one of several rows
    for stage in (0, 3) if way == "plain" else (3,):
        with pytest.raises(ValueError, match=rf"float32\[\]: .*`{kind} scaled`") as error:
            step.lower(sharded(stage), X)
    assert way != "plain" or __file__ in str(error.value)
    jzero.make_eval_step(loss, check_rows=False).eval_shape(sharded(3), X)  # no rule runs


@pytest.mark.parametrize("make", [scaled_backward, scaled_tangents])
def test_values_from_around_the_step_may_be_closed_over(make):
    loss = lambda way, t: loss_of(make, way, lambda _: t)
    grads = jax.jit(lambda state, t, way: jzero.value_and_grad(loss(way, t))(state, X)[1], static_argnums=2)
    found = grads(sharded(3), jnp.float32(3), "plain")
    expected = jax.jit(jax.grad(loss("plain", 3.0)))(PARAMS, X)
    np.testing.assert_allclose(found["w"][:6], expected["w"], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="as an argument"):
        grads(sharded(3), jnp.float32(3), "jit")
