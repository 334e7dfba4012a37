"""The loss as a jaxpr: whole parameters, and one device's rows of the batch.

In: `loss_fn(params, batch[, rng])` and the plan. Out: a jaxpr over the leaves of parameters in their natural shapes and
in the dtype in which the loss sees them, of carried state, batch and key. With 8 devices and a batch of 32 rows,

    loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()

is `{ lambda ; a:f32[512,64] b:f32[4,512]. let ... in (c,) }`. It names ZeRO's axes where the loss does, and nothing of
how parameters are stored.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero import _compat
from jzero._aux import Weighted, check_aux
from jzero._mesh import batch_axes, num_batch_shards
from jzero._plan import StateLeaf, ZeroPlan, itemsize
from jzero._tree import path_str
from jzero.engine.recompute import Remat, has_parts_to_recompute

__all__ = [
    "FROZEN",
    "LossInputs",
    "TracedLoss",
    "axis_env",
    "carried_leaves",
    "check_batch",
    "check_loss",
    "closed_over",
    "trace_loss",
    "warn_closed_over",
]

PyTree = Any

FROZEN = "frozen"
"""Name of the carried state that holds parameters which no optimizer knows."""


class LossInputs(NamedTuple):
    """What a loss is evaluated on.

    Attributes:
      params: The parameters as stored.
      carried: State that the loss reads and changes, by name; whole on every device.
      batch: The global batch.
      rng: A PRNG key, to be folded with the index of the device, or `None`.
      loss_scale: What the loss is multiplied with before it is differentiated, or `None`.
    """

    params: PyTree
    carried: Mapping[str, Any]
    batch: PyTree
    rng: jax.Array | None
    loss_scale: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss as a jaxpr over whole parameters and one device's part of the batch.

    Attributes:
      jaxpr: Its inputs are the leaves of params, carried state, batch and rng, in this order; its outputs
        the leaves of `out_shape`.
      out_shape: `(loss, aux)` as shapes.
      num_inputs: Leaves of params, carried state, batch and rng.
      batch_specs: How each leaf of the batch is split.
      remat: What is recomputed: the option, or what it comes to where it is `None`.
    """

    jaxpr: Any
    out_shape: PyTree
    num_inputs: tuple[int, int, int, int]
    batch_specs: list[PartitionSpec]
    remat: Remat


def check_batch(batch: PyTree, plan: ZeroPlan, accumulate_steps: int = 1) -> list[Any]:
    """Returns the leaves of a batch of which every device gets an equal part; else lists every leaf that forbids it."""
    parts = num_batch_shards(plan.mesh, plan.config) * accumulate_steps
    leaves = jax.tree.leaves(batch)
    are_arrays = all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves)
    sizes = {x.shape[0] for x in leaves if x.ndim} if are_arrays else set()
    if are_arrays and len(sizes) <= 1 and all(size and not size % parts for size in sizes):
        return leaves  # in each call of a step
    rows = [(path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    bad = [(path, x) for path, x in rows if not hasattr(x, "shape") or not hasattr(x, "dtype")]
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
            f"{batch_axes(plan.config)}{steps}); these leaves are not:\n{listed}\nUse a batch of {near}, or pad it and "
            "weight the padding with zero (`jzero.Weighted`)."
        )
    listed = "\n".join(f"  batch[{path!r}]: shape {tuple(x.shape)}" for path, x in rows)
    raise ValueError(f"The leaves of the batch must agree on their leading dimension; they have:\n{listed}")


def axis_env(plan: ZeroPlan) -> list[tuple[str, int]]:
    """Returns the names and sizes of ZeRO's axes, which the loss may name."""
    return [(name, int(plan.mesh.shape[name])) for name in batch_axes(plan.config)]


def trace_loss(
    loss_fn: Callable[..., Any],
    plan: ZeroPlan,
    inputs: LossInputs,
    *,
    accumulate_steps: int = 1,
    remat: Remat | None = None,
) -> TracedLoss:
    """Traces `loss_fn` over whole parameters and the part of the batch that one device sees at once."""
    batch, rng = inputs.batch, inputs.rng
    check_batch(batch, plan, accumulate_steps)
    parts = num_batch_shards(plan.mesh, plan.config) * accumulate_steps
    local = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]) if x.ndim else (), x.dtype), batch
    )
    shapes = [jax.ShapeDtypeStruct(leaf.param.shape, leaf.compute_dtype) for leaf in plan.leaves]
    params = plan.params_treedef.unflatten(shapes)
    carried = _carried_shapes(plan, inputs.carried)
    key = [] if rng is None else [jax.ShapeDtypeStruct(rng.shape, rng.dtype)]

    def call(params: PyTree, carried: Mapping[str, Any], batch: PyTree, key: list[jax.Array]) -> Any:
        return loss_fn(params, batch, *key, **carried)

    trace = jax.make_jaxpr(call, axis_env=axis_env(plan), return_shape=True)
    try:
        jaxpr, out_shape = trace(params, carried, local, key)
    except (AssertionError, ValueError) as error:
        text = str(error)
        is_cast = "ManualAxisType" in text or "manual_axis_type" in text
        if not is_cast or not any(repr(name) in text for name in batch_axes(plan.config)):
            raise
        raise ValueError(
            f"The loss casts a value to vary along one of ZeRO's axes, {batch_axes(plan.config)}, with `lax.pcast`: "
            "leave that out. There all values may vary, and the step does not check it."
        ) from error
    remat = _chosen_remat(remat, plan, jaxpr)
    ordered = _compat.ordered_effects(jaxpr)
    if ordered:
        raise ValueError(
            f"The loss has ordered effects ({', '.join(ordered)}), which cannot run on several devices at once. Use "
            "the unordered form, e.g. `jax.debug.print(...)` or `io_callback(..., ordered=False)`."
        )
    specs = [PartitionSpec(batch_axes(plan.config)) if x.ndim else PartitionSpec() for x in jax.tree.leaves(batch)]
    sizes = (len(shapes), len(jax.tree.leaves(carried)), len(specs), len(key))
    return TracedLoss(jaxpr, out_shape, sizes, specs, remat)


