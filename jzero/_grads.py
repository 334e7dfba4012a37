"""`value_and_grad` with the collectives of the stage: `shard_map` around the walk over the loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jzero._aux import Weighted, aux_specs, reduce_aux
from jzero._chunks import Chunk, for_each_chunk, read_chunk, split
from jzero._collectives import Wire, batch_index, mean, reduce_shard, reduce_whole, sum_along, sum_over
from jzero._config import may_prefetch
from jzero._lazy import Lazy, make_whole
from jzero._mesh import AnyMesh, batch_axes, mesh_platform, num_batch_shards
from jzero._placement import is_on_host, on_device
from jzero._plan import LeafPlan, StateLeaf, ZeroPlan
from jzero._precision import cast_dtype, times, widen
from jzero._reductions import reduced_repeatedly
from jzero._streamed import is_tiled
from jzero._traced_loss import LossInputs, TracedLoss, carried_leaves
from jzero._walk import Walk

__all__ = ["WHOLE_BATCH", "LossResult", "MicroBatches", "evaluate", "loss_and_grads"]

PyTree = Any


class LossResult(NamedTuple):
    """What one evaluation of the loss gives, reduced over all devices.

    Attributes:
      loss: The mean over the global batch.
      weight: The total weight of a `Weighted` loss, else the number of parts of the batch.
      aux: What the loss returned beside the mean, reduced as `Summed` and `PerExample` say.
      grads: One gradient per parameter leaf, as the plan stores it but in fp32 or wider; without elements where
        `reduced` is in host memory; none if not differentiated.
      reduced: The same before it was widened and multiplied by `factor`, as it was reduced.
      factor: What gradients are multiplied with after their reduction.
      grad_norm: Global L2 norm of the gradients, in fp32 or wider; whole leaves count once, padding never.
      overflowed: For each parameter leaf whether its gradient is not finite, where the precision policy asks; else
        nothing.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    grads: list[jax.Array]
    reduced: list[jax.Array]
    factor: jax.Array
    grad_norm: jax.Array
    overflowed: jax.Array


class MicroBatches(NamedTuple):
    """How a step goes through its batch.

    Attributes:
      steps: Micro-batches, run one after another.
      reduce_last: Whether gradients are reduced once after the last of them, as always at stage 1.
    """

    steps: int = 1
    reduce_last: bool = False


WHOLE_BATCH = MicroBatches()


def loss_and_grads(
    traced: TracedLoss,
    plan: ZeroPlan,
    inputs: LossInputs,
    micro: MicroBatches = WHOLE_BATCH,
    *,
    grads_to_host: bool = False,
) -> LossResult:
    """Evaluates a traced loss and its gradients over the whole batch, inside `jit`.

    Args:
      traced: The loss.
      plan: The plan of the state.
      inputs: What it is evaluated on.
      micro: How to go through the batch.
      grads_to_host: Whether gradients of parameters that lie on the host with all their optimizer state go there as
        soon as they are reduced. Where micro-batches are summed they do not.
    """
    return _run(traced, plan, inputs, micro, differentiate=True, grads_to_host=grads_to_host)


def evaluate(traced: TracedLoss, plan: ZeroPlan, inputs: LossInputs) -> LossResult:
    """Evaluates a traced loss over the whole batch, inside `jit`. Gathers each parameter once per use."""
    return _run(traced, plan, inputs, WHOLE_BATCH, differentiate=False)


