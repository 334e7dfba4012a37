"""A small checkpoint of each format, written once by the version that brought it, and what it must hold."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from jzero.checkpoint.contents import FORMAT
from tests.drawn import to_jax

FOLDER = pathlib.Path(__file__).parent
SHAPES = {"even": (8, 4), "odd": (9, 100), "flat": (5, 3), "scalar": ()}


def make() -> jzero.TrainState:
    """Returns a state whose numbers can be told by hand: each leaf counts up from its number."""
    leaves, treedef = jax.tree.flatten(shapes())
    return treedef.unflatten([to_jax(np.arange(x.size).reshape(x.shape) + i, x.dtype) for i, x in enumerate(leaves)])


def shapes() -> jzero.TrainState:
    """Returns the state's shapes."""

    def zeros() -> jzero.TrainState:
        params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
        return jzero.TrainState.create(params={**params, "half": jnp.zeros(7, jnp.bfloat16)}, tx=optax.adam(1e-3))

    return jax.eval_shape(zeros)


def expected() -> dict[str, np.ndarray]:
    """Returns the leaves by path."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(make())}


def like(stage: int, mesh: Any) -> Any:
    """Returns the shapes of the state, to restore into."""
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    return jzero.abstract_train_state(shapes(), config=config, mesh=mesh)


def write() -> None:
    """Writes the checkpoint; not to be done again for a format that users have."""
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    state = jzero.shard_train_state(make(), config=config, mesh=jzero.make_mesh(devices=jax.devices()[:4]))
    extra = {"note": "golden", "array": np.arange(6, dtype=np.int16).reshape(2, 3)}
    folder = FOLDER / f"checkpoint_v{FORMAT}"
    jzero.save_checkpoint(folder, state, extra=extra)
    for path in folder.rglob("commit_success.txt"):  # Orbax notes where it wrote, which nothing reads
        path.write_text("Checkpoint commit was successful")
