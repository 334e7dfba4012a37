"""A stack of layers that `fit` finds a configuration for."""

import jax
import jax.numpy as jnp
import optax

import jzero
from jzero.estimate.step_memory import memory_of_step
from tests.step_memory_models import HIDDEN, LAYERS, WIDTH

ROWS = 8 * 256
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
ADAM = optax.adam(1e-3)
"""One for all states, so that those of one layout are of one type."""


def make_state(key):
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    return jzero.TrainState.create(params=params, tx=ADAM)


_RECKONED = {}


def reckoned_once(step, arguments, hardware, traced=None):
    """Returns what `memory_of_step` returns; of equal steps only the first one is traced."""
    leaves, treedef = jax.tree.flatten(arguments)
    types = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    options = (step.loss.fn, step.micro, step.remat, step.has_aux, step.mutable)
    key = (treedef, types, hardware, options)
    if key not in _RECKONED:
        _RECKONED[key] = memory_of_step(step, arguments, hardware, traced)
    return _RECKONED[key]
