"""Checks that processes agree on the program that a step is about to run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import jax

from jzero.core.base.types import Jitted, PyTree, TrainStateLike
from jzero.core.plan.plan import ZeroPlan
from jzero.core.processes.agree import MEET_S, PROGRAM, Parts, agree, are_several, check_wait, least
from jzero.core.processes.fingerprints import describe_inputs, describe_plan, describe_program, function_name
from jzero.core.state.adapter import Loss
from jzero.core.step.inputs import Placed, optional_rng
from jzero.core.step.options import StepOptions


class StepAgreement:
    """Makes processes compare a program before a step first runs it, and remembers their agreements.

    Attributes:
      where: The function that made the step, with its argument.
      settings: The other arguments of that function, by name.
    """

    def __init__(self, maker: str, fn: Loss, options: StepOptions) -> None:
        self.where = f"{maker}({function_name(fn)})"
        self.settings = {name: x for name, x in vars(options).items() if not name.startswith("check_")}
        self._wait_s = check_wait(options.check_processes)
        self._agreed: set[Hashable] = set()

    def describe(self, defaults: StepOptions) -> str:
        """Returns the call that made the step, with the settings that are not the defaults."""
        said = [f"{name}={x!r}" for name, x in self.settings.items() if x != getattr(defaults, name)]
        return f"{', '.join([self.where[:-1], *said])})"

    def place(
        self, place: Callable[[], Placed], jitted: Jitted, state: TrainStateLike, batch: PyTree, rng: jax.Array | None
    ) -> Placed:
        """Returns the result of `place`, once processes agree on the program that runs on it.

        Args:
          place: Checks batch and rng and puts them on the mesh.
          jitted: The function to call next. It compiles the program that is traced and lowered here.
          state: The train state.
          batch: The batch as the user passed it.
          rng: The key as the user passed it.
        """
        plan = state.tx.plan
        if self._wait_s is None or not are_several(plan.mesh):
            return place()
        leaves, structure = jax.tree.flatten((batch, rng))
        key = (jitted, structure, *map(_kind, leaves))
        if key in self._agreed:
            return place()
        self.least(plan, batch, rng, lambda: 0)

        def lower() -> tuple[Placed, jax.stages.Lowered]:
            placed = place()
            return placed, jitted.trace(state, placed[0], **optional_rng(placed[1])).lower()

        placed, _ = agree(
            self.where, plan.mesh, lower, lambda x: {PROGRAM: describe_program(x[1])}, wait_s=self._wait_s
        )
        self._agreed.add(key)
        return placed

    def least(self, plan: ZeroPlan, batch: PyTree, rng: jax.Array | None, number: Callable[[], int]) -> int:
        """Returns the least number of all processes that are about to run the step; without comparison, 0 or less."""
        return least(self.where, plan.mesh, number, lambda: self._describe(plan, batch, rng), wait_s=self._wait_s)

    def all_come(self, plan: ZeroPlan, check: Callable[[], None]) -> bool:
        """Whether all processes come here, soon, and no check fails."""
        try:
            agree(f"{self.where}, out of memory", plan.mesh, check, lambda _: {}, wait_s=MEET_S)
        except (RuntimeError, ValueError):
            return False
        return True

    def _describe(self, plan: ZeroPlan, batch: PyTree, rng: jax.Array | None) -> Parts:
        return {
            "the training state": describe_plan(plan),
            "the settings of the step": "\n".join(f"{name}={_sort_items(x)}" for name, x in self.settings.items()),
            "the batch": describe_inputs(batch, rng),
        }

    def clear(self) -> None:
        """Forgets all agreements."""
        self._agreed.clear()


def _kind(x: object) -> tuple[object, ...]:
    """Returns the properties of an input that decide whether jax traces again."""
    return getattr(x, "shape", None), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False)


def _sort_items(x: object) -> object:
    return sorted(x.items()) if isinstance(x, Mapping) else x
