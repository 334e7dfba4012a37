"""What a step keeps between its passes: `Keep` against a plan and a loss, and what is kept if the user says nothing.

[Note: Kept by default]
Stage 3 can gather parameters again for the backward pass and recompute cheap activations. That saves memory, which
mostly lies idle. So a training step whose user said nothing about recomputation keeps what fits, by the estimate of its
own trace, without a compiler: all parameters and all blocks if that takes at most `KEPT_SHARE` of what a step may use
of a device; else as many blocks as fit, if the estimate of a second trace agrees; else nothing, as `remat="cheap"`
does, also where an estimate fails, which the log says. Rows of stacks are not kept: loops would have to write and read
the stacks. What only looks like a stack, as kernels of convolutions do, is none if no loop of the loss reads its shape.
The plan, shapes and the kind of device decide, so all processes decide alike.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from typing import TYPE_CHECKING, NamedTuple

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.guard import attempt
from jzero.core.base.types import PyTree, TrainStateLike
from jzero.core.config.keep import Keep
from jzero.core.engine.gradients import MicroBatches, bytes_of_kept_blocks
from jzero.core.engine.recompute import Remat
from jzero.core.engine.trace import TracedLoss
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.plan.kept import Kept
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.table import format_bytes
from jzero.estimate.step_memory import StepMemory, memory_of_step
from jzero.machines.machine import Machine

if TYPE_CHECKING:
    from jzero.core.step.train_step import TrainStep

KEPT_SHARE = 0.7
"""Share of the memory of a step up to which values are kept without a compiler: estimates have been 17 % low."""
FREED = 0.5
"""The part of its activations that a recomputed block is taken to free: the estimate of a second trace decides."""


class KeepingStep(NamedTuple):
    """A step that keeps what fits.

    Attributes:
      step: The step.
      keep: Its option `remat`.
      memory: Its estimated memory.
      limit: What a step may use of a device, in bytes.
    """

    step: TrainStep
    keep: Keep
    memory: StepMemory
    limit: int

    @property
    def fits(self) -> bool:
        """Whether it fits, though nothing was compiled."""
        return self.memory.peak <= KEPT_SHARE * self.limit


def choose_kept(
    step: TrainStep, arguments: tuple[TrainStateLike, PyTree, PyTree], hardware: Machine | None, limit: int
) -> KeepingStep | None:
    """Returns the step that keeps what fits, see [Note: Kept by default]; `None` if that is nothing.

    Args:
      step: A step whose user said nothing about recomputation.
      arguments: Its state, batch and key, as shapes.
      hardware: The machine, if it is known.
      limit: What a step may use of a device, in bytes.
    """
    traced, _ = step.loss.trace(*arguments)
    choice = attempt(_most_that_fits, step, arguments, traced, hardware, limit)
    if choice is not None:
        params = choice.keep.params
        logging.getLogger("jzero").info(
            "The step keeps %s parameters and %s blocks between its passes: %s of %s (estimated).",
            params if params == "all" else len(params),
            choice.keep.blocks,
            format_bytes(choice.memory.peak),
            format_bytes(limit),
        )
    return choice


def _most_that_fits(
    step: TrainStep,
    arguments: tuple[TrainStateLike, PyTree, PyTree],
    traced: TracedLoss,
    hardware: Machine | None,
    limit: int,
) -> KeepingStep | None:
    plan: ZeroPlan = arguments[0].tx.plan
    cut = [leaf for leaf in plan.leaves if leaf.param.cut is not None]
    looped = _loop_shapes(traced.jaxpr)
    kept = [leaf for leaf in cut if leaf.scan_dim is None or leaf.param.shape not in looped]
    num_bytes = sum(array_bytes(math.prod(leaf.param.shape), leaf.compute_dtype) for leaf in kept)
    total = traced.num_blocks(plan)
    if not (kept or total) or plan.bytes_per_device.total + num_bytes > KEPT_SHARE * limit:
        return None
    params = "all" if kept == cut else tuple(re.escape(leaf.param.path) for leaf in kept)

    def keeping(blocks: int) -> KeepingStep:
        keep = Keep(params=params, blocks=blocks)
        candidate = step.with_remat(keep)
        candidate.loss.begin_with(dataclasses.replace(traced, remat=keep))
        return KeepingStep(candidate, keep, memory_of_step(candidate, arguments, hardware), limit)

    choice = keeping(total)
    if total and not choice.fits:
        excess = choice.memory.peak - KEPT_SHARE * limit
        blocks = total - math.ceil(excess / max(1, FREED * choice.memory.activation_bytes / total))
        choice = keeping(blocks) if blocks >= 0 else choice
    return choice if choice.fits else None


def _loop_shapes(jaxpr: AnyJaxpr) -> set[tuple[int, ...]]:
    """Returns the shapes of what loops read."""
    loops = [eqn for eqn in equations_of(jaxpr) if eqn.primitive.name in ("scan", "while")]
    return {tuple(compat.type_of(v).shape) for eqn in loops for v in eqn.invars}


def check_keep(remat: Remat | None, plan: ZeroPlan) -> None:
    """Raises if `remat` is a `Keep` that names no parameter of the plan, or one that cannot stay."""
    if not isinstance(remat, Keep) or not remat.params:
        return
    memory = plan.config.offload.params
    if memory in ("host", "disk"):
        raise ValueError(
            f"`Keep(params={remat.params!s:.100})` keeps parameters whole on the devices, and "
            f"`Offload(params={memory!r})` keeps them elsewhere to save memory: drop one of the two."
        )
    paths = [leaf.path for leaf in plan.leaves] + [x.path for x in plan.other_leaves if x.is_param]
    named = {"all", *map(re.escape, paths)}  # as `fill_memory` writes them: nothing to search
    patterns = [remat.params] if isinstance(remat.params, str) else remat.params
    unused = [x for x in patterns if x not in named and not any(map(re.compile(x).fullmatch, paths))]
    if unused:
        raise ValueError(
            f"`Keep(params=...)` has patterns that match no parameter: {unused}. A pattern is a regular expression "
            f"over a whole path, such as {re.escape(paths[0])!r}."
        )


def kept_by(keep: Keep, traced: TracedLoss, plan: ZeroPlan, micro: MicroBatches) -> Kept:
    """Returns what a step keeps on one device between its passes."""
    params = [(leaf.param, leaf.compute_dtype) for leaf in plan.leaves]
    params += [(x, x.compute_dtype) for x in plan.other_leaves if x.compute_dtype is not None]
    cut = [(leaf, dtype) for leaf, dtype in params if leaf.cut is not None]
    stay = [(leaf, dtype) for leaf, dtype in cut if keep.keeps(leaf.path) or not plan.regathers]
    total = traced.num_blocks(plan)
    return Kept(
        params=frozenset(leaf.path for leaf, _ in stay),
        of_params=len(cut),
        param_bytes=sum(array_bytes(math.prod(leaf.shape), dtype) for leaf, dtype in stay),
        blocks=min(keep.blocks, total),
        of_blocks=total,
        block_bytes=bytes_of_kept_blocks(traced, plan, micro) if keep.blocks and total else 0,
    )