def _run(
    traced: TracedLoss,
    plan: ZeroPlan,
    inputs: LossInputs,
    micro: MicroBatches,
    *,
    differentiate: bool,
    grads_to_host: bool = False,
) -> LossResult:
    config = plan.config
    whole, split = PartitionSpec(), PartitionSpec(batch_axes(config))
    carried = carried_leaves(plan, inputs.carried)
    leaves = [
        plan.params_treedef.flatten_up_to(inputs.params),
        *(jax.tree.leaves(x) for x in (dict(inputs.carried), inputs.batch, inputs.rng, inputs.loss_scale)),
    ]
    in_specs = (
        [_manual(leaf.param, config.axis) for leaf in plan.leaves],
        [whole if leaf is None else _manual(leaf, config.axis) for leaf in carried],
        traced.batch_specs,
        [whole] * len(leaves[3]),
        [whole] * len(leaves[4]),
    )
    local_step = _LocalStep(traced, plan, micro, differentiate, carried, grads_to_host)
    grads = plan.leaves if differentiate else ()
    specs = {
        "loss": whole,
        "weight": whole,
        "aux": aux_specs(traced.out_shape[1], split),
        "grads": [
            whole if i in local_step.streamed else _manual(leaf.grad, config.axis) for i, leaf in enumerate(grads)
        ],
        "reduced": [_manual(leaf.grad, config.axis) for leaf in grads],
        "factor": whole,
        "grad_norm": whole,
        "overflowed": whole,
    }
    mapped = jax.shard_map(
        lambda *leaves: local_step(*leaves)._asdict(),
        mesh=plan.mesh,
        in_specs=in_specs,
        out_specs=specs,
        axis_names=set(batch_axes(config)),
        check_vma=False,
    )
    return LossResult(**mapped(*leaves))


def _cannot_sum_bf16(plan: ZeroPlan) -> bool:
    """Whether a bf16 sum over some of the mesh axes ends the process, as on CPUs (seen with jax 0.10 and 0.12)."""
    return mesh_platform(plan.mesh) == "cpu" and set(plan.mesh.axis_names) != set(batch_axes(plan.config))


def _manual(leaf: StateLeaf, axis: str) -> PartitionSpec:
    """The spec of a stored array as far as ZeRO's own axis goes; other axes are left to GSPMD."""
    if leaf.cut is None:
        return PartitionSpec()
    return dataclasses.replace(leaf, base=PartitionSpec()).spec(axis)


