"""`fill_memory`: spends free memory on a faster step.

[Note: What is kept first]
What could stay between the passes is one ordered list, and the longest prefix that fits is kept:

1. parameters that the default gathers more than twice, such as weights that the loss uses several times,
2. all other parameters, the last used first,
3. blocks, the last first.

Parameters come first: a block that is kept but gathers its parameters again has no computation to hide these gathers
behind (for a mixture of experts on 8 H200s, keeping 5 of 8 blocks this way was slower than keeping none). Of blocks,
little but the number matters. Rows of stacks are candidates only if a step is known to communicate for more than a
quarter of the time that it computes, since loops must write and read stacks to keep them. Only the plan, shapes and the
limit decide, so all processes keep the same.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Iterable
from typing import Any

from jzero.analysis.candidates import SURE_SHARE
from jzero.analysis.compiled_step import CompiledStep, compile_step
from jzero.analysis.replanning import plan_of_argument, relaid
from jzero.core.base.guard import warn
from jzero.core.base.types import PyTree, State
from jzero.core.config.keep import Keep
from jzero.core.config.settings import FLAG, check, number, optional
from jzero.core.layout.leaves import StateLeaf
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.table import format_bytes
from jzero.core.processes.agree import agree
from jzero.core.step.train_step import TrainStep
from jzero.estimate.step_memory import StepMemory, memory_of_step
from jzero.estimate.traced_collectives import TracedCollective, traced_collectives
from jzero.machines.limits import hardware_of, limit_of
from jzero.machines.machine import Machine

BUSY_LINKS = 0.25
"""The ratio of communication to computation above which rows of stacks may be kept."""
MANY_USES = 2.5
"""Gathers per step above which a parameter comes first; a loop that gathers ahead makes slightly more than two."""
MOST_COMPILED = 4
"""Most programs to compile until one fits."""


def fill_memory(  # noqa: PLR0913  # the arguments of a step, and a machine
    step: TrainStep,
    state: State,
    batch: PyTree,
    *,
    rng: Any = None,
    hbm_bytes: float | None = None,
    topology: str | None = None,
    confirm: bool = True,
) -> TrainStep:
    """Returns a step that keeps what fits between its passes, instead of gathering and recomputing it.

    By default a step keeps what is estimated to fit well, see [Note: Kept by default]. This asks the compiler: it fills
    a limit closely, and finds where keeping is slower. It chooses a `Keep` by [Note: What is kept first]. If `step` has
    an option `remat` other than "cheap", that stays, and only parameters are kept.

    Args:
      step: From `make_train_step`. It does not change.
      state: Its state, concrete or abstract.
      batch: The global batch, concrete or abstract.
      rng: The step's `rng`, if it takes one.
      hbm_bytes: Most bytes of a step on one device. By default 90 % of the device's memory, and no more than jax may
        take of it.
      topology: A machine such as `"h200:8"`; by default the devices of the state.
      confirm: Whether to compile the choice, others if its memory is not as estimated, `step` itself, and the step that
        keeps parameters alone; the fastest by its compiled schedule is returned. Without it, or without the compiler of
        `topology`, the choice is the longest prefix whose estimate is within 90 % of the limit.

    Returns:
      A step that differs in `remat`: "cheap" or `step` itself if nothing more fits, or nothing could be kept.

    Raises:
      TypeError: `step` is not a training step of jzero, or the state is not sharded.
      ValueError: The machine or its memory is unknown, the step cannot keep anything (`remat="offload"`, parameters on
        the host or on disk), or processes have different limits.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(jnp.tanh(batch @ params["w"]) @ params["w"]).mean()
      >>> step = jzero.make_train_step(loss_fn)
      >>> step = jzero.fill_memory(step, state, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> step.remat
      Keep(params='all', blocks=0, remat='cheap')
    """
    if not isinstance(step, TrainStep):
        raise TypeError(f"`step` must be what `make_train_step` returned: got {type(step).__name__}.")
    check("confirm", confirm, FLAG)
    hbm_bytes = check("hbm_bytes", hbm_bytes, optional(number("a number of bytes >= 1", lambda x: 1 <= x < math.inf)))
    hardware, devices, notes = hardware_of(topology, confirm=confirm)
    for note in notes if confirm else ():
        warn(note)
    limit = limit_of(hbm_bytes, topology, hardware)
    if step.remat == "offload":
        raise ValueError("With `remat='offload'` a step saves memory at the cost of time: leave `remat` out.")
    if topology is not None:
        count = hardware.num_devices if devices is None and hardware is not None else devices
        state = relaid(state, devices=count, hardware=hardware)
    plan = plan_of_argument(state)
    if plan is None:
        raise TypeError("The state is not sharded by jzero: pass what `shard_train_state` returned.")
    limits = {"the memory that a step may take": f"{limit} bytes"}
    agree("fill_memory", plan.mesh, lambda: None, lambda _: limits)
    if step.remat is None and plan.regathers:
        step = step.with_remat("cheap")  # without what such a step keeps by itself
    filling = Filling(step=step, arguments=(state, batch, rng), plan=plan, machine=hardware, topology=topology)
    if (excess := filling.estimated(0).peak - limit) > 0:
        warn(
            f"Nothing is kept: the step itself takes {format_bytes(limit + excess)} per device (estimated), "
            f"{format_bytes(excess)} too much. Use a layout that fits: `jzero.fit` finds one."
        )
        return step
    chosen = filling.confirmed(limit) if confirm and devices is not None else filling.longest(SURE_SHARE * limit)
    return filling.step_keeping(chosen) if chosen else step


@dataclasses.dataclass(kw_only=True)
class Filling:
    """The list of [Note: What is kept first], and the memory of steps that keep a prefix of it.

    Attributes:
      step: The step that keeps nothing.
      arguments: Its state, batch and key.
      plan: The plan of the state.
      machine: The machine's specifications; `None` if unknown.
      topology: Its name, if it is not this one.
      paths: Parameters, in the order of the list.
      num_blocks: The number of blocks after them.
      is_all: Whether no parameter that is gathered again is left out.
      compiled: The figures of compiled steps, by the length of the prefix, `None` if rejected; may start with known
        ones.
    """

    step: TrainStep
    arguments: tuple[State, PyTree, PyTree]
    plan: ZeroPlan
    machine: Machine | None
    topology: str | None
    compiled: dict[int, CompiledStep | None] = dataclasses.field(default_factory=dict)
    paths: list[str] = dataclasses.field(init=False)
    num_blocks: int = dataclasses.field(init=False)
    is_all: bool = dataclasses.field(init=False)
    _estimates: dict[int, StepMemory] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        state, batch, rng = self.arguments
        traced = self.step.trace(state, batch, rng=rng)
        self._estimates[0] = memory_of_step(self.step, self.arguments, self.machine, traced)
        again, time = (
            _gathered_again(traced_collectives(traced.jaxpr), self.plan, self.step.micro.steps),
            self._estimates[0].time,
        )
        has_busy_links = time is not None and time.communication > BUSY_LINKS * time.compute
        self.paths = [path for path, is_row in again if has_busy_links or not is_row]
        self.is_all = len(self.paths) == len(again)
        recomputes = self.step.recomputation(state, batch, rng=rng) == "cheap"
        kept_counts = self.step.with_remat(Keep()).plan(state, batch, rng=rng).kept if recomputes else None
        self.num_blocks = 0 if kept_counts is None else kept_counts.of_blocks

    def step_keeping(self, number: int) -> TrainStep:
        """Returns the step that keeps the first `number` of the list."""
        params, remat = self.paths[:number], self.step.remat
        assert remat != "offload"
        is_all = self.is_all and 0 < len(self.paths) <= number
        return self.step.with_remat(
            Keep(
                params="all" if is_all else tuple(map(re.escape, params)),
                blocks=max(0, number - len(self.paths)),
                remat="cheap" if remat is None else remat.remat if isinstance(remat, Keep) else remat,
            )
        )

    def estimated(self, number: int) -> StepMemory:
        """Returns the estimated memory of that step."""
        if number not in self._estimates:
            step = self.step_keeping(number)
            logging.getLogger("jzero").info("Tracing a step that keeps %s between its passes.", self._words(number))
            self._estimates[number] = memory_of_step(step, self.arguments, self.machine)
        return self._estimates[number]

    def longest(self, limit: float) -> int:
        """Returns the length of the longest prefix whose estimated peak is within a limit; 0 if there is none.

        Peaks are nearly linear in the bytes of parameters and in the number of blocks, so interpolation finds it.
        """
        low, high = 0, len(self.paths) + self.num_blocks
        for end in (high, len(self.paths)):
            if not end or self.estimated(end).peak <= limit:
                low = end
                break
            high = end
        iteration = 0
        while high - low > 1:
            a, b = self.estimated(low).peak, self.estimated(high).peak
            share = 0.5 if iteration % 3 == 2 or a >= b else (limit - a) / (b - a)  # sometimes a bisection, to end soon
            middle = min(max(self._at(low, high, share), low + 1), high - 1)
            if self.estimated(middle).peak <= limit:
                low = middle
            else:
                high = middle
            iteration += 1
        return low

    def _at(self, low: int, high: int, share: float) -> int:
        """Returns the prefix between two that adds a share of what lies between them."""
        if low >= len(self.paths):
            return low + int(share * (high - low))
        sizes = {x.path: x.size for x in _params(self.plan)}
        sums = list(itertools.accumulate(sizes[path] for path in self.paths[low:high]))
        return low + bisect.bisect_right(sums, share * sums[-1])

    def confirmed(self, limit: int) -> int:
        """Returns the length of the prefix whose compiled schedule takes least time, of those that fit.

        It searches for the longest that fits, in a few compilations. If rates are known, it also compiles the step that
        keeps nothing and the one that keeps parameters alone: to write and read what is kept can take longer than to
        recompute it.
        """
        longest, fails = 0, len(self.paths) + self.num_blocks + 1
        number, most = self.longest(limit), len(self.compiled) + MOST_COMPILED
        while number > longest and len(self.compiled) < most:
            figures = self.compiled[number] = self._compile(number)
            estimated = self.estimated(number).peak
            if figures is None:
                fails, number = number, self.longest(SURE_SHARE * estimated)
                continue
            fits = figures.peak <= limit
            longest, fails = (number, fails) if fits else (longest, number)
            # The next estimate may be off by as much, or in the same ratio: if this step fits, try the bolder guess,
            # and one more at least, since what another block takes may be less than what estimates are off by.
            guesses = self.longest(limit - (figures.peak - estimated)), self.longest(limit * estimated / figures.peak)
            number = min(max(*guesses, number + 1) if fits else min(guesses), fails - 1)
        if longest == 0 or self.machine is None:
            return longest
        for number in {0, min(len(self.paths), longest)} - {*self.compiled}:
            self.compiled[number] = self._compile(number)
        fitting = {n: x for n, x in self.compiled.items() if x is not None and x.peak <= limit}
        return min(fitting, key=lambda n: (fitting[n].seconds or 0.0, n))

    def _words(self, number: int) -> str:
        return f"{number} of {len(self.paths) + self.num_blocks} parameters and blocks"

    def _compile(self, number: int) -> CompiledStep | None:
        step = self.step_keeping(number) if number else self.step
        logging.getLogger("jzero").info("Compiling a step that keeps %s between its passes.", self._words(number))
        return compile_step(step, self.arguments, self.topology, self.machine)


def _gathered_again(moved: Iterable[TracedCollective], plan: ZeroPlan, micro_batches: int) -> list[tuple[str, bool]]:
    """Returns the parameters that a step gathers more than once, in the order to keep them, and whether by rows."""
    shapes = {x.path: x.shape for x in _params(plan)}
    times, rows = collections.Counter[str](), dict[str, bool]()
    for x in moved:
        if x.gathers and x.path in shapes:
            rows.setdefault(x.path, len(x.cut.shape) < len(shapes[x.path]))
            times[x.path] += x.times * math.prod(x.cut.shape)
    uses = {path: n / (micro_batches * math.prod(shapes[path])) for path, n in times.items()}
    last_first = [path for path in reversed(rows) if uses[path] > 1]  # in the order of their first gathers
    return [(path, rows[path]) for path in sorted(last_first, key=lambda path: uses[path] <= MANY_USES)]


def _params(plan: ZeroPlan) -> list[StateLeaf]:
    return [*(leaf.param for leaf in plan.leaves), *(x for x in plan.other_leaves if x.is_param)]
