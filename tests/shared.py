"""Steps and optimizers that tests share, so that each program is compiled once in a process.

    step = shared.make_train_step(models.mlp_loss, accumulate_steps=2)
    state, metrics = step(shared.mlp_state(3), models.mlp_batch(16))

A step compiles anew for every optimizer that is not the same object, and `jzero.make_train_step` returns a new step
each time: about a second for a small model, where a step that is shared takes milliseconds. Take jzero's own where a
test looks at what happens while a step is traced, or changes jzero.
"""

import functools
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

import jzero
from jzero.core.layout.padded import is_padded
from tests import models

make_train_step = functools.cache(jzero.make_train_step)
make_eval_step = functools.cache(jzero.make_eval_step)

adamw = functools.cache(optax.adamw)
sgd = functools.cache(optax.sgd)


@functools.cache
def config(stage: Literal[0, 1, 2, 3], **fields: Any) -> jzero.ZeroConfig:
    """Returns a configuration at which small leaves are cut, too."""
    return jzero.ZeroConfig(stage=stage, **{"persistence_threshold": 0} | fields)


def sharded(
    params: Any,
    tx: Any,
    stage: Literal[0, 1, 2, 3] = 3,
    *,
    mesh: Any = None,
    extra: Any = None,
    trainable: Any = None,
    **fields: Any,
) -> Any:
    """Returns a sharded state; `mesh` may be a number of devices, and `fields` are those of `ZeroConfig`."""
    mesh = jzero.make_mesh(devices=jax.devices()[:mesh]) if isinstance(mesh, int) else mesh
    state = jzero.TrainState.create(params=params, tx=tx, extra=extra)
    config = jzero.ZeroConfig(stage=stage, **{"persistence_threshold": 0} | fields)
    return jzero.shard_train_state(state, config=config, mesh=mesh, trainable=trainable)


def mlp_state(
    stage: Literal[0, 1, 2, 3], tx: Any = None, sizes: tuple[int, ...] = models.TWO_LAYERS, **fields: Any
) -> Any:
    """Returns a new sharded state of `models.mlp_loss`; a step may donate it."""
    return sharded(models.mlp_params(sizes=sizes), tx or adamw(1e-3), stage, **fields)


def raising(error: BaseException) -> Any:
    """Returns a function that raises an error, whatever it gets."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def train(step: Any, state: Any, batches: Iterable[Any]) -> tuple[Any, list[float]]:
    """Returns the state after a step for each batch, and the losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


class Trained(NamedTuple):
    params: Any
    opt_state: Any
    losses: list[float]
    norms: list[float]


def by_optax(loss_fn: Any, params: Any, tx: Any, batches: Iterable[Any]) -> Trained:
    """Returns what plain optax makes of parameters on one device, with a step for each batch."""

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    opt_state, numbers = tx.init(params), []
    for batch in batches:
        params, opt_state, *both = step(params, opt_state, batch)
        numbers.append([float(x) for x in both])
    losses, norms = zip(*numbers, strict=True)
    return Trained(*jax.tree.map(np.asarray, (params, opt_state)), [*losses], [*norms])


def whole(tree: Any) -> Any:
    """Returns what a state holds, as NumPy arrays in natural shape: no program, as `jzero.gather_params` compiles."""

    def read(x: Any) -> np.ndarray:
        if not is_padded(x):
            return np.asarray(x)
        parts = np.split(np.asarray(x.stored), [x.cut.natural_size], axis=x.cut.stored_dim)
        return parts[0].reshape(x.shape)

    return jax.tree.map(read, tree, is_leaf=is_padded)
