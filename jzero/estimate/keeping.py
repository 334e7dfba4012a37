"""What a training step keeps between its passes if its user says nothing.

[Note: Kept by default]
Stage 3 can gather parameters again for the backward pass and recompute cheap activations. That saves memory, which
mostly lies idle. So a training step whose user said nothing about recomputation keeps what fits, by the estimate of its
own trace, without a compiler: all parameters and all blocks if that takes at most `KEPT_SHARE` of what a step may use
of a device; else all parameters and as many blocks as fit, by the estimates of up to three more traces; else nothing,
as `remat="cheap"` does, also where an estimate fails, which the log says. The step is not estimated, which takes a
third of the time of tracing, if all values that the loss computes, not just moves, fit beside a whole state together.

However much fits, on GPUs no more blocks are kept than save, together with what "cheap" saves of the others, what plain
jax would save of all: scores in fp32 and shares are more than shares in fp32, all that differentiation saves of a
softmax (four Llamas and mixtures took 1.11 to 1.17 of the memory by hand so). And if to recompute nothing is faster by
more than a percent, that is the choice, unless the last block is large, see `POSTPONED`. One trace of each different
block tells both, see `BlockCosts`. A perceptron of few columns for each of many places takes more time for activations
than for products (ConvNeXt: 1.08 of the step by hand if kept blocks make them again; compilers even write its `tanh`).

Rows of stacks are not kept: loops would have to write and read the stacks. What only looks like a stack, as kernels of
convolutions do, is none if no loop of the loss reads its shape.

This must end no run that would go on with "cheap", whatever else lives on a device, such as a second state or another
process. So it is checked three times:

1. A step may use what a device has left beside the step's own state: `USABLE` of its memory, and no more than jax may
   take, less what other arrays and, as CUDA's driver knows, other processes hold. The fullest device of all processes
   counts. It is asked once, before the first run for a plan and shapes, so that the program stays.
2. After compilation, before anything runs, the compiler's figure must be within that limit in all processes.
3. A run that ends for want of memory, but has not consumed its state, is repeated. So is one beside a second state that
   came after the choice. Several processes repeat it if all come to that; if not, the error says what to pass.

What fails one of the last two keeps nothing from then on. Processes that compare nothing (`check_processes=False`, or a
step inside another program, which the last two cannot check either) keep nothing from the start. `step.plan`, `lower`
and the like may be called in one process alone: before the first run they tell what its own devices would allow.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import re
from typing import Literal

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.guard import attempt
from jzero.core.base.types import PyTree, TrainStateLike
from jzero.core.config.keep import Keep
from jzero.core.engine.trace import TracedLoss, plan_for
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.primitives import Trait, primitives_with
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.platform import platform_facts
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.table import format_bytes
from jzero.core.step.choice import Chosen
from jzero.core.step.train_step import TrainStep
from jzero.estimate.block_costs import BlockCosts
from jzero.estimate.buffers import bytes_of
from jzero.estimate.step_memory import memory_of_step
from jzero.machines.machine import Machine

KEPT_SHARE = 0.85
"""Share of what a step may use up to which values are kept without a compiler. Estimates of dense models have been up
to 10 % low: such a step takes 0.85 / 0.9 = 94 % of it, and the rest is for fragments. One whose estimate is more than
15 % low is compiled in vain, since the compiler's figure decides."""
WORTH_MEMORY = 1.01
"""How much longer kept blocks must take than blocks as written, which save more, for the latter to be chosen."""
POSTPONED = 40
"""How many times the last block all blocks must save to be left as written. Nothing makes compilers compute the
gradients of such blocks in time, see [Note: Waiting for gradients], so what some two blocks save lives beside all."""
MOVES = primitives_with(Trait.LAYOUT | Trait.ALIAS)
"""Operations that compute nothing."""
SECANTS = 2
"""How many numbers of blocks are traced between none and all of them. Two found the most of 16 that fit."""


def choose_kept(
    step: TrainStep, arguments: tuple[TrainStateLike, PyTree, PyTree], hardware: Machine | None, limit: int
) -> Chosen | None:
    """Returns the step that keeps what fits, see [Note: Kept by default]; `None` if that is nothing.

    `None`, too, if the estimate fails: `attempt` logs it, and the step stays at "cheap", which needs no estimate.

    Args:
      step: A step whose user said nothing about recomputation.
      arguments: Its state, batch and key, as shapes.
      hardware: The machine, if it is known.
      limit: What a step may use of a device, in bytes.
    """
    traced, inputs = step.loss.trace(*arguments)
    plan = plan_for(arguments[0].tx.plan, traced, inputs.carried)
    choice = attempt(_most_that_fits, step, arguments, traced, plan, hardware, limit)
    if choice is not None:
        keep: Keep = choice.step.remat
        logging.getLogger("jzero").info(
            "The step keeps %s parameters and %s blocks between its passes, with %s to use.",
            keep.params if keep.params == "all" else len(keep.params),
            keep.blocks if keep.remat == "cheap" else "all",
            format_bytes(limit),
        )
    return choice


