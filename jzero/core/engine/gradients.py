"""Loss and gradients with the collectives of the stage: runs the passes, with `shard_map` around the walk.

    loss_and_grads(traced, plan, inputs, micro, *, differentiates, grads_to_host) -> LossResult

It runs inside `jit`. Each device runs the walk over the joint jaxpr on its own rows of the global batch; micro-batches
are a loop around the walk. The result is the loss of the whole batch, and its gradients in the layout of the plan, with
their norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jzero.core.arrays.collectives import batch_index, fold_keys, sum_over
from jzero.core.base.types import PyTree
from jzero.core.config.keep import Keep
from jzero.core.config.precision import cast_dtype, is_key, scale_by, widen
from jzero.core.engine.differentiate import Joint, differentiate
from jzero.core.engine.kept_blocks import kept_bytes
from jzero.core.engine.lazy import Leaf, is_lazy, make_lazy
from jzero.core.engine.merge import is_of_whole_batch, merge_stacked, merge_written
from jzero.core.engine.norms import grad_norm
from jzero.core.engine.order import Order
from jzero.core.engine.outputs import Weighted, aux_specs, reduce_aux
from jzero.core.engine.recompute import recompute
from jzero.core.engine.reduce_early import reduce_early
from jzero.core.engine.roles import Parameter
from jzero.core.engine.rules import start_walk
from jzero.core.engine.trace import LossInputs, TracedLoss, axis_env, carried_leaves, plan_for
from jzero.core.engine.waits import wait_for_gradients
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import batch_axes, num_batch_shards, row_axes
from jzero.core.layout.placement import memory_of
from jzero.core.layout.platform import platform_facts
from jzero.core.layout.route import Sums
from jzero.core.layout.set_mesh import set_if_explicit
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.traffic import GatherPlan, Kept


class LossResult(NamedTuple):
    """The result of one evaluation of the loss, reduced over all devices.

    Attributes:
      loss: The mean over the global batch.
      weight: The total weight of a `Weighted` loss, else the number of parts of the batch.
      aux: The auxiliary values of the loss, reduced as `Summed` and `PerExample` say.
      written: The variables that the loss wrote, as the plan stores them, one for each of the loss's `written`.
      grads: One gradient per parameter leaf, as the plan stores it but in fp32 or wider; empty if `reduced` is in host
        memory. An empty list if the loss was not differentiated.
      reduced: The reduced gradients, before they are widened and multiplied by `factor`.
      factor: The factor of all gradients after their reduction.
      grad_norm: Global L2 norm of the gradients, in fp32 or wider; whole leaves count once, padding never.
      overflowed: For each parameter leaf, whether its gradient is not finite; empty unless the precision policy asks.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    written: list[jax.Array]
    grads: list[jax.Array]
    reduced: list[jax.Array]
    factor: jax.Array
    grad_norm: jax.Array
    overflowed: jax.Array