def _chosen_remat(remat: Remat | None, plan: ZeroPlan, jaxpr: Any) -> Remat:
    """Returns what is done about recomputation, which by default goes with gathering again."""
    if remat is None and not plan.regathers:
        return "as_written"
    if remat not in (None, "cheap") or has_parts_to_recompute(jaxpr):
        return "cheap" if remat is None else remat
    if remat is not None:
        warnings.warn(
            "`remat='cheap'` changes nothing: the loss has no scan and no repeated block of equations that does not "
            "say itself what to recompute. Put `jax.checkpoint` around its parts, or drop the option.",
            stacklevel=2,
        )
    return "as_written"


def closed_over(traced: TracedLoss, plan: ZeroPlan) -> list[StateLeaf]:
    """Returns the arrays above the persistence threshold that the loss closes over."""
    _, consts = _compat.open_jaxpr(traced.jaxpr)
    return [
        StateLeaf(f"closed over #{i}", tuple(x.shape), x.dtype, reason="closed over by the loss")
        for i, x in enumerate(consts)
        if hasattr(x, "dtype") and x.size > plan.config.persistence_threshold
    ]


def warn_closed_over(traced: TracedLoss, plan: ZeroPlan) -> None:
    """Warns about arrays that the loss closes over: every device holds them whole."""
    leaves = closed_over(traced, plan)
    if leaves:
        listed = "\n".join(f"  {leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        num_bytes = sum(leaf.size * itemsize(leaf.dtype) for leaf in leaves)
        warnings.warn(
            f"The loss closes over arrays of {num_bytes} bytes in all, which every device holds whole:\n{listed}\nPass "
            "them as parameters (frozen if need be) or in the batch.",
            stacklevel=2,
        )


def check_loss(traced: TracedLoss, num_rows: int | None) -> None:
    """Raises unless the loss returned a floating scalar (or `Weighted`) and an `aux` that can be reduced."""
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
    check_aux(aux, num_rows)


def carried_leaves(plan: ZeroPlan, carried: Mapping[str, Any]) -> list[StateLeaf | None]:
    """Returns for each leaf of the carried state its layout if it is a frozen parameter, else `None`."""
    frozen = [leaf for leaf in plan.other_leaves if leaf.is_param]
    return [
        leaf
        for name, tree in sorted(carried.items())
        for leaf in (frozen if name == FROZEN else [None] * len(jax.tree.leaves(tree)))
    ]


def _carried_shapes(plan: ZeroPlan, carried: Mapping[str, Any]) -> dict[str, PyTree]:
    """Returns the carried state as the loss sees it."""
    leaves, treedef = jax.tree.flatten(dict(carried))
    shapes = [
        jax.ShapeDtypeStruct(x.shape if leaf is None else leaf.shape, x.dtype)
        for x, leaf in zip(leaves, carried_leaves(plan, carried), strict=True)
    ]
    return treedef.unflatten(shapes)
