"""The base of all steps: functions of `(state, batch, rng)`, jitted once per plan.

__call__    of each kind of step: turns the user's state into a train state, and the new one back
_dispatch   checks and places the arguments, and calls the program of their plan
_compute    of each kind of step: the program, which begins with `self.loss.checked_trace(state, batch, rng)`
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jax.tree_util import PyTreeDef

from jzero.core.base import compat
from jzero.core.base.types import Jitted, PyTree, State, TrainStateLike
from jzero.core.config.keep import Keep
from jzero.core.config.settings import FLAG, NAMES, Setting, check, integer, one_of
from jzero.core.engine.gradients import WHOLE_BATCH, MicroBatches, kept_by
from jzero.core.engine.merge import MERGES
from jzero.core.engine.recompute import Remat
from jzero.core.layout.set_mesh import from_program, in_own_mesh
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.adapter import A_LOSS, Loss, adapt_sharded, plan_of
from jzero.core.state.record_states import detached, for_loss, run_on_rows
from jzero.core.state.train_state import check_alive
from jzero.core.step.agreement import StepAgreement
from jzero.core.step.compiler_options import CompilerOptions, check_compiler_options
from jzero.core.step.compiler_options import compiler_options as make_compiler_options
from jzero.core.step.inputs import (
    Given,
    InputKind,
    Placed,
    abstract_inputs,
    are_like,
    check_donated,
    find_closed_over,
    has_tracers,
    kinds_of,
    optional_rng,
    place_inputs,
)
from jzero.core.step.loss import Splitter, StepLoss, split_aux
from jzero.machines.machine import Machine

F = TypeVar("F", bound=Callable[..., Any])

_WORDS: Setting[Any] = one_of(None, True, False, "cheap", "offload", "as_written")
REMAT = Setting(
    "None, True, False, 'cheap', 'offload', 'as_written' or a `Keep`",
    lambda value: value if isinstance(value, Keep) else _WORDS.of(value),
)


def _merges(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {str(re.compile(pattern).pattern): one_of(*MERGES).of(word) for pattern, word in value.items()}


MERGE = Setting(f"a dictionary from regular expressions over names of variables to one of {tuple(MERGES)}", _merges)

ABSTRACT_MESH = (
    "A program is lowered for a platform, and this state is laid out on an `AbstractMesh`, which has none. Name it: "
    "`step.trace(state, batch).lower(lowering_platforms=('tpu',))`. Or lay the state out on devices, such as "
    "`jzero.make_mesh()`. `jzero.estimate_step_memory` takes the state as it is, and `jzero.analyze` with `topology=` "
    "compiles for a machine that you do not have."
)


def _nothing() -> None:
    """A reference to an object that no longer exists."""


class _Expected(NamedTuple):
    """The likely arguments of the next call; if they come, the call skips all checks.

    Attributes:
      state: A weak reference to the state.
      jitted: The jitted function for that state and inputs of these shapes.
      shapes: The shapes of the leaves of batch and rng.
      inputs: The kinds of batch and rng, if they were already in place.
    """

    state: Callable[[], object] = _nothing
    jitted: Jitted | None = None
    shapes: Sequence[tuple[int, ...]] = ()
    inputs: Sequence[InputKind] = ()


def _reference(x: object) -> Callable[[], object]:
    return weakref.ref(x) if type(x).__weakrefoffset__ else _nothing


class Chosen(Protocol):
    """What a training step chooses to keep, and the step that keeps it."""

    @property
    def step(self) -> Step:
        """The step."""

    @property
    def peak(self) -> int:
        """Its estimated peak, in bytes."""

    @property
    def limit(self) -> int:
        """What it may use of a device, in bytes."""


def one_batch(call: F) -> F:
    """Says how to pass several arrays to a step, which takes one batch."""

    @functools.wraps(call)
    def checked(self: Step, state: State, batch: PyTree, *more: object, rng: jax.Array | None = None) -> PyTree:
        if more:
            raise TypeError(f"A step takes one batch: got {1 + len(more)} arguments after the state. {A_LOSS}")
        return call(self, state, batch, rng=rng)

    return cast("F", checked)


class Step:
    """A function of `(state, batch, rng)`, jitted once per plan."""

    def __init__(  # noqa: PLR0913  # the options of a step
        self,
        loss_fn: Loss,
        *,
        has_aux: bool,
        mutable: Sequence[str],
        merge: Mapping[str, str] | None = None,
        micro: MicroBatches = WHOLE_BATCH,
        remat: Remat | None = None,
        compiler_options: CompilerOptions | None = None,
        check_processes: bool | float = True,
        check_rows: bool = True,
    ) -> None:
        if not callable(loss_fn):
            raise TypeError(f"The loss must be callable: got {type(loss_fn).__name__}.")
        if isinstance(loss_fn, Step):
            raise TypeError(f"The loss must not be a step itself: got {loss_fn!r}. {A_LOSS}")
        micro = micro._replace(steps=check("accumulate_steps", micro.steps, integer(1)))
        has_aux, mutable = check("has_aux", has_aux, FLAG), check("mutable", mutable, NAMES)
        if mutable and not has_aux:
            raise ValueError(
                f"`mutable={tuple(mutable)}` needs `has_aux=True`: the loss returns the new values in `aux`, by name."
            )
        remat = check("remat", remat, REMAT)
        self.loss = StepLoss(
            loss_fn,
            split=self._splitter(has_aux),
            maker=self.maker,
            differentiates=self.differentiates,
            mutable=tuple(mutable),
            merge=check("merge", merge or {}, MERGE),
            micro=micro,
            remat=remat,
            checks_rows=check("check_rows", check_rows, FLAG),
        )
        self.has_aux = has_aux
        self.mutable = mutable
        self.micro = micro
        self.remat = remat
        check_compiler_options(compiler_options)
        self.compiler_options = compiler_options
        shared = {"has_aux": has_aux, "mutable": mutable, "remat": remat, "compiler_options": compiler_options}
        reduce = "last" if micro.reduce_last else "each"
        settings = {"accumulate_steps": micro.steps, "reduce": reduce, "merge": self.loss.merge, **shared}
        self._agreement = StepAgreement(self.maker, loss_fn, check_processes, settings)
        self._options: dict[str, Any] = {
            "merge": merge,
            "micro": micro,
            "check_processes": check_processes,
            "check_rows": check_rows,
            **shared,
        }
        self._jits: dict[tuple[ZeroPlan, PyTreeDef], Jitted] = {}
        self._begun: set[Jitted] = set()
        self._expected = _Expected()

    def __repr__(self) -> str:
        return self._agreement.describe(self.defaults)

    maker: str
    defaults: ClassVar[dict[str, object]] = {
        "accumulate_steps": 1,
        "reduce": "each",
        "merge": {},
        "has_aux": False,
        "mutable": (),
    }
    donated: tuple[int, ...] = ()
    differentiates = True

    def _splitter(self, has_aux: bool) -> Splitter:
        """Returns a function that turns what the loss returns into `(loss, aux)`."""
        return functools.partial(split_aux, has_aux=has_aux)

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

    def _make_jit(self, plan: ZeroPlan, state: TrainStateLike) -> Jitted:
        return jax.jit(  # type: ignore[return-value]  # jax's type lacks `clear_cache`
            self._compute,
            donate_argnums=self.donated,
            out_shardings=self._out_shardings(plan, state),
            compiler_options=make_compiler_options(plan, self.compiler_options),
        )

    def _out_shardings(self, plan: ZeroPlan, state: TrainStateLike) -> PyTree:
        return None

    @in_own_mesh
    def _dispatch(self, state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> PyTree:
        """Runs `_compute` under `jit`; checks and places arguments unless they are of the kinds of the last call."""
        plan, expected, inputs = state.tx.plan, self._expected, jax.tree.leaves((batch, rng))
        leaves: list[object] = []
        structure = None
        if expected.state() is not state or (compat.CRASHES_ON_DELETED and plan.mesh.size > 1):
            leaves, structure = jax.tree.flatten(state)  # a fifth of the time of a dispatch to one device
            expected = _Expected()
        jitted, kinds = expected.jitted, expected.inputs
        if jitted is None or not are_like(inputs, kinds):
            if has_tracers([*leaves, *inputs]):
                batch, rng = from_program((batch, rng))
                return self._chosen(state, batch, rng, runs=True)._compute(state, batch, rng=rng)
            check_alive(leaves)
            if self.donated:
                check_donated(state, leaves, batch, rng)
            shapes = list(map(np.shape, inputs))
            if jitted is None or shapes != expected.shapes:
                jitted = self._chosen(state, batch, rng, runs=True)._jit(plan, state, structure)
            placed = self._placed(jitted, state if self.donated else for_loss(state), batch, rng)
            if placed is None:
                return self._dispatch(state, batch, rng)
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
                raise ValueError(
                    "The batch, `rng` or two leaves of the state share memory that a step reuses. Copy what was passed "
                    "with `jnp.copy`, since the state is donated."
                ) from error
            raise
        self._expected = _Expected(_reference(self._next_state(state, results)), jitted, expected.shapes, kinds)
        return jax.block_until_ready(results) if compat.starves_steps(plan.mesh) else results

    def _placed(self, jitted: Jitted, state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> Placed | None:
        """Returns the inputs on the mesh, once processes agree on the program; `None` if it does not fit."""
        begins = jitted not in self._begun
        if begins:
            logging.getLogger("jzero").info("Compiling %s.", self)
        place = functools.partial(place_inputs, state.tx.plan, batch, rng, self.micro.steps)
        placed = self._agreement.place(place, jitted, state, batch, rng)
        if begins and not self._fits(jitted, state, (batch, rng), placed):
            return None
        self._begun.add(jitted)
        return placed

    def _fits(self, jitted: Jitted, state: TrainStateLike, given: Given, placed: Placed) -> bool:
        """Whether a program that has not run yet fits; if not, the step has chosen another one."""
        return True

    def _run(self, jitted: Jitted, state: TrainStateLike, batch: PyTree, rng: Mapping[str, jax.Array]) -> PyTree:
        """Calls the jitted function."""
        plan = state.tx.plan
        if self.donated or not plan.has_records:
            return jitted(state, batch, **rng)
        if not plan.params_on_disk:
            return jitted(detached(state), batch, **rng)
        return run_on_rows(lambda program_state: jitted(program_state, batch, **rng), state, self._passes(plan))

    def _passes(self, plan: ZeroPlan) -> list[int]:
        """Returns the order in which a program takes rows of parameters on disk, see `RowReader.begin`."""
        return self.micro.steps * ([1, -1] if self.differentiates and plan.regathers else [1])

    def _next_state(self, state: TrainStateLike, results: PyTree) -> TrainStateLike:
        """Returns the likely state of the next call."""
        return state

    def resolved(
        self,
        state: State,
        batch: PyTree,
        *,
        rng: jax.Array | None = None,
        hardware: Machine | None = None,
        hbm_bytes: float = math.inf,
    ) -> Self:
        """Returns the step that runs for these arguments; another one only if this one chooses what it keeps.

        Args:
          state: The state, concrete or abstract.
          batch: The batch, likewise.
          rng: The key, likewise.
          hardware: The machine to choose for, as if nothing else lived there; if `None`, the devices as they are.
          hbm_bytes: Most bytes of the step on one device, if that is less than it may use there.
        """
        return self._chosen(*self.abstract_arguments(state, batch, rng=rng), hardware, hbm_bytes)

    def _chosen(self, *arguments: Any, runs: bool = False) -> Self:
        choice = self.choice(*arguments, runs=runs)
        return self if choice is None else cast("Self", choice.step)

    def choice(
        self,
        state: TrainStateLike,
        batch: PyTree,
        rng: jax.Array | None,
        hardware: Machine | None = None,
        hbm_bytes: float = math.inf,
        *,
        runs: bool = False,
    ) -> Chosen | None:
        """Returns what the step chooses to keep, see [Note: Kept by default]; `None` if the user said, or nothing.

        Arguments are those of `resolved`. If the step is about to run, as `runs` says, processes choose together, once.
        """
        return None

    def program(self, state: State) -> Any:
        """Returns the jitted function for a state; an `RecordStep` if the update of its kind is on records."""
        train_state = adapt_sharded(state).state
        return self._jit(train_state.tx.plan, train_state)

    @one_batch
    def lower(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> jax.stages.Lowered:
        """Lowers the step for these (concrete or abstract) arguments, like `jax.jit(...).lower`."""
        traced = self.trace(state, batch, rng=rng)
        try:
            return traced.lower()
        except ValueError as error:
            if isinstance(plan_of(state).mesh, AbstractMesh):
                raise TypeError(ABSTRACT_MESH) from error
            raise

    @in_own_mesh
    def trace(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> jax.stages.Traced:
        """Traces the step for these (concrete or abstract) arguments, like `jax.jit(...).trace`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        jitted = self._chosen(train_state, batch, rng)._jit(train_state.tx.plan, train_state)
        return jitted.trace(for_loss(train_state), batch, **optional_rng(rng))

    @in_own_mesh
    def eval_shape(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> PyTree:
        """Returns the shapes of the results for these arguments, like `jax.jit(...).eval_shape`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        jitted = self._chosen(train_state, batch, rng)._jit(train_state.tx.plan, train_state)
        return jitted.eval_shape(for_loss(train_state), batch, **optional_rng(rng))

    def abstract_arguments(
        self, state: State, batch: PyTree, *, rng: jax.Array | None = None
    ) -> tuple[TrainStateLike, PyTree, PyTree]:
        """Returns `(state, batch, rng)` as shapes with the shardings that a call gives them."""
        train_state = adapt_sharded(state).state
        return abstract_inputs(train_state.tx.plan, train_state, batch, rng)

    def with_remat(self, remat: Remat | None) -> Self:
        """Returns a new step that differs in `remat` alone."""
        return type(self)(self.loss.fn, **{**self._options, "remat": remat})

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        for jitted in self._jits.values():
            jitted.clear_cache()
        self._jits.clear()
        self._begun.clear()
        self._agreement.clear()
        self._expected = _Expected()

    @in_own_mesh
    def plan(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> ZeroPlan:
        """Returns the state's plan, which also knows the loss: `plan.closed_over`, `plan.kept`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        plan, choice = train_state.tx.plan, self.choice(train_state, batch, rng)
        step = self if choice is None else cast("Self", choice.step)
        traced, _ = step.loss.trace(train_state, batch, rng)
        plan = plan.with_written(traced.written_paths)
        kept = kept_by(step.remat, traced, plan, self.micro) if isinstance(step.remat, Keep) else None
        if kept is not None and choice is not None:
            kept = kept._replace(peak=choice.peak, limit=choice.limit)
        return dataclasses.replace(plan, closed_over=tuple(find_closed_over(traced, plan)), kept=kept)

    @in_own_mesh
    def recomputation(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> Remat:
        """Returns `remat`; if it is `None`, its default for this plan and loss: "cheap" or "as_written"."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        return self._chosen(train_state, batch, rng).loss.trace(train_state, batch, rng)[0].remat
