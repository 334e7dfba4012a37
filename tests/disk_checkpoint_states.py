"""A state with its optimizer state on disk, to save and to restore."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.disk import files as disk_files
from tests.checkpoint_states import arrays, mesh
from tests.drawn import to_jax


def make_params():
    rng = np.random.default_rng(3)
    draw = lambda *shape: to_jax(rng.normal(size=shape), jnp.float32)
    return {
        "rows": draw(127, 16),  # with padding; two equal records on each of two devices
        "flat": draw(10, 7),  # both dimensions would be mostly padding: flattened
        "stack": draw(3, 10, 7),  # of layers, each flattened
        "whole": draw(3),
    }


def loss_fn(params, batch):
    return sum(jnp.square(x).mean() for x in jax.tree.leaves(params)) * jnp.square(batch).mean()


def make_state():
    """A plain state whose moments are numbers of their own, drawn by NumPy, which compiles nothing."""
    params, tx, rng = make_params(), optax.adamw(1e-2), np.random.default_rng(4)
    draw = lambda x: np.abs(rng.normal(size=x.shape)) if x.ndim else np.ones(())
    opt_state = jax.tree.map(lambda x: to_jax(draw(x), x.dtype), jax.eval_shape(tx.init, params))
    return jzero.TrainState(step=jnp.ones((), jnp.int32), apply_fn=None, params=params, tx=tx, opt_state=opt_state)


make_plain = functools.cache(make_state)  # one for all files of tests, so that each program is compiled once


@pytest.fixture(scope="module")
def plain():
    return make_plain()


@pytest.fixture(scope="module")
def expected(plain):
    return values(plain)


def values(state):
    return {**arrays({"params": state.params}), **arrays({"opt_state": state.opt_state})}


def whole(state):
    return values(jzero.unshard_train_state(state))


def layout(kind, stage, precision, num=8, path=None):
    offload = {"optimizer": kind} if kind != "disk" else {"optimizer": kind, "path": path, "chunk_bytes": 2048}
    config = jzero.ZeroConfig(
        stage=stage,
        precision=precision,
        persistence_threshold=50,
        padding_threshold=0,
        offload=jzero.Offload(**offload),
    )
    return {"config": config, "mesh": mesh(num)}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One folder for all files of tests, so that plans are equal and each program is compiled once."""
    folder = tmp_path_factory.getbasetemp() / "scratch"
    folder.mkdir(exist_ok=True)
    return folder


make_step = functools.cache(lambda: jzero.make_train_step(loss_fn))


@pytest.fixture(scope="module")
def step():
    return make_step()


@pytest.fixture
def on_disk(plain, scratch):
    """Returns a function that places the plain state, with its optimizer state on disk."""
    return lambda stage=3, precision="bf16", num=2: jzero.shard_train_state(
        plain, **layout("disk", stage, precision, num, scratch)
    )


@pytest.fixture
def like(plain, scratch):
    """Returns a function that makes shapes to restore into."""
    return lambda kind="disk", stage=3, precision="bf16", num=2: jzero.abstract_train_state(
        plain, **layout(kind, stage, precision, num, scratch)
    )


def train(step, state, steps, first=0):
    for i in range(first, first + steps):
        state, _ = step(state, np.full(24, 1.0 + i, np.float32))
    return state


OTHERS = weakref.WeakSet()


@pytest.fixture(autouse=True)
def files_of_other_tests():
    """What other tests in this process left open, in a cache or in an error, does not count."""
    gc.collect()
    OTHERS.update(disk_files._OPEN)


def saved(directory, *states):
    with jzero.CheckpointManager(directory) as manager:
        for state in states:
            manager.save(state)
