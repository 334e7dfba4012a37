"""A stack of layers that `fit` finds a configuration for."""

import jax
import jax.numpy as jnp
import optax

import jzero
from tests.step_memory_models import HIDDEN, LAYERS, WIDTH

ROWS = 8 * 256
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def make_state(key):
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    return jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
