"""`value_and_grad` with the collectives of the stage: `shard_map` around the walk over the loss."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jzero import _compat
from jzero._aux import Weighted, aux_specs, check_aux, reduce_aux
from jzero._collectives import Wire, batch_index, reduce_shard, sum_over
from jzero._lazy import Lazy, make_whole
from jzero._mesh import batch_axes, num_batch_shards
from jzero._plan import LeafPlan, StateLeaf, ZeroPlan, itemsize
from jzero._tree import path_str
from jzero._walk import Walk

__all__ = [
    "LossInputs",
    "LossResult",
    "TracedLoss",
    "check_batch",
    "check_loss",
    "closed_over",
    "evaluate",
    "loss_and_grads",
    "trace_loss",
    "warn_closed_over",
]

PyTree = Any


class LossResult(NamedTuple):
    """What one evaluation of the loss gives, reduced over all devices.

    Attributes:
      loss: The mean over the global batch.
      weight: The total weight of a `Weighted` loss, else the number of parts of the batch.
      aux: What the loss returned beside the mean, reduced as `Summed` and `PerExample` say.
      grads: One gradient per parameter leaf, as the plan stores it; none if not differentiated.
      grad_norm: Global L2 norm of the gradients, in fp32 or wider; whole leaves count once, padding never.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    grads: list[jax.Array]
    grad_norm: jax.Array


class LossInputs(NamedTuple):
    """What a loss is evaluated on.

    Attributes:
      params: The parameters as stored.
      carried: State that the loss reads and changes, by name; whole on every device.
      batch: The global batch.
      rng: A PRNG key, to be folded with the index of the device, or `None`.
    """

    params: PyTree
    carried: Mapping[str, Any]
    batch: PyTree
    rng: jax.Array | None


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss as a jaxpr over whole parameters and one device's part of the batch.

    Attributes:
      jaxpr: Its inputs are the leaves of params, carried state, batch and rng, in this order; its outputs
        the leaves of `out_shape`.
      out_shape: `(loss, aux)` as shapes.
      num_inputs: Leaves of params, carried state, batch and rng.
      batch_specs: How each leaf of the batch is split.
    """

    jaxpr: Any
    out_shape: PyTree
    num_inputs: tuple[int, int, int, int]
    batch_specs: list[PartitionSpec]


def check_batch(batch: PyTree, plan: ZeroPlan, accumulate_steps: int = 1) -> None:
    """Raises unless every device gets an equal part of the batch; lists every leaf that forbids it."""
    parts = num_batch_shards(plan.mesh, plan.config) * accumulate_steps
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
    rows_of = {x.shape[0] for _, x in rows if x.ndim}
    if len(rows_of) > 1:
        listed = "\n".join(f"  batch[{path!r}]: shape {tuple(x.shape)}" for path, x in rows)
        raise ValueError(f"The leaves of the batch must agree on their leading dimension; they have:\n{listed}")


def trace_loss(
    loss_fn: Callable[..., Any], plan: ZeroPlan, inputs: LossInputs, *, accumulate_steps: int = 1
) -> TracedLoss:
    """Traces `loss_fn` over whole parameters and the part of the batch that one device sees at once."""
    batch, rng = inputs.batch, inputs.rng
    check_batch(batch, plan, accumulate_steps)
    parts = num_batch_shards(plan.mesh, plan.config) * accumulate_steps
    local = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]) if x.ndim else (), x.dtype), batch
    )
    shapes = [jax.ShapeDtypeStruct(leaf.param.shape, leaf.param.dtype) for leaf in plan.leaves]
    params = plan.params_treedef.unflatten(shapes)
    carried = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(inputs.carried))
    key = [] if rng is None else [jax.ShapeDtypeStruct(rng.shape, rng.dtype)]

    def call(params: PyTree, carried: Mapping[str, Any], batch: PyTree, key: list[jax.Array]) -> Any:
        return loss_fn(params, batch, *key, **carried)

    axis_env = [(name, int(plan.mesh.shape[name])) for name in batch_axes(plan.config)]
    trace = jax.make_jaxpr(call, axis_env=axis_env, return_shape=True)
    jaxpr, out_shape = trace(params, carried, local, key)
    ordered = _compat.ordered_effects(jaxpr)
    if ordered:
        raise ValueError(
            f"The loss has ordered effects ({', '.join(ordered)}), which cannot run on several devices at once. Use "
            "the unordered form, e.g. `jax.debug.print(...)` or `io_callback(..., ordered=False)`."
        )
    specs = [PartitionSpec(batch_axes(plan.config)) if x.ndim else PartitionSpec() for x in jax.tree.leaves(batch)]
    sizes = (len(shapes), len(jax.tree.leaves(carried)), len(specs), len(key))
    return TracedLoss(jaxpr, out_shape, sizes, specs)


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


def loss_and_grads(traced: TracedLoss, plan: ZeroPlan, inputs: LossInputs, *, accumulate_steps: int = 1) -> LossResult:
    """Evaluates a traced loss and its gradients over the whole batch, inside `jit`."""
    return _run(traced, plan, inputs, accumulate_steps, differentiate=True)


def evaluate(traced: TracedLoss, plan: ZeroPlan, inputs: LossInputs) -> LossResult:
    """Evaluates a traced loss over the whole batch, inside `jit`. Gathers each parameter once per use."""
    return _run(traced, plan, inputs, 1, differentiate=False)


def _run(
    traced: TracedLoss, plan: ZeroPlan, inputs: LossInputs, accumulate_steps: int, *, differentiate: bool
) -> LossResult:
    config = plan.config
    whole, split = PartitionSpec(), PartitionSpec(batch_axes(config))
    leaves = [
        plan.params_treedef.flatten_up_to(inputs.params),
        *(jax.tree.leaves(x) for x in (dict(inputs.carried), inputs.batch, inputs.rng)),
    ]
    in_specs = (
        [_manual(leaf.param, config.axis) for leaf in plan.leaves],
        [whole] * len(leaves[1]),
        traced.batch_specs,
        [whole] * len(leaves[3]),
    )
    specs = {
        "loss": whole,
        "weight": whole,
        "aux": aux_specs(traced.out_shape[1], split),
        "grads": [_manual(leaf.grad, config.axis) for leaf in plan.leaves] if differentiate else [],
        "grad_norm": whole,
    }

    def local(*local_leaves: list[jax.Array]) -> dict[str, Any]:
        return _local_step(traced, plan, accumulate_steps, differentiate, local_leaves)._asdict()

    mapped = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=in_specs,
        out_specs=specs,
        axis_names=set(batch_axes(config)),
        check_vma=False,
    )
    return LossResult(**mapped(*leaves))


def _manual(leaf: StateLeaf, axis: str) -> PartitionSpec:
    """The spec of a stored array as far as ZeRO's own axis goes; other axes are left to GSPMD."""
    if leaf.cut is None:
        return PartitionSpec()
    return dataclasses.replace(leaf, base=PartitionSpec()).spec(axis)