class MicroBatches(NamedTuple):
    """How a step splits its batch.

    Attributes:
      steps: The number of micro-batches, which run one after another.
      reduce_last: Whether to reduce gradients once, after the last micro-batch, as stage 1 always does.
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
    differentiates: bool = True,
    grads_to_host: bool = False,
) -> LossResult:
    """Evaluates a traced loss, and its gradients, over the whole batch, inside `jit`.

    Args:
      traced: The loss.
      plan: The plan of the state.
      inputs: The inputs of the loss.
      micro: How to split the batch.
      differentiates: Whether there are gradients. If not, each parameter is gathered once per use.
      grads_to_host: Whether gradients go to the host as soon as they are reduced, if their parameter and all its
        optimizer state are there. With several micro-batches they do not.
    """
    plan = plan_for(plan, traced, inputs.carried)
    carried = carried_leaves(plan, inputs.carried)
    leaves = [
        plan.view.params.flat(inputs.params),  # global arrays
        *(jax.tree.leaves(x) for x in (dict(inputs.carried), inputs.batch, inputs.rng, inputs.loss_scale)),
    ]
    replicated, handles = PartitionSpec(), PartitionSpec(tuple(plan.mesh.axis_names))
    in_specs = (
        # If cut, a device gets [D/N, F]; for parameters on disk, handles.
        [handles if leaf.param.in_records else leaf.param.manual_spec for leaf in plan.leaves],
        [leaf.manual_spec for leaf in carried],
        traced.batch_specs,  # this device's rows
        [replicated] * len(leaves[3]),  # the key
        [replicated] * len(leaves[4]),  # the loss scale
    )
    local_step = _LocalStep(traced, plan, micro, differentiates, carried, grads_to_host)
    # Outside `shard_map`: inside, constraints on other mesh axes would come out wrong.
    with set_if_explicit(plan.loss_mesh):
        joint = local_step.joint(leaves[4])
    mapped = jax.shard_map(
        lambda *leaves: local_step(joint, *leaves)._asdict(),
        mesh=plan.mesh,
        in_specs=in_specs,
        out_specs=local_step.out_specs(),
        axis_names=set(batch_axes(plan.config)),  # GSPMD keeps the other axes
        check_vma=False,
    )
    return LossResult(**mapped(*leaves))


def bytes_of_kept_blocks(traced: TracedLoss, plan: ZeroPlan, micro: MicroBatches) -> int:
    """Returns the bytes that the blocks of `Keep` save on one device for the backward pass of a micro-batch."""
    local_step = _LocalStep(traced, plan, micro, differentiates=True, carried=[], grads_to_host=False)
    with set_if_explicit(plan.loss_mesh):
        return kept_bytes(local_step.joint([]).jaxpr)


@dataclasses.dataclass(frozen=True)
class _LocalStep:
    """One device's part of a step: loss and gradients on the local batch, then the reductions."""

    traced: TracedLoss
    plan: ZeroPlan
    micro: MicroBatches
    differentiates: bool
    carried: list[StateLeaf]
    grads_to_host: bool

    @functools.cached_property
    def sums(self) -> Sums:
        """How values are summed over devices in this step."""
        config, policy, mesh = self.plan.config, self.plan.config.policy, self.plan.mesh
        over_some_axes = set(mesh.axis_names) != set(batch_axes(config))
        return Sums(
            batch_axes(config),
            dtype=policy.reduce,
            predivide=1 if policy.loss_scale is None else num_batch_shards(mesh, config),  # fp16 overflows
            widens_bf16=over_some_axes and not platform_facts(mesh).sums_bf16,
        )

    @functools.cached_property
    def streamed(self) -> frozenset[int]:
        """Indices of the parameters whose gradients go to the host as soon as they are reduced."""
        # Micro-batches add to a gradient, and hosts only copy.
        if not self.grads_to_host or self.micro.steps > 1 or not self.plan.names_host_memory:
            return frozenset()
        leaves = self.plan.leaves
        near = {(x.owner, x.shape) for x in self.plan.inner_leaves if x.memory == "device"}
        params = [(i, leaves[i].param) for i in self.plan.offloaded]
        far = [i for i, param in params if param.memory != "device" and (i, param.shape) not in near]
        return frozenset(i for i in far if jnp.issubdtype(leaves[i].grad.dtype, jnp.inexact))

    def gather_plan(self, leaf: StateLeaf) -> GatherPlan:
        """Returns how a parameter reaches the loss."""
        gather, remat = self.plan.traffic.gather_plan(leaf), self.traced.remat
        if not self.differentiates:  # an evaluation uses each only once
            return gather._replace(is_secondary=False)
        stays = not self.plan.regathers or (isinstance(remat, Keep) and remat.keeps(leaf.path))
        return gather._replace(stays=stays and gather.lookups != "all")  # which is never whole

    @functools.cached_property
    def params(self) -> list[Parameter]:
        """The parameters of this step."""
        plan, stage = self.plan, self.plan.config.stage
        last = self.micro.steps > 1 and (self.micro.reduce_last or stage < 2)
        make = functools.partial(
            Parameter,
            sums=self.sums,
            reduce_last=last,
            stage=stage,
            reduces_once=plan.traffic.is_reduced_once(self.micro.steps) and not last,
        )
        return [
            make(leaf, self.gather_plan(leaf.param), plan.traffic.route_of_gradient(leaf), to_host=i in self.streamed)
            for i, leaf in enumerate(plan.leaves)
        ]

    def out_specs(self) -> dict[str, PyTree]:
        """Returns the specs of the result's fields."""
        replicated = PartitionSpec()
        grads = [leaf.grad.manual_spec for leaf in self.plan.leaves] if self.differentiates else []
        return {
            **dict.fromkeys(("loss", "weight", "factor", "grad_norm", "overflowed"), replicated),
            "aux": aux_specs(self.traced.out_shape[1][0], PartitionSpec(row_axes(self.plan.config))),
            "written": [x.leaf.manual_spec for x in self.traced.written if x.leaf is not None],
            "grads": [replicated if i in self.streamed else spec for i, spec in enumerate(grads)],
            "reduced": grads,
        }

    def joint(self, loss_scale: Sequence[jax.Array]) -> Joint:
        """Returns the program of one micro-batch, with its reductions and waits: the passes before the walk."""
        differentiable = [i for i, param in enumerate(self.params) if self.differentiates and param.is_differentiable]
        names = axis_env(self.plan)
        remat = self.traced.remat if self.differentiates else "as_written"  # no backward pass to recompute for
        fuses = platform_facts(self.plan.mesh).fuses_products
        rewritten = recompute(self.traced.jaxpr, remat, names, fuses_products=fuses)
        traced = dataclasses.replace(self.traced, jaxpr=rewritten)
        joint = differentiate(
            traced, differentiable, sums=self.sums, steps=self.micro.steps, loss_scale=loss_scale, axis_env=names
        )
        exits = [*[None] * joint.num_values, *(self.params[i].gradient_exit for i in joint.differentiable)]
        program = reduce_early(joint.jaxpr, exits)
        if self.differentiates and platform_facts(self.plan.mesh).postpones:
            program = wait_for_gradients(program)
        return dataclasses.replace(joint, jaxpr=program)

    def __call__(self, joint: Joint, *leaves: list[jax.Array]) -> LossResult:
        stored, carried, batch, key, loss_scale = leaves
        sums, plan = self.sums, self.plan
        index = batch_index(sums)
        key = [jax.random.fold_in(k, index) for k in key]  # dropout differs between devices
        before = [*stored, *carried]
        fixed = [self._as_input(i, x) for i, x in enumerate(before)]  # [D/N, F] becomes lazy
        variables = self.traced.written
        sources = [x.source for x in variables]

        def evaluate(
            batch: list[jax.Array], key: list[jax.Array], divisor: jax.Array, state: list[jax.Array]
        ) -> PyTree:
            inputs = list(fixed)
            for i, x in zip(sources, state, strict=True):
                inputs[i] = self._as_input(i, x)
            params, others = inputs[: len(stored)], inputs[len(stored) :]
            results = self._walk(joint, (params, others, batch, key, divisor, loss_scale))
            (totals, divisor, (aux, written)), grads = results
            new = [
                old if is_of_whole_batch(kind) else merge_written(x, old, kind, sums, plan)
                for x, old, kind in zip(written, state, variables, strict=True)
            ]
            stacked = {i: written[i] for i, kind in enumerate(variables) if is_of_whole_batch(kind)}
            return (totals, divisor, new, (aux, stacked)), grads

        state = [before[i] for i in sources]
        values, local = self._accumulate(joint, evaluate, batch, key, state)
        (total, weight), divisor, written, (aux, stacked) = values
        for i, x in stacked.items():
            written[i] = merge_stacked(x, written[i], variables[i], sums, plan, self.micro.steps)
        if isinstance(self.traced.out_shape[0], Weighted):
            weight = sum_over(weight, sums)  # of the global batch
            inverse = jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))  # never 1 / 0
        else:  # a constant, without a collective
            parts = num_batch_shards(plan.mesh, plan.config) * self.micro.steps
            weight = jnp.asarray(parts, weight.dtype)
            inverse = jnp.asarray(weight.dtype.type(1) / weight.dtype.type(parts))
        unscale = inverse * divisor * sums.predivide / loss_scale[0] if loss_scale else inverse
        # Sums over devices, not yet means: [D/N, F] where the plan cuts the gradient, else [D, F].
        reduced = [param.finish(local.get(i)) for i, param in enumerate(self.params)] if self.differentiates else []
        with jax.named_scope("zero_update"):
            norm, overflowed = grad_norm(reduced, [unscale if i in local else None for i in range(len(reduced))], plan)
            grads = [
                # Hosts only copy, so nothing multiplies a gradient there: `factor` goes with it.
                jnp.zeros((0,), x.dtype) if memory_of(x) == "host" else scale_by(x, unscale) if i in local else x
                for i, x in enumerate(reduced)
            ]
        loss = sum_over(total, sums) * inverse  # scalar, equal on all devices
        aux = reduce_aux(aux, sums, self.micro.steps)
        return LossResult(loss, weight, aux, written, grads, reduced, unscale, norm, overflowed)

    def _as_input(self, number: int, x: jax.Array) -> Leaf:
        """Returns a stored parameter or carried array as the walk takes it: lazy if it is cut."""
        if number < len(self.params):
            param = self.params[number]
            return make_lazy(x, param.gather, param.leaf.compute_dtype)
        leaf = self.carried[number - len(self.params)]
        if is_key(x.dtype):
            return fold_keys(x, batch_index(self.sums))  # as `rng`
        return make_lazy(x, self.gather_plan(leaf), leaf.seen_dtype)

    def _walk(self, joint: Joint, inputs: PyTree) -> PyTree:
        """Evaluates the program on one device: returns `(((sum, weight), divisor, aux), gradients by index)`."""
        leaves = jax.tree.leaves(inputs, is_leaf=is_lazy)
        order = Order.of(self.plan, differentiates=self.differentiates)
        pipelines = self.plan.config.stage == 3 and platform_facts(self.plan.mesh).pipelines_reductions
        walk = start_walk(frozenset(batch_axes(self.plan.config)), order, pipelines_reductions=pipelines)
        with jax.named_scope("zero_compute"):
            # A loss may return a parameter itself, which is still lazy.
            outputs = walk.gather(walk(joint.jaxpr, leaves))
        return joint.out.unflatten([x if hasattr(x, "astype") else jnp.asarray(x, x.dtype) for x in outputs])

    def _accumulate(
        self,
        joint: Joint,
        evaluate: Callable[..., PyTree],
        batch: list[jax.Array],
        key: list[jax.Array],
        state: list[jax.Array],
    ) -> tuple[PyTree, dict[int, jax.Array]]:
        """Sums loss, weight and gradients over micro-batches, which pass on the `state` that the loss writes.

        Returns:
          `(((sum, weight), divisor, state, others), grads)`; `others` are stacked, `aux` for `reduce_aux`.
        """
        steps, none_yet = self.micro.steps, jnp.zeros(())
        if steps == 1:
            return evaluate(batch, key, none_yet, state)
        scalars = [x.ndim == 0 for x in batch]  # scalars have no rows to split
        # [steps * B, ...] -> [steps, B, ...]
        parts = [
            x if is_scalar else x.reshape(steps, x.shape[0] // steps, *x.shape[1:])
            for x, is_scalar in zip(batch, scalars, strict=True)
        ]
        like = {j: self.params[j].like_gradient() for j in joint.differentiable}
        dtypes = {j: cast_dtype(x.dtype, self.params[j].sum_dtype) for j, x in like.items()}

        def body(carry: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            sums, divisor, state = carry
            part = [
                x if is_scalar else lax.dynamic_index_in_dim(x, i, keepdims=False)
                for x, is_scalar in zip(parts, scalars, strict=True)
            ]
            keys = [jax.random.fold_in(k, i) for k in key]  # and between micro-batches
            (values, divisor, state, aux), grads = evaluate(part, keys, divisor, state)
            grads = {j: x.astype(dtypes[j]) for j, x in grads.items()}  # [D/N, F], or [D, F] if reduced later
            return (jax.tree.map(jnp.add, sums, (values, grads)), divisor, state), aux

        zero = widen(jnp.zeros((), jax.tree.leaves(self.traced.out_shape)[0].dtype))
        start = ((zero, zero), {j: jnp.zeros(x.shape, dtypes[j]) for j, x in like.items()})
        carry, aux = lax.scan(body, (start, none_yet, state), jnp.arange(steps))  # aux: [steps, ...]
        (sums, grads), divisor, state = carry
        return (sums, divisor, state, aux), grads


def kept_by(keep: Keep, traced: TracedLoss, plan: ZeroPlan, micro: MicroBatches) -> Kept:
    """Returns what a step keeps on one device between its passes."""
    params = [(leaf.param, leaf.compute_dtype) for leaf in plan.leaves]
    params += [(x, x.compute_dtype) for x in plan.other_leaves if x.compute_dtype is not None]
    cut = [(x, dtype) for x, dtype in params if x.cut and plan.traffic.lookups_of(x.path) != "all"]
    stay = [(leaf, dtype) for leaf, dtype in cut if keep.keeps(leaf.path) or not plan.regathers]
    total = traced.num_blocks(plan)
    return Kept(
        params=frozenset(leaf.path for leaf, _ in stay),
        of_params=len(cut),
        param_bytes=sum(array_bytes(math.prod(leaf.shape), dtype) for leaf, dtype in stay),
        blocks=min(keep.blocks, total) if keep.remat in ("cheap", True) else total,
        of_blocks=total,
        block_bytes=bytes_of_kept_blocks(traced, plan, micro) if keep.blocks and total else 0,
    )
