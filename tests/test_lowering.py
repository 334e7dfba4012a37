"""Public functions of jax in layers at stage 3, lowered for machines that are not there: primitives differ by platform.

python -m pytest -m compilers tests/test_lowering.py -k h200    # needs jzero[gpu]
python -m pytest -m compilers tests/test_lowering.py -k v5p     # needs jzero[tpu]
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.core.state.shard import abstract_train_state
from jzero.machines.topologies import topology_devices
from tests.jax_functions import FUNCTIONS, ROWS, WIDTH

GROUPS = [dict(list(FUNCTIONS.items())[i::6]) for i in range(6)]  # a program holds some of each module


def layer(fns, x, weights):
    for i, fn in enumerate(fns.values()):
        x = x + jnp.tanh(fn(x @ weights[i]))
    return x


def lower(fns, remat, topology):
    """Lowers a step over two equal layers of these functions."""

    def loss_fn(params, batch):
        return jnp.square(layer(fns, layer(fns, batch, params["first"]), params["second"])).mean()

    mesh = jzero.make_mesh(devices=topology_devices(topology))
    params = {name: jax.ShapeDtypeStruct((len(fns), WIDTH, WIDTH), jnp.float32) for name in ("first", "second")}
    plain = jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=optax.sgd(0.1)), params)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    state = abstract_train_state(plain, config=config, mesh=mesh)
    batch = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.float32)
    jzero.make_train_step(loss_fn, remat=remat, check_rows=False).lower(state, batch)


def failures(fns, lower):
    """Returns which functions cannot be lowered, found by halves, and why."""
    try:
        lower(fns)
    except Exception as error:
        items, half = list(fns.items()), len(fns) // 2
        parts = [dict(items[:half]), dict(items[half:])] if half else []
        found = [failures(part, lower) for part in parts]
        return {k: v for x in found for k, v in x.items()} or {", ".join(fns): f"{type(error).__name__}: {error}"}
    return {}


@pytest.mark.compilers
@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("remat", [None, "cheap", jzero.Keep(params="all", blocks=1)], ids=["none", "cheap", "Keep"])
@pytest.mark.parametrize("topology", ["h200:8", "v5p:2x2x2"])
def test_functions_of_jax_lower(topology, remat, group):
    assert failures(GROUPS[group], functools.partial(lower, remat=remat, topology=topology)) == {}
