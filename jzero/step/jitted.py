"""The base of all steps: functions of `(state, batch, rng)`, jitted once per plan."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax

from jzero import _compat
from jzero.config.keep import Keep
from jzero.config.settings import FLAG, NAMES, Setting, check, one_of, whole
from jzero.engine.gradients import WHOLE_BATCH, MicroBatches
from jzero.engine.merge import MERGES, Merge, choose_merges
from jzero.engine.outputs import spread_marks
from jzero.engine.recompute import Remat
from jzero.engine.trace import LossInputs, TracedLoss, carried_leaves, trace_loss
from jzero.engine.written_variables import drop_unwritten, split_mutable
from jzero.layout.mesh import batch_axes, num_batch_shards
from jzero.layout.on_disk import OnDisk
from jzero.plan.plan import ZeroPlan
from jzero.state.adapter import adapt, adapt_sharded
from jzero.state.disk import detached, for_loss, run_on_rows
from jzero.state.train_state import check_alive, check_in_place
from jzero.step.agreement import StepAgreement
from jzero.step.compiler_options import CompilerOptions, check_compiler_options
from jzero.step.compiler_options import compiler_options as make_compiler_options
from jzero.step.inputs import (
    InputKind,
    abstract_inputs,
    are_like,
    check_batch,
    check_donated,
    check_loss,
    check_rng,
    check_stored,
    find_closed_over,
    has_tracers,
    kinds_of,
    optional_rng,
    place_inputs,
    warn_closed_over,
)
from jzero.step.keeping import check_keep, kept_by
from jzero.step.row_check import check_row_dims, results_of, warn_coupled

PyTree = Any
State = Any
Loss = Callable[..., Any]


_WORDS = one_of(None, True, False, "cheap", "offload", "as_written")
REMAT = Setting(
    "None, True, False, 'cheap', 'offload', 'as_written' or a `Keep`",
    lambda value: value if isinstance(value, Keep) else _WORDS.of(value),
)
MERGE = Setting(
    f"a dictionary from regular expressions over names of variables to one of {tuple(MERGES)}",
    lambda value: {str(re.compile(k).pattern): one_of(*MERGES).of(word) for k, word in dict(value).items()},
)


def _nothing() -> None:
    """A reference to an object that no longer exists."""


class _Expected(NamedTuple):
    """The likely arguments of the next call; if they come, the call skips all checks.

    Attributes:
      state: A weak reference to the state.
      jitted: The jitted function for that state.
      inputs: The kinds of batch and rng, if they were already in place.
    """

    state: Callable[[], Any] = _nothing
    jitted: Any = None
    inputs: Sequence[InputKind] = ()


def _reference(x: Any) -> Callable[[], Any]:
    return weakref.ref(x) if type(x).__weakrefoffset__ else _nothing


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
        check("accumulate_steps", micro.steps, whole(1))
        has_aux, mutable = check("has_aux", has_aux, FLAG), check("mutable", mutable, NAMES)
        if mutable and not has_aux:
            raise ValueError(
                f"`mutable={tuple(mutable)}` needs `has_aux=True`: the loss returns the new values in `aux`, by name."
            )
        self.merge = check("merge", merge or {}, MERGE)
        check("remat", remat, REMAT)
        self._checks_rows = check("check_rows", check_rows, FLAG)
        self._has_warned = False
        self.loss_fn = loss_fn
        self.has_aux = has_aux
        self.mutable = mutable
        self.micro = micro
        self.remat = remat
        check_compiler_options(compiler_options)
        self.compiler_options = compiler_options
        self._agreement = StepAgreement(
            self.maker,
            loss_fn,
            check_processes,
            {
                "has_aux": has_aux,
                "accumulate_steps": micro.steps,
                "reduce": "last" if micro.reduce_last else "each",
                "remat": remat,
                "mutable": self.mutable,
                "merge": self.merge,
                "compiler_options": compiler_options,
            },
        )
        self._options: dict[str, Any] = {
            "has_aux": has_aux,
            "mutable": mutable,
            "merge": merge,
            "micro": micro,
            "remat": remat,
            "compiler_options": compiler_options,
            "check_processes": check_processes,
            "check_rows": check_rows,
        }
        self._jits: dict[Any, Any] = {}
        self._expected = _Expected()

    maker: str
    donated: tuple[int, ...] = ()
    uses_opt_state = True
    keeps_changes = True
    differentiates = True

    def _compute(self, state: Any, batch: PyTree, *, rng: jax.Array | None = None) -> Any:
        raise NotImplementedError

    def _jit(self, plan: ZeroPlan, state: Any, structure: Any = None) -> Any:
        """Returns the jitted function for states of this plan and structure."""
        if plan.has_files:  # which the cache must not keep open
            structure = jax.tree.structure(detached(state))
        key = (plan, jax.tree.structure(state) if structure is None else structure)
        if key not in self._jits:
            self._jits[key] = self._make_jit(plan, state)
        return self._jits[key]

    def _make_jit(self, plan: ZeroPlan, state: Any) -> Any:
        return jax.jit(
            self._compute,
            donate_argnums=self.donated,
            out_shardings=self._out_shardings(plan, state),
            compiler_options=make_compiler_options(plan, self.compiler_options),
        )

    def _out_shardings(self, plan: ZeroPlan, state: Any) -> Any:
        return None

    def _call(self, state: Any, batch: PyTree, rng: jax.Array | None) -> Any:
        plan, expected, inputs = state.tx.plan, self._expected, jax.tree.leaves((batch, rng))
        leaves: list[Any] = []
        if expected.state() is not state or (_compat.CRASHES_ON_DELETED and plan.mesh.size > 1):
            leaves, structure = jax.tree.flatten(state)  # a fifth of the time of a dispatch to one device
            expected = _Expected()
        jitted, kinds = expected.jitted, expected.inputs
        if jitted is None or not are_like(inputs, kinds):
            if has_tracers([*leaves, *inputs]):
                return self._compute(state, batch, rng=rng)
            check_alive(leaves)
            if self.donated:
                check_donated(state, leaves, batch, rng)
            jitted = jitted or self._jit(plan, state, structure)
            place = functools.partial(place_inputs, plan, batch, rng, self.micro.steps)
            seen = state if self.donated else for_loss(state)
            batch, rng, in_place = self._agreement.place(place, jitted, seen, batch, rng)
            kinds = kinds_of(inputs) if in_place else ()
        try:
            results = self._run(jitted, state, batch, optional_rng(rng))
        except (RuntimeError, ValueError) as error:
            if "has been deleted" in str(error):
                check_alive(state)
            if "donate" in str(error):
                check_donated(state, jax.tree.leaves(state), batch, rng)
                raise ValueError(
                    "The batch, `rng` or two leaves of the state share memory that a step reuses. Copy what was passed "
                    "with `jnp.copy`, since the state is donated."
                ) from error
            raise
        self._expected = _Expected(_reference(self._next_state(state, results)), jitted, kinds)
        return jax.block_until_ready(results) if _compat.starves_steps(plan.mesh) else results

    def _run(self, jitted: Any, state: Any, batch: PyTree, rng: Mapping[str, Any]) -> Any:
        """Calls the jitted function."""
        plan = state.tx.plan
        if self.donated or not plan.has_files:
            return jitted(state, batch, **rng)
        if not plan.params_on_disk:
            return jitted(detached(state), batch, **rng)
        return run_on_rows(lambda seen: jitted(seen, batch, **rng), state, self._passes(plan))

    def _passes(self, plan: ZeroPlan) -> list[int]:
        """Returns the order in which a program takes rows of parameters on disk, see `RowReader.begin`."""
        return self.micro.steps * ([1, -1] if self.differentiates and plan.regathers else [1])

    def _next_state(self, state: Any, results: Any) -> Any:
        """Returns the likely state of the next call."""
        return state

    def program(self, state: State) -> Any:
        """Returns the jitted function for a state; an `OutsideStep` if the update of its kind is on records."""
        train_state = adapt_sharded(state).state
        return self._jit(train_state.tx.plan, train_state)

    def lower(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> Any:
        """Lowers the step for these (concrete or abstract) arguments, like `jax.jit(...).lower`."""
        return self.trace(state, batch, rng=rng).lower()

    def trace(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> Any:
        """Traces the step for these (concrete or abstract) arguments, like `jax.jit(...).trace`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        return self._jit(train_state.tx.plan, train_state).trace(for_loss(train_state), batch, **optional_rng(rng))

    def eval_shape(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> Any:
        """Returns the shapes of the results for these arguments, like `jax.jit(...).eval_shape`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        return self._jit(train_state.tx.plan, train_state).eval_shape(for_loss(train_state), batch, **optional_rng(rng))

    def abstract_arguments(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> tuple[Any, Any, Any]:
        """Returns `(state, batch, rng)` as shapes with the shardings that a call gives them."""
        train_state = adapt_sharded(state).state
        return abstract_inputs(train_state.tx.plan, train_state, batch, rng)

    def with_remat(self, remat: Remat | None) -> Self:
        """Returns a new step that differs in `remat` alone."""
        return type(self)(self.loss_fn, **{**self._options, "remat": remat})

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        for jitted in self._jits.values():
            jitted.clear_cache()
        self._jits.clear()
        self._agreement.clear()
        self._expected = _Expected()

    def plan(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> ZeroPlan:
        """Returns the state's plan, which also knows the loss: `plan.closed_over`, `plan.kept`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        plan = train_state.tx.plan
        traced, _ = self._trace_loss(train_state, plan, batch, rng)
        kept = kept_by(self.remat, traced, plan, self.micro) if isinstance(self.remat, Keep) else None
        return dataclasses.replace(plan, closed_over=tuple(find_closed_over(traced, plan)), kept=kept)

    def recomputation(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> Remat:
        """Returns `remat`; if it is `None`, its default for this plan and loss: "cheap" or "as_written"."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        return self._trace_loss(train_state, train_state.tx.plan, batch, rng)[0].remat

    def _trace_loss(
        self, state: Any, plan: ZeroPlan, batch: PyTree, rng: jax.Array | None
    ) -> tuple[TracedLoss, LossInputs]:
        """Returns the traced loss and its inputs."""
        check_keep(self.remat, plan)
        check_rng(rng)
        _check_third_argument(self.loss_fn, self.mutable, rng)
        merge = self._merge(plan)
        _, carried = self._bound_loss(state, plan, merge)
        inputs = LossInputs(state.params, carried, batch, rng)
        check_batch(batch, plan, self.micro.steps)

        def trace(times: int = 1) -> TracedLoss:
            steps, remat = self.micro.steps, self.remat
            loss_fn, _ = self._bound_loss(state, plan, dataclasses.replace(merge, times=times))
            return drop_unwritten(trace_loss(loss_fn, plan, inputs, accumulate_steps=steps, remat=remat, times=times))

        traced = trace()
        if traced.written or (self._checks_rows and self._num_parts(plan) > 1):
            traced = traced.with_row_facts(plan)
        leaves = [*(leaf.param for leaf in plan.leaves), *carried_leaves(plan, carried)]
        return choose_merges(traced, merge, plan, leaves, functools.partial(trace, 2)), inputs

    def _num_parts(self, plan: ZeroPlan) -> int:
        """Returns into how many parts a batch is split, each of which the loss sees alone."""
        return num_batch_shards(plan.mesh, plan.config) * self.micro.steps

    def _merge(self, plan: ZeroPlan) -> Merge:
        return Merge(self.merge, num_batch_shards(plan.mesh, plan.config))

    def _loss_and_carried(self, state: Any, plan: ZeroPlan, merge: Merge) -> tuple[Loss, dict[str, PyTree]]:
        """Returns `fn(params, batch, *rng, **carried) -> (result, changed)`, and the carried state."""
        return adapt(state).bind_loss(
            self.loss_fn,
            self.mutable,
            axes=batch_axes(plan.config),
            keeps=self.keeps_changes,
            written_shape=merge.written_shape,
        )

    def _bound_loss(self, state: Any, plan: ZeroPlan, merge: Merge) -> tuple[Loss, dict[str, PyTree]]:
        """Returns `fn(params, batch, *rng, **carried) -> (loss, (aux, changed))`, and the carried state."""
        loss_fn, carried = self._loss_and_carried(state, plan, merge)

        def call(params: PyTree, batch: PyTree, *rng: jax.Array, **carried: PyTree) -> Any:
            result, changed = loss_fn(params, batch, *rng, **carried)
            loss, aux = _split_aux(result, self.has_aux)
            if self.mutable:
                changed, aux = split_mutable(aux, carried, merge.written_shape)
            return loss, (spread_marks(aux), changed)

        return call, carried

    def _trace(self, state: Any, batch: PyTree, rng: jax.Array | None) -> tuple[TracedLoss, LossInputs]:
        plan = state.tx.plan
        _check_has_rows(state, plan)
        check_stored(state, plan)
        check_in_place(state, plan, with_opt_state=self.uses_opt_state)
        traced, inputs = self._trace_loss(state, plan, batch, rng)
        parts = self._num_parts(plan)
        num_rows = next((x.shape[0] // parts for x in jax.tree.leaves(batch) if x.ndim), None)
        check_loss(traced, num_rows)
        warn_closed_over(traced, plan)
        if self._checks_rows and parts > 1:
            results = results_of(traced)
            check_row_dims(results, num_rows)
            self._has_warned = self._has_warned or warn_coupled(results, plan, parts, self.maker)
        return traced, inputs


def _check_has_rows(state: Any, plan: ZeroPlan) -> None:
    """Raises if a program could not read parameters on disk."""
    away = [x.path for x in plan.flat_params(state.params) if isinstance(x, OnDisk)]
    if away:
        raise ValueError(
            f"{away[0]!r} is on disk (`Offload(params='disk')`), from which only steps called from Python read: call "
            "this step outside of `jax.jit`, or keep parameters in the host's memory (`params='host'`)."
        )


def _check_third_argument(loss_fn: Loss, mutable: Sequence[str], rng: jax.Array | None) -> None:
    """Raises unless a key is passed if and only if the loss takes one; ignores losses without a signature."""
    try:
        signature = inspect.signature(loss_fn, follow_wrapped=False)  # a decorator may take other arguments
    except (TypeError, ValueError):
        return
    taken = [x for x in signature.parameters.values() if x.name not in mutable]
    positional = [x for x in taken if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if rng is None and len(positional) > 2 and positional[2].default is inspect.Parameter.empty:
        raise TypeError(
            f"The loss takes a third argument, {positional[2].name!r}: pass a key, `step(state, batch, rng=key)`."
        )
    if rng is not None and len(positional) < 3 and all(x.kind != x.VAR_POSITIONAL for x in taken):
        raise TypeError("A key was passed as `rng`, but the loss takes none: `loss_fn(params, batch, rng)`.")


def _split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        if isinstance(result, tuple):
            raise TypeError("The loss returned a tuple. Say `has_aux=True` if it returns `(loss, aux)`.")
        return result, {}
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"With `has_aux=True` the loss must return `(loss, aux)`: got {type(result).__name__}.")
    return result