@dataclasses.dataclass(frozen=True)
class _LocalStep:
    """One device's part of a step: loss and gradients on the local batch, then the reductions."""

    traced: TracedLoss
    plan: ZeroPlan
    micro: MicroBatches
    differentiate: bool
    carried: list[StateLeaf | None]
    grads_to_host: bool = False

    @functools.cached_property
    def wire(self) -> Wire:
        """How parameters and gradients travel in this step."""
        config, policy = self.plan.config, self.plan.config.policy
        reduce_last = self.micro.steps > 1 and (self.micro.reduce_last or config.stage < 2)
        return Wire(
            config.axis,
            config.replica_axis,
            config.reduce_scatter,
            reduce_dtype=policy.reduce,
            reduce_last=reduce_last,
            predivide=self.predivide,
            widen_bf16=_cannot_sum_bf16(self.plan),
        )

    @functools.cached_property
    def streamed(self) -> frozenset[int]:
        """The parameters whose gradients leave for the host as soon as they are reduced."""
        if not self.grads_to_host or self.micro.steps > 1 or not self.plan.names_host_memory:
            return frozenset()
        leaves = self.plan.leaves
        return frozenset(i for i in self.plan.wholly_hosted if jnp.issubdtype(leaves[i].grad.dtype, jnp.inexact))

    @functools.cached_property
    def summed(self) -> frozenset[int]:
        """The parameters used more than once whose gradients are summed whole, to be reduced once.

        Stage 1 has the memory for it; stages 2 and 3 reduce the gradient of each use.
        """
        if self.plan.config.stage != 1 or self.wire.reduce_last or not self.differentiate:
            return frozenset()

        def param(leaf: LeafPlan) -> Lazy | None:
            cut, dtype = leaf.grad.travelling(self.plan.mesh), leaf.compute_dtype
            return None if cut is None else Lazy(None, None, None, cut, self.wire, dtype, dtype)

        return reduced_repeatedly(self.traced.jaxpr, list(map(param, self.plan.leaves)))

    @property
    def predivide(self) -> int:
        """What gradients are divided by before they are reduced."""
        config = self.plan.config
        return 1 if config.policy.loss_scale is None else num_batch_shards(self.plan.mesh, config)

    def __call__(self, *leaves: list[jax.Array]) -> LossResult:
        params, carried, batch, key, loss_scale = leaves
        wire, plan = self.wire, self.plan
        index = batch_index(wire, dict(plan.mesh.shape))
        key = [jax.random.fold_in(k, index) for k in key]
        whole = dataclasses.replace(wire, reduce_last=True)
        roles = [
            _Role(leaf, plan.mesh, whole if i in self.summed else wire, self.micro.steps, i in self.streamed)
            for i, leaf in enumerate(plan.leaves)
        ]
        carried = [self._frozen(x, leaf) for x, leaf in zip(carried, self.carried, strict=True)]
        forward = self._forward(roles, params, carried, loss_scale)
        if self.differentiate:
            variables = {i: role.variable(x) for i, (role, x) in enumerate(zip(roles, params, strict=True))}
            diff = {i: x for i, x in variables.items() if x is not None}
            (total, weight), divisor, aux, local = self._accumulated(forward, diff, batch, key)
        else:
            _, ((total, weight), divisor, aux) = forward({}, batch, key, jnp.zeros(()))
            local = {}
        if isinstance(self.traced.out_shape[0], Weighted):
            weight = sum_over(weight, wire)
            inverse = jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))
        else:  # known without a collective, and to the compiler
            parts = num_batch_shards(plan.mesh, plan.config) * self.micro.steps
            weight = jnp.asarray(parts, weight.dtype)
            inverse = jnp.asarray(weight.dtype.type(1) / weight.dtype.type(parts))
        unscale = inverse * divisor * self.predivide / loss_scale[0] if loss_scale else inverse
        reduced = [role.finish(local.get(i)) for i, role in enumerate(roles)] if self.differentiate else []
        with jax.named_scope("zero_update"):
            norm, overflowed = _grad_norm(reduced, [unscale if i in local else None for i in range(len(reduced))], plan)
            grads = [
                jnp.zeros((0,), x.dtype) if is_on_host(x) else times(x, unscale) if i in local else x
                for i, x in enumerate(reduced)
            ]
        loss = sum_over(total, wire) * inverse
        aux = reduce_aux(aux, wire, self.micro.steps)
        return LossResult(loss, weight, aux, grads, reduced, unscale, norm, overflowed)

    def _frozen(self, x: jax.Array, leaf: StateLeaf | None) -> Any:
        """A carried array as the walk takes it: lazy if it is a partitioned parameter."""
        cut = None if leaf is None else leaf.travelling(self.plan.mesh)
        if leaf is None or cut is None:
            return x
        return Lazy(x, None, None, cut, self.wire, leaf.dtype, leaf.dtype)

    def _forward(
        self, roles: list[_Role], params: list[jax.Array], carried: list[Any], loss_scale: list[jax.Array]
    ) -> Callable[..., Any]:
        """Returns `fn(variables, batch, key, divisor) -> (scaled sum, ((sum, weight), divisor, aux))`.

        With a loss scale, what is differentiated is the sum over `divisor`, which makes about a mean of it: fp16 holds
        the gradients of a mean, not those of a sum over many tokens. It is the same for all devices and micro-batches.
        """
        config, wire = self.plan.config, self.wire
        platform = mesh_platform(self.plan.mesh)
        walk = Walk(
            frozenset(wire.batch_axes),
            regather=self.differentiate and self.plan.regathers,
            fence="light" if platform == "tpu" else "whole",
            prefetch_bytes=config.prefetch_bytes,
            pipelines=platform == "gpu" and may_prefetch(config),
            waits=platform == "gpu",
        )

        @jax.named_scope("zero_compute")
        def forward(
            diff: dict[int, jax.Array], batch: list[jax.Array], key: list[jax.Array], divisor: jax.Array
        ) -> tuple[jax.Array, Any]:
            inputs = [role.value(diff.get(i), x) for i, (role, x) in enumerate(zip(roles, params, strict=True))]
            outputs = [make_whole(y) for y in walk(self.traced.jaxpr, [*inputs, *carried, *batch, *key])]
            loss, aux = jax.tree.unflatten(jax.tree.structure(self.traced.out_shape), outputs)
            total = widen(loss.sum if isinstance(loss, Weighted) else loss)
            weight = lax.stop_gradient(loss.weight) if isinstance(loss, Weighted) else jnp.ones(())
            weight = weight.astype(total.dtype)
            if not loss_scale:
                return total, ((total, weight), divisor, aux)
            mean_weight = mean(weight, wire) if isinstance(loss, Weighted) else weight
            first = jnp.where(mean_weight > 0, mean_weight, 1).astype(jnp.float32) * self.micro.steps
            divisor = jnp.where(divisor > 0, divisor, first)
            return total * (loss_scale[0] / divisor).astype(total.dtype), ((total, weight), divisor, aux)

        return forward

    def _accumulated(
        self, forward: Callable[..., Any], diff: dict[int, jax.Array], batch: list[jax.Array], key: list[jax.Array]
    ) -> tuple[Any, jax.Array, PyTree, dict[int, jax.Array]]:
        """Sums loss, weight and gradients over micro-batches.

        Returns:
          `((sum, weight), divisor, aux, grads)`; `aux` is stacked for `reduce_aux`.
        """
        grad, steps = jax.value_and_grad(forward, has_aux=True), self.micro.steps
        none_yet = jnp.zeros(())
        if steps == 1:
            (_, (sums, divisor, aux)), grads = grad(diff, batch, key, none_yet)
            return sums, divisor, aux, grads
        whole = [x.ndim == 0 for x in batch]
        parts = [
            x if w else x.reshape(steps, x.shape[0] // steps, *x.shape[1:]) for x, w in zip(batch, whole, strict=True)
        ]
        kept_in = {j: cast_dtype(x.dtype, self.plan.leaves[j].grad.dtype) for j, x in diff.items()}

        def body(carry: Any, i: jax.Array) -> tuple[Any, Any]:
            sums, divisor = carry
            part = [
                x if w else lax.dynamic_index_in_dim(x, i, keepdims=False) for x, w in zip(parts, whole, strict=True)
            ]
            keys = [jax.random.fold_in(k, i) for k in key]
            (_, (values, divisor, aux)), grads = grad(diff, part, keys, divisor)
            kept = {j: x.astype(kept_in[j]) for j, x in grads.items()}
            return (jax.tree.map(jnp.add, sums, (values, kept)), divisor), aux

        loss = jax.tree.leaves(self.traced.out_shape)[0]
        zero = widen(jnp.zeros((), loss.dtype))
        start = ((zero, zero), {j: jnp.zeros(x.shape, kept_in[j]) for j, x in diff.items()})
        ((sums, grads), divisor), aux = lax.scan(body, (start, none_yet), jnp.arange(steps))
        return sums, divisor, aux, grads


def _grad_norm(
    reduced: list[jax.Array], factors: list[jax.Array | None], plan: ZeroPlan
) -> tuple[jax.Array, jax.Array]:
    """Returns the global norm of reduced gradients times factors, and which are not finite if the policy asks.

    One small sum over the devices that hold different shards.
    """
    zero = jnp.zeros((), jnp.float32)
    cut = whole = zero
    pairs = list(zip(reduced, plan.leaves, strict=True)) if reduced else []
    inexact = [x if leaf.trained and jnp.issubdtype(x.dtype, jnp.inexact) else None for x, leaf in pairs]
    sums = [
        (zero, zero) if x is None else _square_and_not_finite(x, [] if factor is None else [factor], plan)
        for x, factor in zip(inexact, factors, strict=True)
    ]
    for (square, _), (_, leaf) in zip(sums, pairs, strict=True):
        if leaf.grad.cut is None:
            whole = whole + square
        else:
            cut = cut + square
    if not plan.config.policy.skips or not reduced:
        return jnp.sqrt(sum_along(cut, plan.config.axis) + whole), jnp.zeros((0,), jnp.bool_)
    # Leaves that every device holds whole are the same everywhere: counted N times they are still what they are.
    counts = [count for _, count in sums]
    cut, totals = sum_along((cut, jnp.stack(counts)), plan.config.axis)
    return jnp.sqrt(cut + whole), totals > 0


@jax.jit  # traced once for all parameters of a shape, and of `lax`, which is traced three times as fast as `jnp`
def _sums(x: jax.Array, factors: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    x = times(x, *factors)
    parts = [lax.real(x), lax.imag(x)] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]
    square = functools.reduce(lax.add, map(lax.square, parts))
    is_finite = functools.reduce(lax.bitwise_and, map(lax.is_finite, parts))
    count = lax.convert_element_type(lax.bitwise_not(is_finite), jnp.float32)
    axes = tuple(range(x.ndim))
    return lax.reduce_sum(square, axes), lax.reduce_sum(count, axes)


def _square_and_not_finite(x: jax.Array, factors: list[jax.Array], plan: ZeroPlan) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of squares of a reduced gradient times factors, and how many elements are not finite."""
    if not is_on_host(x):
        return _sums(x, factors)
    pieces = split(x.shape, x.dtype.itemsize, plan.config.offload.chunk_bytes, tiled=is_tiled(plan))
    x = x.reshape(pieces.view)

    def step(chunk: Chunk, total: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        square, count = _sums(on_device(read_chunk(x, chunk, pieces)), factors)
        return total[0] + square, total[1] + count

    dtype = jnp.promote_types(jnp.real(jnp.zeros((), x.dtype)).dtype, jnp.float32)
    return for_each_chunk(step, (jnp.zeros((), dtype), jnp.zeros((), jnp.float32)), pieces)


@dataclasses.dataclass(frozen=True)
class _Role:
    """What one parameter is to the loss at this stage: which array is differentiated, and how it is made whole."""

    leaf: LeafPlan
    mesh: AnyMesh
    wire: Wire
    steps: int
    is_streamed: bool

    @property
    def has_slot(self) -> bool:
        """Whether the gradient leaves through a slot, and not at the parameter itself."""
        if self.leaf.param.cut is not None:
            return True
        return self.leaf.grad.cut is not None and (self.steps == 1 or not self.wire.reduce_last)

    def variable(self, stored: jax.Array) -> jax.Array | None:
        """The array that the loss is differentiated with respect to, if any."""
        if not self.leaf.trained or not jnp.issubdtype(stored.dtype, jnp.inexact):
            return None
        if not self.has_slot:
            return stored
        cut = self.leaf.grad.cut
        assert cut is not None
        if self.wire.reduce_last and self.steps == 1:  # of a use, as the loss makes it
            return jnp.zeros(cut.shape, self.leaf.compute_dtype)
        slot = jnp.zeros(cut.shape if self.wire.reduce_last else cut.shard_shape, self.leaf.grad.dtype)
        return jax.device_put(slot, jax.memory.Space.Host) if self.is_streamed else slot

    def value(self, variable: jax.Array | None, stored: jax.Array) -> Any:
        """The parameter as the walk takes it."""
        cut, dtype = self.leaf.param.travelling(self.mesh), self.leaf.compute_dtype
        if cut is not None:
            lazy = Lazy(stored, None, variable, cut, self.wire, dtype, dtype)
            return lazy if self.leaf.scan_dim is not None else lazy.land()
        cut = self.leaf.grad.travelling(self.mesh)
        if self.has_slot and variable is not None and cut is not None:
            return Lazy(None, stored, variable, cut, self.wire, dtype, dtype)
        return stored if variable is None else variable

    def finish(self, grad: jax.Array | None) -> jax.Array:
        """The gradient, reduced over all devices, in the plan's layout."""
        cut = self.leaf.grad.travelling(self.mesh)
        if grad is None:  # integers, frozen parameters
            return jnp.zeros(self.leaf.grad.shape if cut is None else cut.shard_shape, self.leaf.grad.dtype)
        if cut is None:
            grad = reduce_whole(grad, self.wire)
        elif self.wire.reduce_last or not self.has_slot:
            grad = reduce_shard(grad, cut, self.wire)
        return grad
