"""One training step, by jzero and by what a user would write instead: bf16 with fp32 masters, AdamW by default.

* `jzero`: `make_train_step` and a sharded train state, as a user writes them: it keeps what fits.
* `cheap`: the same with `remat="cheap"`: it gathers parameters again and recomputes cheap activations.
* `keeping`: the same, but it keeps for the backward pass what `strong` keeps: all activations that the model does not
  recompute (`remat="as_written"`) and whole parameters (`reshard_after_forward=False`).
* `strong`: what a user who knows GSPMD writes: parameters and optimizer state cut on the largest dimension that the
  devices divide, but not on that of a scan, and what is small in a layer left whole; parameters cast before they are
  gathered; gradients laid out like them; activations cut by rows at the start of each block. What is recomputed is up
  to the model.
* `plain`: `jax.jit`, everything but the batch whole on each device. The stage does not matter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jzero
from benchmarks.family_models import Constrain, Family, Gather
from jzero.core.engine.recompute import Remat

AXIS = "data"
TX = optax.adamw(1e-4)
SMALL = 100_000  # parameters of a layer of up to so many elements stay whole, by hand


class Engine(NamedTuple):
    """A jitted `step(state, batch)`, what makes its state from a key, and the state as shapes."""

    step: Any
    make: Callable[[jax.Array], Any]
    like: Any


class State(NamedTuple):
    """What the steps beside jzero's train: bf16 parameters (none at stage 3), fp32 masters, optax's state."""

    params: Any
    masters: Any
    opt_state: Any


def gathered_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of all devices, and the numbers of this device's, in a loss that sees only these."""
    return lax.all_gather(x, AXIS, tiled=True), lax.axis_index(AXIS) * len(x) + jnp.arange(len(x))


def all_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the same in a loss that sees all rows."""
    return x, jnp.arange(len(x))


def loss_of(
    family: Family, constrain: Constrain = lambda x: x, gather: Gather = gathered_rows
) -> Callable[..., jax.Array]:
    """Returns `loss(params, batch)`."""
    more = (gather,) if family.gathers else ()
    return lambda params, batch: family.loss(params, batch, constrain, *more)


def batch_of(family: Family, mesh: Mesh) -> Any:
    """Returns the shapes of a batch, cut by rows."""
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
    return jax.tree.map(place, family.batch(family.rows * mesh.shape[AXIS]))


def jzero_step(
    family: Family, stage: int, mesh: Mesh, *, remat: Remat | None = None, tx: optax.GradientTransformation = TX
) -> Engine:
    """Returns jzero's step; with `remat="as_written"`, it keeps activations and whole parameters."""
    config = jzero.ZeroConfig(stage=stage, precision="bf16", reshard_after_forward=remat != "as_written")
    make = lambda key: jzero.TrainState.create(params=family.init(key), tx=tx)
    shapes = jax.eval_shape(make, jax.random.key(0))
    step = jzero.make_train_step(loss_of(family), remat=remat)
    start = functools.partial(jzero.init_train_state, make, config=config, mesh=mesh)
    return Engine(step, start, jzero.abstract_train_state(shapes, config=config, mesh=mesh))


def layout_of(path: Any, x: jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    """Returns the layout of a parameter by hand, or of a moment of it."""
    stacked = any(getattr(key, "key", None) == "stack" for key in path)
    dims = [d for d in range(stacked, x.ndim) if x.shape[d] % mesh.shape[AXIS] == 0]
    if math.prod(x.shape[stacked:]) <= SMALL or not dims:
        return NamedSharding(mesh, PartitionSpec())
    largest = max(dims, key=lambda d: x.shape[d])
    return NamedSharding(mesh, PartitionSpec(*[AXIS if d == largest else None for d in range(x.ndim)]))


def narrow(tree: Any) -> Any:
    """Returns a tree in bf16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def updated(
    masters: Any, opt_state: Any, grads: Any, tx: optax.GradientTransformation = TX
) -> tuple[Any, Any, jax.Array]:
    """Returns new masters, the new optimizer state, and the norm of the gradients."""
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, opt_state = tx.update(grads, opt_state, masters)
    return optax.apply_updates(masters, updates), opt_state, optax.global_norm(grads)


def strong_step(family: Family, stage: int, mesh: Mesh, *, tx: optax.GradientTransformation = TX) -> Engine:
    """Returns the step by hand."""
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    loss_fn = loss_of(family, lambda x: lax.with_sharding_constraint(x, rows), all_rows)

    def start(key: jax.Array) -> State:
        masters = family.init(key)
        return State(None if stage == 3 else narrow(masters), masters, tx.init(masters))

    shapes = jax.eval_shape(start, jax.random.key(0))
    layout = jax.tree_util.tree_map_with_path(functools.partial(layout_of, mesh=mesh), shapes)
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes.params)
    layout = layout._replace(params=replicated)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        params = state.params
        if params is None:
            params = lax.with_sharding_constraint(narrow(state.masters), layout.masters)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        if stage >= 2:
            grads = lax.with_sharding_constraint(grads, layout.masters)
        masters, opt_state, norm = updated(state.masters, state.opt_state, grads, tx)
        params = None
        if state.params is not None:
            params = lax.with_sharding_constraint(narrow(masters), layout.masters)
        return State(params, masters, opt_state), {"loss": loss, "grad_norm": norm}

    jitted = jax.jit(step, donate_argnums=0, in_shardings=(layout, rows), out_shardings=(layout, None))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return Engine(jitted, jax.jit(start, out_shardings=layout), jax.tree.map(place, shapes, layout))


def plain_step(family: Family, mesh: Mesh | None = None, *, tx: optax.GradientTransformation = TX) -> Engine:
    """Returns a step of plain `jax.jit`, on one device, or with everything but the batch whole on each of a mesh."""
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def start(key: jax.Array) -> State:
        masters = family.init(key)
        return State(None, masters, tx.init(masters))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        loss, grads = jax.value_and_grad(loss_of(family, gather=all_rows))(narrow(state.masters), batch)
        masters, opt_state, norm = updated(state.masters, state.opt_state, grads, tx)
        return State(None, masters, opt_state), {"loss": loss, "grad_norm": norm}

    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
    like = jax.tree.map(place, jax.eval_shape(start, jax.random.key(0)))
    return Engine(
        jax.jit(step, donate_argnums=0, out_shardings=replicated), jax.jit(start, out_shardings=replicated), like
    )


def engine_of(name: str, family: Family, stage: int, mesh: Mesh, *, tx: optax.GradientTransformation = TX) -> Engine:
    """Returns an engine by its name."""
    if name == "plain":
        return plain_step(family, mesh, tx=tx)
    if name == "strong":
        return strong_step(family, stage, mesh, tx=tx)
    remat: dict[str, Remat | None] = {
        "jzero": None,
        "cheap": "cheap" if stage == 3 else None,
        "keeping": "as_written",
    }
    return jzero_step(family, stage, mesh, remat=remat[name], tx=tx)
