"""What a step chooses to keep between its passes, by the arguments of its calls, see [Note: Kept by default].

Choices.of          what to keep with some arguments: before they run, or because somebody asks
Choices.fit         whether the program that keeps it fits, once it is compiled
Choices.give_way    whether a step whose run ended for want of memory goes on, and keeps nothing
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import numpy as np

from jzero.core.base.guard import attempt, warn
from jzero.core.base.types import Jitted, PyTree, TrainStateLike
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.table import format_bytes
from jzero.core.processes.agree import are_several
from jzero.core.state.train_state import check_alive
from jzero.core.step.agreement import StepAgreement
from jzero.core.step.inputs import Given, Placed, abstract_inputs, has_tracers, optional_rng, placed_dtype
from jzero.machines.limits import memory_to_spend
from jzero.machines.machine import Machine

EXHAUSTED = "RESOURCE_EXHAUSTED"
"""In the message of an error: a device has too little memory left."""


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """What a training step chose to keep.

    Attributes:
      step: The step that keeps it.
      reckon: Returns its estimated peak, in bytes. Nothing is estimated before somebody asks.
      limit: What it may use of a device, in bytes.
    """

    step: Any
    reckon: Callable[[], int]
    limit: int

    @functools.cached_property
    def peak(self) -> int:
        """Its estimated peak, in bytes."""
        return self.reckon()


Choose: TypeAlias = Callable[[Any, tuple[TrainStateLike, PyTree, PyTree], Machine | None, int], Chosen | None]
"""Chooses what a step keeps: of the step, its arguments as shapes, the machine, and what it may use of a device.
`None`, if nothing fits or an estimate fails, leaves it at "cheap"."""


class Choices:
    """What one step keeps.

    Args:
      choose: Chooses, as `Choose` does for the step; `None` if its user said what to keep, or it never chooses.
      agreement: How its processes come to one choice.
    """

    def __init__(self, choose: Callable[..., Chosen | None] | None, agreement: StepAgreement) -> None:
        self._choose, self._agreement = choose, agreement
        self.limits: dict[Hashable, int | None] = {}  # taken for runs, by the kinds of arguments
        self.made: dict[Hashable, Chosen | None] = {}  # by these and the limit

    def of(
        self,
        state: TrainStateLike,
        batch: PyTree,
        rng: jax.Array | None,
        hardware: Machine | None = None,
        hbm_bytes: float = math.inf,
        *,
        runs: bool = False,
    ) -> Chosen | None:
        """Returns what the step chooses to keep; `None` if the user said, or nothing.

        Arguments are those of `Step.resolved`. If the step is about to run, as `runs` says, processes choose together,
        once.
        """
        if self._choose is None:
            return None
        plan: ZeroPlan = state.tx.plan
        saves_memory = plan.config.offload.optimizer != "none" or plan.config.offload.params != "none"
        if saves_memory or not plan.regathers:
            return None
        key = _kinds(state, batch, rng)
        if key in self.limits and hardware is None:
            limit = self.limits[key]
        elif runs and are_several(plan.mesh) and has_tracers(jax.tree.leaves(state)):
            return None  # inside another program, processes compare nothing
        else:
            limit, hardware = self._limit(state, batch, rng, hardware, runs=runs)
            if runs:
                self.limits[key] = limit
        if not limit:
            return None
        limit = int(min(limit, hbm_bytes))
        if (key, limit) not in self.made:
            shapes = abstract_inputs(plan, state, batch, rng)
            self.made[key, limit] = self._choose(shapes, hardware, limit)
        return self.made[key, limit]

    def _limit(
        self, state: TrainStateLike, batch: PyTree, rng: jax.Array | None, hardware: Machine | None, *, runs: bool
    ) -> tuple[int | None, Machine | None]:
        """Returns the bytes that the step may use of a device, and the machine; `None` if unknown."""
        plan: ZeroPlan = state.tx.plan
        own = None
        if hardware is None:
            jax.block_until_ready(state)  # until then, the program that makes it takes memory, too
            own = sum(leaf.bytes_per_device for leaf in plan.view.leaves if leaf.memory == "device")
        limit, hardware = attempt(memory_to_spend, plan.mesh, hardware, own) or (0, None)
        if runs and limit is not None:
            limit = self._agreement.least(plan, batch, rng, functools.partial(int, limit))
        return limit, hardware

    def _taken(self, state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> Chosen | None:
        """Returns what runs with such arguments keep; `None` if the user said, or nothing."""
        key = _kinds(state, batch, rng)
        return self.made.get((key, self.limits.get(key)))

    def fit(self, jitted: Jitted, state: TrainStateLike, given: Given, placed: Placed) -> bool:
        """Whether a program that has not run yet fits; if not, the step keeps nothing from now on."""
        choice = self._taken(state, *given)
        if choice is None:
            return True
        limit = choice.limit

        def left() -> int:
            try:
                compiled = jitted.trace(state, placed[0], **optional_rng(placed[1])).lower().compile()
            except jax.errors.JaxRuntimeError as error:  # the compiler for TPUs says so itself
                if EXHAUSTED not in str(error):
                    raise
                return -1
            return limit - (attempt(_allocated_bytes, compiled) or 0)

        fits = self._agreement.least(state.tx.plan, *given, left) >= 0
        if not fits:
            self._drop(choice, state, given)
            logging.getLogger("jzero").warning(
                "Compiled, a step that keeps %s takes more than the %s of a device that are left to it, so it keeps "
                "nothing. To begin so, pass `remat='cheap'` to `make_train_step`.",
                choice.step.remat,
                format_bytes(limit),
            )
        return fits

    def give_way(self, error: RuntimeError, state: TrainStateLike, given: Given) -> bool:
        """Whether a step whose run ended with an error goes on, and keeps nothing from now on."""
        choice = self._taken(state, *given) if EXHAUSTED in str(error) else None
        if choice is None:
            return False
        if not self._agreement.all_come(state.tx.plan, lambda: check_alive(state)):
            error.add_note(
                f"By default, the step keeps {choice.step.remat}; to keep nothing, pass `remat='cheap'` to "
                "`make_train_step`."
            )
            return False
        self._drop(choice, state, given)
        warn(
            f"A device ran out of memory in a step that keeps {choice.step.remat} by default. It goes on and keeps "
            "nothing; to begin so, pass `remat='cheap'` to `make_train_step`."
        )
        return True

    def _drop(self, choice: Chosen, state: TrainStateLike, given: Given) -> None:
        """Gives up what the step chose to keep."""
        self.limits[_kinds(state, *given)] = 0
        choice.step.clear_cache()

    def clear(self) -> None:
        """Forgets all choices."""
        self.limits.clear()
        self.made.clear()


def _kinds(state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> Hashable:
    """Returns the properties of arguments that decide what a step keeps."""
    leaves, structure = jax.tree.flatten((batch, rng))
    shapes = ((np.shape(x), placed_dtype(x) if hasattr(x, "dtype") else None) for x in leaves)
    return state.tx.plan, jax.tree.structure(state), structure, *shapes


def _allocated_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of a device that a compiled program takes, its arguments among them."""
    stats: Any = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.argument_size_in_bytes + results + stats.temp_size_in_bytes)
