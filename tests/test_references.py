"""References, `jax.new_ref`: those that a function makes compute as ever, and those from outside are named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import shared

PARAMS = {"w": jnp.linspace(-1, 1, 64 * 24).reshape(64, 24), "v": jnp.linspace(-1, 1, 24 * 17).reshape(24, 17)}
BATCH = np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(16, 64)
STAGES = pytest.mark.parametrize("stage", [1, 3])


def loss_fn(params, batch):
    return jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"]).mean()


def sharded(stage, tx=None, **fields):
    return shared.sharded(PARAMS, tx or shared.sgd(0.1), stage, **fields)


def holders():
    """Functions that read or write a reference from outside, directly and in a part of their program."""
    count = jax.new_ref(jnp.zeros(()))

    def writes(params, batch):
        count[...] += 1
        return loss_fn(params, batch)

    def reads(params, batch):
        return loss_fn(params, batch) * (1 + count[...])

    def scans(params, batch):
        def body(carry, x):
            count[...] += x
            return carry, None

        jax.lax.scan(body, 0.0, jnp.arange(3.0))
        return loss_fn(params, batch)

    return {"writes": writes, "reads": reads, "scans": scans, "jits": jax.jit(writes)}


@STAGES
@pytest.mark.parametrize("name", ["writes", "reads", "scans", "jits"])
@pytest.mark.parametrize("make", [jzero.make_train_step, jzero.value_and_grad, jzero.make_eval_step])
def test_a_loss_that_holds_a_reference_is_told(make, name, stage):
    step = make(holders()[name])
    for call in (step, jax.jit(step), step.lower):
        with pytest.raises(ValueError, match=r"The loss reads or writes a reference \(`jax.new_ref`\)"):
            call(sharded(stage), BATCH)


@STAGES
def test_whoever_holds_a_reference_is_told(stage):
    count = jax.new_ref(jnp.zeros(()))

    def make_state(key):
        return jzero.TrainState.create(params=jax.tree.map(lambda x: x + count[...], PARAMS), tx=optax.sgd(0.1))

    def update(grads, state, params=None):
        count[...] += 1
        return grads, state

    with pytest.raises(ValueError, match="The function that makes the state reads or writes a reference"):
        jzero.init_train_state(make_state, jax.random.key(0), stage=stage)
    counts = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.1))
    with pytest.raises(ValueError, match="The optimizer reads or writes a reference"):
        jzero.make_train_step(loss_fn)(sharded(stage, counts), BATCH)
    with pytest.raises(TypeError, match=r"these are not:\n  extra/count: Ref"):
        sharded(stage, extra={"count": count})
    with pytest.raises(TypeError, match=r"these are not:\n  count: Ref"):
        jzero.make_train_step(loss_fn)(sharded(stage), {"x": BATCH, "count": count})


@STAGES
def test_a_reference_that_a_loss_makes_computes_as_ever(stage):
    def sums(params, batch):
        total = jax.new_ref(jnp.zeros(()))
        total[...] += loss_fn(params, batch)
        total[...] += 0.5 * jnp.square(params["w"]).sum()
        return total[...]

    expected = jax.value_and_grad(sums)(PARAMS, BATCH)
    state = sharded(stage)
    loss, grads = jzero.value_and_grad(sums)(state, BATCH)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for name, x in jzero.gather_params(state.replace(params=grads)).items():
        np.testing.assert_allclose(x, expected[1][name], rtol=2e-5, atol=1e-6)