def _most_that_fits(
    step: TrainStep,
    arguments: tuple[TrainStateLike, PyTree, PyTree],
    traced: TracedLoss,
    plan: ZeroPlan,
    hardware: Machine | None,
    limit: int,
) -> Chosen | None:
    cut = [leaf for leaf in plan.leaves if leaf.param.cut and plan.traffic.lookups_of(leaf.path) != "all"]
    looped = _loop_shapes(traced.jaxpr)
    kept = [leaf for leaf in cut if leaf.scan_dim is None or leaf.param.shape not in looped]
    num_bytes = sum(array_bytes(math.prod(leaf.param.shape), leaf.compute_dtype) for leaf in kept)
    total = traced.num_blocks(plan)
    if not (kept or total) or plan.bytes_per_device.total + num_bytes > KEPT_SHARE * limit:
        return None
    params = "all" if kept == cut else tuple(re.escape(leaf.param.path) for leaf in kept)

    def keeping(blocks: int, remat: Literal["cheap", "as_written"] = "cheap") -> Chosen:
        keep = Keep(params=params, blocks=blocks, remat=remat)
        candidate = step.with_remat(keep)
        candidate.loss.begin_with(dataclasses.replace(traced, remat=keep))
        return Chosen(candidate, lambda: memory_of_step(candidate, arguments, hardware).peak, limit)

    all_fits = plan.replicated_bytes.total + _value_bytes(traced.jaxpr) <= KEPT_SHARE * limit

    def fits(choice: Chosen) -> bool:
        return choice.peak <= KEPT_SHARE * limit

    for blocks, remat in attempt(_preferred, traced, plan, hardware, looped) or [(total, "cheap")]:
        most = keeping(blocks, remat)
        if all_fits or fits(most):
            return most
    least = keeping(0)
    if not total or not fits(least):
        return None
    for _ in range(SECANTS):  # the peak is a convex function of the blocks, so what lies below a secant fits
        fewest = least.step.remat.blocks
        slope = (most.peak - least.peak) / (most.step.remat.blocks - fewest)
        blocks = fewest + int((KEPT_SHARE * limit - least.peak) / slope)
        if blocks == fewest:
            break
        choice = keeping(blocks)
        least, most = (choice, most) if fits(choice) else (least, choice)
    return least


def _preferred(
    traced: TracedLoss, plan: ZeroPlan, hardware: Machine | None, looped: set[tuple[int, ...]]
) -> list[tuple[int, Literal["cheap", "as_written"]]]:
    """Returns the blocks to keep if there is memory, and what is recomputed apart from them; the best choice first."""
    total = traced.num_blocks(plan)
    if platform_facts(plan.mesh).fuses_products:  # kept blocks are as written
        return [(total, "cheap")]
    costs = BlockCosts(traced.jaxpr, plan, hardware)
    kept, written = costs.of("kept"), costs.of("as_written")
    left = sum(x.num_bytes for x in written)
    is_slower = sum(x.seconds for x in kept) > WORTH_MEMORY * sum(x.seconds for x in written)
    if is_slower and not looped and POSTPONED * written[-1].num_bytes <= left:
        return [(0, "as_written"), (total, "cheap")]
    if sum(x.num_bytes for x in kept) <= left:
        return [(total, "cheap")]
    cheap = costs.of("cheap")
    left = max(0, left - sum(x.num_bytes for x in cheap))
    more = [x.num_bytes - y.num_bytes for x, y in zip(reversed(kept), reversed(cheap), strict=True)]
    return [(sum(x <= left for x in itertools.accumulate(more)), "cheap")]


def _value_bytes(jaxpr: AnyJaxpr) -> int:
    """Returns the bytes of all values that a jaxpr computes, in all turns of its loops; what only moves, XLA fuses."""
    total = 0
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        inner = sum(map(_value_bytes, compat.contained_jaxprs(eqn)))
        own = 0 if eqn.primitive.name in MOVES else sum(map(bytes_of, (v.aval for v in eqn.outvars)))
        total += inner * eqn.params.get("length", 1) or own
    return total


def _loop_shapes(jaxpr: AnyJaxpr) -> set[tuple[int, ...]]:
    """Returns the shapes of what loops read."""
    loops = [eqn for eqn in equations_of(jaxpr) if eqn.primitive.name in ("scan", "while")]
    return {tuple(compat.type_of(v).shape) for eqn in loops for v in eqn.invars}
