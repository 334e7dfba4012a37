"""Checks the inputs of a jitted step, places them on the mesh, and checks the results of its loss."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jzero.core.base import compat
from jzero.core.base.guard import attempt, warn
from jzero.core.base.text import path_str
from jzero.core.base.types import DType, PyTree, TrainStateLike
from jzero.core.config.settings import ONE_KEY, check, optional
from jzero.core.engine.outputs import Weighted, check_aux
from jzero.core.engine.trace import TracedLoss
from jzero.core.jaxpr.equations import find_needed
from jzero.core.jaxpr.flat import flattened
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import HOST_MEMORY, num_row_shards, row_axes
from jzero.core.layout.padded import Padded, unbox
from jzero.core.layout.placement import place_array
from jzero.core.plan.plan import ZeroPlan

SMALL = 4096
"""Arrays of up to this many elements, such as masks, are not reported, whatever the persistence threshold is."""

InputKind: TypeAlias = tuple[type, Sharding, tuple[int, ...]]
"""Type, sharding and shape of an array."""


Given: TypeAlias = "tuple[PyTree, jax.Array | None]"
"""Batch and key as the user passed them."""
Placed: TypeAlias = tuple[PyTree, jax.Array | None, bool]
"""Batch and key on the mesh, and whether all of them were already in place."""


def optional_rng(rng: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the keyword `rng` unless it is `None`, so that a compiled step is called as it was lowered."""
    return {} if rng is None else {"rng": rng}


def has_tracers(leaves: Sequence[object]) -> bool:
    """Whether any of these is a tracer."""
    return any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves)))


def check_stored(state: TrainStateLike, plan: ZeroPlan) -> None:
    """Raises if the state's arrays do not have the shapes that the plan stores."""
    bad: list[str] = []
    params = {leaf.param for leaf in plan.leaves}
    for x, leaf in zip(plan.view.nodes(state), plan.view.leaves, strict=True):
        if leaf.in_records:  # handles
            continue
        if isinstance(x, Padded) and x.cut != leaf.cut:  # a leaf of another plan
            bad.append(f"  {leaf.path}: stored as {x.cut.stored_shape}, but the plan stores {leaf.stored_shape}")
        elif np.shape(unbox(x)) != leaf.stored_shape:
            bad.append(f"  {leaf.path}: shape {tuple(x.shape)}, but the plan stores {leaf.stored_shape}")
        elif leaf in params and unbox(x).dtype != leaf.stored_dtype:
            bad.append(f"  {leaf.path}: {unbox(x).dtype}, but the plan stores {leaf.stored_dtype}")
    if bad:
        raise ValueError(
            "These leaves are not as the plan stores them:\n"
            + "\n".join(bad)
            + "\nEdit parameters with `jzero.update_params`, or shard the new state: `jzero.shard_train_state`."
        )