def _local_step(
    traced: TracedLoss,
    plan: ZeroPlan,
    accumulate_steps: int,
    differentiate: bool,
    leaves: tuple[list[jax.Array], ...],
) -> LossResult:
    """One device's part of a step: loss and gradients on the local batch, then the reductions."""
    params, carried, batch, key = leaves
    config = plan.config
    wire = Wire(config.axis, config.replica_axis, config.reduce_scatter)
    index = batch_index(wire, dict(plan.mesh.shape))
    key = [jax.random.fold_in(k, index) for k in key]
    walk = Walk(frozenset(wire.batch_axes), regather=differentiate and config.reshard_after_forward)
    roles = [_Role.of(leaf, wire, config.stage) for leaf in plan.leaves]
    variables = [role.variable(x) for role, x in zip(roles, params, strict=True)]
    trained = [i for i, role in enumerate(roles) if jnp.issubdtype(role.leaf.param.dtype, jnp.inexact)]

    def forward(diff: list[jax.Array], batch: list[jax.Array], key: list[jax.Array]) -> tuple[jax.Array, Any]:
        values = list(variables)
        for i, x in zip(trained, diff, strict=True):
            values[i] = x
        inputs = [role.value(v, x) for role, v, x in zip(roles, values, params, strict=True)]
        outputs = [make_whole(y) for y in walk(traced.jaxpr, [*inputs, *carried, *batch, *key])]
        loss, aux = jax.tree.unflatten(jax.tree.structure(traced.out_shape), outputs)
        if isinstance(loss, Weighted):
            return loss.sum, (lax.stop_gradient(loss.weight).astype(loss.sum.dtype), aux)
        return loss, (jnp.ones((), loss.dtype), aux)

    diff = [variables[i] for i in trained]
    if not differentiate:
        total, (weight, aux) = forward(diff, batch, key)
        grads: list[jax.Array] = []
    else:
        total, weight, aux, grads = _accumulated(forward, diff, batch, key, accumulate_steps, traced)
    weight = sum_over(weight, wire)
    scale = jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))
    reduced: list[jax.Array] = []
    if differentiate:
        by_index = dict(zip(trained, grads, strict=True))
        reduced = [
            role.reduce(by_index[i]) * scale.astype(by_index[i].dtype) if i in by_index else role.no_grad()
            for i, role in enumerate(roles)
        ]
    loss = sum_over(total, wire) * scale.astype(total.dtype)
    norm = _grad_norm(reduced, plan)
    return LossResult(loss, weight, reduce_aux(aux, wire, accumulate_steps), reduced, norm)


