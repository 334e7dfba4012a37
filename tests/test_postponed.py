"""Which operations a compiler for GPUs postpones, and what memory that takes: against hand arithmetic."""

import jax
import jax.numpy as jnp
import pytest

from jzero.analysis.footprint import footprint
from jzero.analysis.traced import trace_program

ROWS, WIDTH, LAYERS = 4096, 16, 6
ACTIVATION = ROWS * WIDTH * 4


def peak(loss, params, *inputs, gpu):
    jaxpr = jax.jit(jax.grad(loss)).trace(params, *inputs).jaxpr
    return footprint(trace_program(jaxpr, [1] * len(jaxpr.jaxpr.invars)), gpu=gpu).peak


def chain(block):
    def loss(params, x):
        for w in params:
            x = block(x, w)
        return x.sum()

    return loss


def layer(x, w):
    return jnp.exp(x @ w)  # all that its derivative needs


PARAMS = [jnp.ones((WIDTH, WIDTH))] * LAYERS
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def test_operands_of_the_gradients_of_weights_stay_until_the_end():
    """Of each layer its input and the cotangent of its product; in order, the cotangent of one layer at a time.

    The input of the first layer is an argument.
    """
    in_order, late = (peak(chain(layer), PARAMS, X, gpu=gpu) for gpu in (False, True))
    assert late == pytest.approx((2 * LAYERS - 1) * ACTIVATION, rel=0.1)
    assert in_order == pytest.approx((LAYERS + 1) * ACTIVATION, rel=0.1)


def test_they_stay_until_the_next_barrier():
    """A recomputed block begins with one: the products of one block alone are pending, beside the inputs of all."""
    block = jax.checkpoint(layer, prevent_cse=True)
    late, free = peak(chain(block), PARAMS, X, gpu=True), jax.checkpoint(layer, prevent_cse=False)
    assert late <= (LAYERS + 3) * ACTIVATION * 1.1
    assert peak(chain(free), PARAMS, X, gpu=True) > late + (LAYERS - 3) * ACTIVATION


def test_concatenated_features_are_joined_for_each_reader():
    """Both ends of an edge: kept are the parts, which other layers read as well, not the three of them joined."""

    def loss(params, parts):
        joined = jnp.concatenate([jnp.sin(x) for x in parts], axis=-1)
        out = jnp.square(joined @ params[0])
        for w in params[1:]:
            out = jnp.square(out @ w)
        return out.sum()

    params = [jnp.ones((8 * WIDTH, WIDTH)), *PARAMS[1:]]
    parts = [X] * 8
    jaxpr = jax.jit(jax.grad(loss)).trace(params, parts).jaxpr
    kept = footprint(trace_program(jaxpr, [1] * len(jaxpr.jaxpr.invars)), gpu=True).kept
    assert max(x.num_bytes for x in kept) == ACTIVATION
    assert not [x.name for x in kept if "concatenate" in x.name]