def check_donated(state: TrainStateLike, leaves: Sequence[object], batch: PyTree, rng: jax.Array | None) -> None:
    """Raises if an array of a donated state occurs twice, or also in what the user passes beside it: XLA may crash."""
    ids = set(map(id, leaves))
    if len(ids) == len(leaves) and ids.isdisjoint(map(id, jax.tree.leaves((batch, rng)))):
        return  # the fast path of each call
    names: dict[int, str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(x, jax.Array) and names.setdefault(id(x), path_str(path)) != path_str(path):
            raise ValueError(
                f"The state holds one array twice, as {names[id(x)]!r} and as {path_str(path)!r}: a step reuses the "
                "memory of each leaf, since the state is donated. Copy one of them with `jnp.copy`."
            )
    for path, x in jax.tree_util.tree_leaves_with_path({"batch": batch, "rng": rng}):
        if id(x) in names:
            raise ValueError(
                f"{path_str(path)!r} is the very array that the state holds as {names[id(x)]!r}, and a step reuses its "
                "memory. Copy it with `jnp.copy`, since the state is donated."
            )


def kinds_of(inputs: Sequence[jax.Array]) -> list[InputKind]:
    """Returns the kinds of arrays."""
    return [(type(x), x.sharding, x.shape) for x in inputs]


def are_like(inputs: Sequence[jax.Array], kinds: Sequence[InputKind]) -> bool:
    """Whether inputs have these kinds, one each."""
    if len(inputs) != len(kinds):
        return False
    for x, (kind, sharding, shape) in zip(inputs, kinds, strict=True):
        if type(x) is not kind or x.shape != shape or (x.sharding is not sharding and x.sharding != sharding):
            return False
    return True


def place_inputs(plan: ZeroPlan, batch: PyTree, rng: jax.Array | None, accumulate_steps: int) -> Placed:
    """Puts batch and rng on the mesh."""
    leaves = check_batch(batch, plan, accumulate_steps)
    check_rng(rng)
    inputs = leaves if rng is None else [*leaves, rng]
    split, replicated = plan.batch_sharding, plan.whole_sharding
    shardings = [split if x.ndim else replicated for x in leaves]
    placed = _place(inputs, [*shardings, replicated][: len(inputs)])
    if all(map(operator.is_, placed, inputs)):
        return batch, rng, True
    key = None if rng is None else placed.pop()
    return jax.tree.unflatten(jax.tree.structure(batch), placed), key, False


def check_rng(rng: jax.Array | None) -> None:
    """Raises unless this is one PRNG key or `None`."""
    check("rng", rng, optional(ONE_KEY))


def _place(arrays: Sequence[jax.Array | np.ndarray], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Returns arrays on the mesh; what other devices have goes in one transfer, most of whose time is its start."""
    placed: list[Any] = list(arrays)
    to_put: list[int] = []
    for i, (x, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        if not isinstance(x, jax.Array):
            placed[i] = _from_host(x, sharding)
        elif x.sharding != sharding:
            if sharding.is_fully_addressable or not x.is_fully_addressable:
                to_put.append(i)
            else:
                placed[i] = place_array(x, x.dtype, sharding)
    if to_put:
        moved = jax.device_put([placed[i] for i in to_put], [shardings[i] for i in to_put])
        for i, x in zip(to_put, moved, strict=True):
            placed[i] = x
    return placed


def _from_host(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns an array of the host on the mesh; `jax.device_put` takes longer."""
    host, dtype = np.asarray(x), jax.dtypes.canonicalize_dtype(x.dtype)
    # Copies, since the user may write to theirs while the step runs.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index], dtype))


def abstract_inputs(
    plan: ZeroPlan, state: TrainStateLike, batch: PyTree, rng: jax.Array | None
) -> tuple[TrainStateLike, PyTree, PyTree]:
    """Returns the arguments as shapes with the shardings that a call would give them."""
    split, replicated = plan.batch_sharding, plan.whole_sharding
    check_batch(batch, plan)
    check_rng(rng)
    batch = jax.tree.map(lambda x: _shape(x, split if x.ndim else replicated), batch)
    state = plan.view.map(lambda x, leaf: _shape(x, leaf.sharding), state)
    return state, batch, None if rng is None else _shape(rng, replicated)


def _shape(x: jax.Array, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, placed_dtype(x), sharding=sharding)


def placed_dtype(x: Any) -> DType:
    """Returns the dtype that an array of a batch, or a key, has on a device."""
    extended = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    return x.dtype if extended else jax.dtypes.canonicalize_dtype(x.dtype)


def bytes_on_device(tree: PyTree) -> int:
    """Returns the bytes of arrays on one device, given as shapes with shardings."""
    on_devices = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != HOST_MEMORY]
    return sum(array_bytes(math.prod(x.sharding.shard_shape(x.shape)), x.dtype) for x in on_devices)


def check_batch(batch: PyTree, plan: ZeroPlan, accumulate_steps: int = 1) -> list[jax.Array]:
    """Returns the leaves of a batch; raises, with a list of leaves, unless every device gets an equal part."""
    parts = num_row_shards(plan.mesh, plan.config) * accumulate_steps
    leaves = jax.tree.leaves(batch)
    are_arrays = all(map(_is_array, leaves))
    sizes = {x.shape[0] for x in leaves if x.ndim} if are_arrays else set()
    if are_arrays and len(sizes) <= 1 and all(size and not size % parts for size in sizes):
        return leaves  # the fast path of each call
    rows = [(path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    bad = [(path, x) for path, x in rows if not _is_array(x)]
    if bad:
        listed = "\n".join(f"  {path}: {type(x).__name__}" for path, x in bad)
        raise TypeError(f"Every leaf of the batch must be an array; these are not:\n{listed}")
    empty = [path for path, x in rows if x.ndim and not x.shape[0]]
    if empty:
        raise ValueError(f"These leaves of the batch have no rows: {empty}. A mean over nothing is not a number.")
    uneven = [(path, x.shape) for path, x in rows if x.ndim and x.shape[0] % parts]
    if uneven:
        listed = "\n".join(f"  batch[{path!r}]: shape {tuple(shape)}" for path, shape in uneven)
        size = uneven[0][1][0]
        below, above = size // parts * parts, -(-size // parts) * parts
        near = f"{below} or {above}" if below else f"{above}"
        steps = f" x accumulate_steps={accumulate_steps}" if accumulate_steps > 1 else ""
        raise ValueError(
            f"The leading dimension of the batch must be divisible by {parts} (the size of mesh axes "
            f"{row_axes(plan.config)}{steps}); these leaves are not:\n{listed}\nUse a batch of {near}, or pad it and "
            "weight the padding with zero (`jzero.Weighted`)."
        )
    listed = "\n".join(f"  batch[{path!r}]: shape {tuple(x.shape)}" for path, x in rows)
    raise ValueError(f"The leaves of the batch must agree on their leading dimension; they have:\n{listed}")


def _is_array(x: object) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, jax.Ref)


def check_loss(traced: TracedLoss, num_rows: int | None, constants: Collection[str]) -> None:
    """Raises unless the loss returned a floating scalar (or `Weighted`) and an `aux` that can be reduced.

    Args:
      traced: The loss.
      num_rows: Examples in one call of it; `None` if the batch has no rows.
      constants: The results that are the same for all rows, as `aux['layers']`.
    """
    loss, (aux, _) = traced.out_shape
    value = loss.sum if isinstance(loss, Weighted) else loss
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            "The loss must return a floating-point scalar (a mean over its examples) or `jzero.Weighted`: its "
            f"{'sum' if isinstance(loss, Weighted) else 'loss'} is {value}. Take the mean over the batch; return "
            "further values with `has_aux=True`."
        )
    if isinstance(loss, Weighted) and (
        getattr(loss.weight, "shape", None) != () or not jnp.issubdtype(loss.weight.dtype, jnp.number)
    ):
        raise TypeError(f"`Weighted.weight` must be a scalar number, the sum of the local weights: got {loss.weight}.")
    check_aux(aux, num_rows, constants)


def find_rounded(traced: TracedLoss, plan: ZeroPlan) -> list[str]:
    """Returns the trained parameters without a gradient that the loss moves, in fewer bits than are kept."""
    written = [(x, plan.leaves[x.source]) for x in traced.written if x.source < len(plan.leaves)]
    rounded = [x for x, leaf in written if leaf.trained and leaf.compute_dtype != leaf.updated.dtype]
    if not rounded:
        return []
    jaxpr, _ = compat.open_jaxpr(flattened(traced.jaxpr))
    stopped = [v for eqn in jaxpr.eqns if eqn.primitive.name == "stop_gradient" for v in eqn.outvars]
    moved = find_needed(jaxpr, jaxpr.outvars[:1], side_effects=False, available=stopped).variables
    return [x.name for x in rounded if jaxpr.invars[x.source] not in moved]


def warn_rounded(traced: TracedLoss, plan: ZeroPlan) -> None:
    """Warns of a teacher among the trained parameters: what the loss writes there is rounded, and small steps lost."""
    names = attempt(find_rounded, traced, plan)
    if names:
        warn(
            f"The loss moves parameters that have no gradient, but that the optimizer trains: {names[:5]}. So it sees "
            "and writes them in the compute dtype, in which small steps are lost. Take them out of the optimizer "
            "(`wrt`, `trainable=`): what is not trained keeps its own dtype."
        )


def find_closed_over(traced: TracedLoss, plan: ZeroPlan) -> list[StateLeaf]:
    """Returns the arrays that the loss closes over and that are worth cutting."""
    least = max(plan.config.persistence_threshold, SMALL)
    _, consts = compat.open_jaxpr(traced.jaxpr)
    return [
        plan.whole_leaf(f"closed over #{i}", tuple(x.shape), x.dtype, "closed over by the loss")
        for i, x in enumerate(consts)
        if hasattr(x, "dtype") and x.size > least
    ]


def warn_closed_over(traced: TracedLoss, plan: ZeroPlan) -> None:
    """Warns about arrays that the loss closes over: every device holds them whole."""
    leaves = attempt(find_closed_over, traced, plan)
    if leaves:
        listed = "\n".join(f"  {leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        num_bytes = sum(array_bytes(leaf.size, leaf.dtype) for leaf in leaves)
        warn(
            f"The loss closes over arrays of {num_bytes} bytes in all, which every device holds whole:\n{listed}\nPass "
            "them as parameters (frozen if need be) or in the batch."
        )