def _grad_norm(grads: list[jax.Array], plan: ZeroPlan) -> jax.Array:
    """The global norm of reduced gradients: one scalar sum over the devices that hold different shards."""
    cut = whole = jnp.zeros((), jnp.float32)
    for grad, leaf in zip(grads, plan.leaves, strict=False):
        if jnp.issubdtype(grad.dtype, jnp.inexact):
            wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
            square = jnp.sum(jnp.real(wide * jnp.conj(wide)))
            if leaf.grad.cut is None:
                whole = whole + square
            else:
                cut = cut + square
    return jnp.sqrt(lax.psum(cut, plan.config.axis) + whole)


def _accumulated(
    forward: Callable[..., Any],
    diff: list[jax.Array],
    batch: list[jax.Array],
    key: list[jax.Array],
    steps: int,
    traced: TracedLoss,
) -> tuple[jax.Array, jax.Array, PyTree, list[jax.Array]]:
    """Sums loss, weight and gradients over micro-batches; `aux` is stacked for `reduce_aux`."""
    grad = jax.value_and_grad(forward, has_aux=True)
    if steps == 1:
        (total, (weight, aux)), grads = grad(diff, batch, key)
        return total, weight, aux, grads
    whole = [x.ndim == 0 for x in batch]
    micro = [x if w else x.reshape(steps, x.shape[0] // steps, *x.shape[1:]) for x, w in zip(batch, whole, strict=True)]

    def body(sums: Any, i: jax.Array) -> tuple[Any, Any]:
        part = [x if w else lax.dynamic_index_in_dim(x, i, keepdims=False) for x, w in zip(micro, whole, strict=True)]
        (total, (weight, aux)), grads = grad(diff, part, [jax.random.fold_in(k, i) for k in key])
        return jax.tree.map(jnp.add, sums, (total, weight, grads)), aux

    loss = jax.tree.leaves(traced.out_shape)[0]
    zero = jnp.zeros((), loss.dtype)
    start = (zero, zero, [jnp.zeros_like(x) for x in diff])
    (total, weight, grads), aux = lax.scan(body, start, jnp.arange(steps))
    return total, weight, aux, grads


@dataclasses.dataclass(frozen=True)
class _Role:
    """What one parameter is to the loss at this stage: which array is differentiated, and how it is made whole."""

    leaf: LeafPlan
    wire: Wire
    is_view: bool

    @classmethod
    def of(cls, leaf: LeafPlan, wire: Wire, stage: int) -> _Role:
        return cls(leaf, wire, is_view=stage >= 2 and leaf.param.cut is None and leaf.grad.cut is not None)

    def variable(self, stored: jax.Array) -> jax.Array:
        """The array that the loss is differentiated with respect to."""
        if self.is_view and self.leaf.grad.cut is not None:
            return jnp.zeros(self.leaf.grad.cut.shard_shape, self.leaf.grad.dtype)
        return stored

    def value(self, variable: jax.Array, stored: jax.Array) -> Any:
        """The parameter as the walk takes it."""
        if self.is_view and self.leaf.grad.cut is not None:
            whole = lax.stop_gradient(stored)
            return Lazy(variable, whole, self.leaf.grad.cut, self.wire, self.leaf.param.dtype)
        if self.leaf.param.cut is not None:
            return Lazy(variable, None, self.leaf.param.cut, self.wire, self.leaf.param.dtype)
        return variable

    def reduce(self, grad: jax.Array) -> jax.Array:
        """The gradient, reduced over all devices, in the plan's layout."""
        if self.is_view or self.leaf.param.cut is not None:
            return grad  # reduced where it was made
        if self.leaf.grad.cut is not None:
            return reduce_shard(grad, self.leaf.grad.cut, self.wire)
        return sum_over(grad, self.wire)

    def no_grad(self) -> jax.Array:
        """The gradient of a leaf that has none (integers): zeros."""
        cut = self.leaf.grad.cut
        return jnp.zeros(self.leaf.grad.shape if cut is None else cut.shard_shape, self.leaf.grad.dtype)


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
