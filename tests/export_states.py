"""States whose parameters have odd sizes, to export and to load."""

import jax.numpy as jnp
import numpy as np

import jzero
from tests import shared
from tests.drawn import to_jax

ODD = {"a": (17, 3), "b": (7,), "c": (9, 100), "d": (), "e": (16, 8)}


def odd_state(seed=0, **options):
    rng = np.random.default_rng(seed)
    params = {name: to_jax(rng.normal(size=shape), jnp.float32) for name, shape in ODD.items()}
    params["whole"] = to_jax(np.arange(5, dtype=np.int32) + seed)
    return jzero.TrainState.create(params=params, tx=shared.sgd(0.1, momentum=0.9)), {}


def numbers(state):
    """Returns whole parameters by name."""
    return {leaf.path.replace("/", "."): np.asarray(jzero.get_full_param(state, leaf.path)) for leaf in leaves(state)}


def leaves(state):
    return jzero.plan_of(state).leaves
