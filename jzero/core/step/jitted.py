"""Functions of `(state, batch, rng)`, jitted once per plan: how a batch comes to its program.

_dispatch   what a step's `__call__` calls with a train state; sets the state's mesh
_call       one look at state and inputs: if they are those that were expected, the program runs at once
_chosen     else: the step that keeps what fits, and
_jit        its jitted function, from a cache by plan
_placed     the inputs on the mesh, once processes agree on the program and it fits
_run        calls the jitted function
_compute    of each kind of step: the program, which begins with `self.loss.checked_trace(state, batch, rng)`
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jzero.core.base import compat
from jzero.core.base.types import Jitted, PyTree, TrainStateLike
from jzero.core.layout.set_mesh import from_program, in_own_mesh
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.record_states import detached, for_loss, run_on_rows
from jzero.core.state.train_state import check_alive
from jzero.core.step.agreement import StepAgreement
from jzero.core.step.choice import Choices
from jzero.core.step.compiler_options import compiler_options as make_compiler_options
from jzero.core.step.inputs import (
    InputKind,
    Placed,
    are_like,
    check_donated,
    has_tracers,
    kinds_of,
    optional_rng,
    place_inputs,
)
from jzero.core.step.options import StepOptions

SHARED_MEMORY = (
    "The batch, `rng` or two leaves of the state share memory that a step reuses. Copy what was passed with "
    "`jnp.copy`, since the state is donated."
)


class _Expected(NamedTuple):
    """The likely arguments of the next call; if they come, the call skips all checks.

    Attributes:
      state: A weak reference to the state.
      jitted: The jitted function for that state and inputs of these shapes.
      shapes: The shapes of the leaves of batch and rng.
      inputs: The kinds of batch and rng, if they were already in place.
    """

    state: Callable[[], object] = lambda: None
    jitted: Jitted | None = None
    shapes: Sequence[tuple[int, ...]] = ()
    inputs: Sequence[InputKind] = ()


class JittedStep:
    """A function of `(state, batch, rng)`, jitted once per plan.

    Attributes:
      donated: The arguments that it consumes. A step that consumes its state returns the next one first.
      differentiates: Whether it trains.
    """

    donated: tuple[int, ...] = ()
    differentiates = True

    def __init__(
        self,
        options: StepOptions,
        agreement: StepAgreement,
        choose: Callable[..., Any] | None,
    ) -> None:
        self.options, self.micro = options, options.micro
        self._agreement = agreement
        self._choices = Choices(choose, agreement)
        self._jits: dict[tuple[ZeroPlan, PyTreeDef], Jitted] = {}
        self._begun: set[Jitted] = set()
        self._expected = _Expected()

    @in_own_mesh
    def _dispatch(self, state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> PyTree:
        """Returns the results of `_compute`; a run that ends for want of memory is repeated if less can be kept."""
        try:
            return self._call(state, batch, rng)
        except RuntimeError as error:
            if not self._choices.give_way(error, state, (batch, rng)):
                raise
        return self._call(state, batch, rng)

    def _call(self, state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> PyTree:
        """Runs `_compute` under `jit`; checks and places arguments unless they are of the kinds of the last call."""
        plan, expected, inputs = state.tx.plan, self._expected, jax.tree.leaves((batch, rng))
        leaves: list[object] = []
        structure = None
        if expected.state() is not state:
            leaves, structure = jax.tree.flatten(state)  # a fifth of the time of a dispatch to one device
            expected = _Expected()
        elif compat.CRASHES_ON_DELETED and plan.mesh.size > 1:
            leaves = jax.tree.leaves(state)
            self._check_arrays(state, leaves, batch, rng)
        jitted, kinds = expected.jitted, expected.inputs
        if jitted is None or not are_like(inputs, kinds):
            if has_tracers([*leaves, *inputs]):
                batch, rng = from_program((batch, rng))
                return self._chosen(state, batch, rng, runs=True)._compute(state, batch, rng=rng)
            self._check_arrays(state, leaves, batch, rng)
            shapes = list(map(np.shape, inputs))
            if jitted is None or shapes != expected.shapes:
                jitted = self._chosen(state, batch, rng, runs=True)._jit(plan, state, structure)
            placed = self._placed(jitted, state if self.donated else for_loss(state), batch, rng)
            if placed is None:
                return self._call(state, batch, rng)
            batch, rng, in_place = placed
            kinds = kinds_of(inputs) if in_place else ()
            expected = expected._replace(shapes=shapes)
        try:
            results = self._run(jitted, state, batch, optional_rng(rng))
        except (RuntimeError, ValueError) as error:
            self._expected = _Expected()
            if "has been deleted" in str(error):
                check_alive(state)
            if "donate" in str(error):
                check_donated(state, jax.tree.leaves(state), batch, rng)
                raise ValueError(SHARED_MEMORY) from error
            raise
        following = results[0] if self.donated else state
        reference = weakref.ref(following) if type(following).__weakrefoffset__ else _Expected().state
        self._expected = _Expected(reference, jitted, expected.shapes, kinds)
        return jax.block_until_ready(results) if compat.starves_steps(plan.mesh) else results

    def _check_arrays(
        self, state: TrainStateLike, leaves: Sequence[object], batch: PyTree, rng: jax.Array | None
    ) -> None:
        """Raises for arrays with which XLA may crash."""
        check_alive(leaves)
        if self.donated:
            check_donated(state, leaves, batch, rng)

    def _chosen(self, *arguments: Any, runs: bool = False) -> Self:
        """Returns the step that runs for these arguments, those of `Choices.of`: another one if this one chose it."""
        choice = self._choices.of(*arguments, runs=runs)
        return self if choice is None else cast("Self", choice.step)

    def _compute(self, state: TrainStateLike, batch: PyTree, *, rng: jax.Array | None = None) -> PyTree:
        """The program of the step."""
        raise NotImplementedError

    def _jit(self, plan: ZeroPlan, state: TrainStateLike, structure: PyTreeDef | None = None) -> Jitted:
        """Returns the jitted function for states of this plan and structure."""
        if plan.has_records:  # which the cache must not keep open
            structure = jax.tree.structure(detached(state))
        key = (plan, jax.tree.structure(state) if structure is None else structure)
        if key not in self._jits:
            self._jits[key] = self._make_jit(plan, state)
        return self._jits[key]

    def _make_jit(self, plan: ZeroPlan, state: TrainStateLike, out_shardings: PyTree = None) -> Jitted:
        return jax.jit(  # type: ignore[return-value]  # jax's type lacks `clear_cache`
            self._compute,
            donate_argnums=self.donated,
            out_shardings=out_shardings,
            compiler_options=make_compiler_options(plan, self.options.compiler_options),
        )

    def _placed(self, jitted: Jitted, state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> Placed | None:
        """Returns the inputs on the mesh, once processes agree on the program; `None` if it does not fit."""
        begins = jitted not in self._begun
        if begins:
            logging.getLogger("jzero").info("Compiling %s.", self)
        place = functools.partial(place_inputs, state.tx.plan, batch, rng, self.micro.steps)
        placed = self._agreement.place(place, jitted, state, batch, rng)
        if begins and not self._choices.fit(jitted, state, (batch, rng), placed):
            return None
        self._begun.add(jitted)
        return placed

    def _run(self, jitted: Jitted, state: TrainStateLike, batch: PyTree, rng: Mapping[str, jax.Array]) -> PyTree:
        """Calls the jitted function."""
        plan = state.tx.plan
        if self.donated or not plan.has_records:
            return jitted(state, batch, **rng)
        if not plan.params_on_disk:
            return jitted(detached(state), batch, **rng)
        return run_on_rows(lambda program_state: jitted(program_state, batch, **rng), state, self._directions(plan))

    def _directions(self, plan: ZeroPlan) -> list[int]:
        """Returns the order in which a program takes rows of parameters on disk, see `RowReader.begin`."""
        return self.micro.steps * ([1, -1] if self.differentiates and plan.regathers else [1])

    def clear_cache(self) -> None:
        """Forgets all compiled programs, and what they keep."""
        for jitted in self._jits.values():
            jitted.clear_cache()
        self._jits.clear()
        self._begun.clear()
        self._agreement.clear()
        self._choices.clear()
        self._expected = _Expected()
