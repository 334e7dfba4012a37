"""The loss of a step, from the user's function to a checked jaxpr.

StepLoss.checked_trace   in a step's program: checks the state, then the traced loss
StepLoss.trace           makes `fn(params, batch, *rng, **carried)` of the user's function, and traces it
StateAdapter.bind_loss   gives the user's function the model or the fields that it takes
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Callable
from typing import TypeAlias

import jax

from jzero.core.base.guard import attempt
from jzero.core.base.types import PyTree, TrainStateLike
from jzero.core.config.keep import Keep
from jzero.core.engine.merge import Merge, choose_merges
from jzero.core.engine.outputs import spread_marks
from jzero.core.engine.recompute import Remat
from jzero.core.engine.trace import LossInputs, TracedLoss, carried_leaves, trace_loss
from jzero.core.engine.written_variables import by_field, drop_unwritten, split_mutable
from jzero.core.layout.mesh import num_batch_shards
from jzero.core.layout.stored import InRecords
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.adapter import A_LOSS, Loss, adapt
from jzero.core.state.train_state import require_planned_memory
from jzero.core.step.inputs import check_batch, check_loss, check_rng, check_stored, warn_closed_over, warn_rounded
from jzero.core.step.options import StepOptions
from jzero.core.step.row_check import check_row_dims, results_of, warn_coupled

Splitter: TypeAlias = Callable[[PyTree], tuple[PyTree, PyTree]]
"""Turns what a user's loss returns into `(loss, aux)`."""


@dataclasses.dataclass
class StepLoss:
    """A user's loss, with the options of its step.

    Attributes:
      fn: The user's function.
      split: Turns what it returns into `(loss, aux)`.
      maker: The public function that made the step.
      differentiates: Whether the step trains: it needs the optimizer state, and keeps what the loss changes.
    """

    fn: Loss
    options: StepOptions
    split: Splitter
    maker: str
    differentiates: bool

    def __post_init__(self) -> None:
        self._has_warned = False
        self._traced: TracedLoss | None = None

    def begin_with(self, traced: TracedLoss) -> None:
        """Makes the next trace this one, of a step that differs in `remat` alone and has the same arguments."""
        self._traced = traced

    def checked_trace(
        self, state: TrainStateLike, batch: PyTree, rng: jax.Array | None
    ) -> tuple[TracedLoss, LossInputs]:
        """Returns the traced loss and its inputs; raises unless the state and the results are as a step needs them."""
        plan = state.tx.plan
        _check_has_rows(state, plan)
        check_stored(state, plan)
        require_planned_memory(state, plan, with_opt_state=self.differentiates)
        traced, inputs = self.trace(state, batch, rng)
        parts = self._num_parts(plan)
        num_rows = min(traced.rows, default=None)
        results = attempt(results_of, traced) or []
        check_loss(traced, num_rows, {x.name for x in results if x.facts.is_constant})
        warn_closed_over(traced, plan)
        warn_rounded(traced, plan)
        if self.options.check_rows and parts > 1:
            check_row_dims(results, num_rows)
            self._has_warned = self._has_warned or warn_coupled(results, plan, parts, self.maker)
        return traced, inputs

    def trace(self, state: TrainStateLike, batch: PyTree, rng: jax.Array | None) -> tuple[TracedLoss, LossInputs]:
        """Returns the traced loss and its inputs."""
        plan, steps = state.tx.plan, self.options.accumulate_steps
        check_keep(self.options.remat, plan)
        check_rng(rng)
        self._check_arguments(state, rng)
        merge = Merge(self.options.merge, num_batch_shards(plan.mesh, plan.config))
        _, carried = self._bind(state, merge)
        inputs = LossInputs(state.params, carried, batch, rng)
        check_batch(batch, plan, steps)

        def trace(seen: ZeroPlan, times: int = 1) -> TracedLoss:
            loss_fn, _ = self._bind(state, dataclasses.replace(merge, times=times))
            return drop_unwritten(trace_loss(loss_fn, seen, inputs, accumulate_steps=steps, times=times))

        ahead, self._traced = self._traced, None
        if ahead is not None:
            return ahead, inputs
        traced = trace(plan)
        leaves = [*(leaf.param for leaf in plan.leaves), *carried_leaves(plan, carried)]
        seen = plan.with_written({leaves[x.source].path for x in traced.written})
        if seen.seen_dtypes != plan.seen_dtypes:
            traced = trace(seen)
        traced = traced.with_remat(self.options.remat, plan)
        doubled = functools.cache(functools.partial(trace, seen, 2))
        results = attempt(results_of, traced) or []
        checks = self.options.check_rows and self._num_parts(plan) > 1
        if traced.written or checks or any(x.must_be_constant for x in results):
            traced = _with_row_facts(traced, merge, plan, doubled)
        return choose_merges(traced, merge, plan, leaves, doubled), inputs

    def _check_arguments(self, state: TrainStateLike, rng: jax.Array | None) -> None:
        """Raises unless a loss that has a signature gets all its arguments: a key only if it takes one, and fields."""
        try:
            signature = inspect.signature(self.fn, follow_wrapped=False)  # a decorator may take other arguments
        except Exception:  # of a builtin, or of annotations that Python cannot evaluate
            return
        parameters = [x for x in signature.parameters.values() if x.name not in self.options.mutable]
        positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
        further = [
            *(positional[2:] if rng is None else positional[3:]),
            *(x for x in parameters if x.kind is x.KEYWORD_ONLY),
        ]
        fields = {f.name for f in dataclasses.fields(state)}
        if of_state := [x.name for x in further if x.name in fields and x.default is x.empty]:
            raise TypeError(
                f"The loss takes {of_state}, as fields of the state are called. Name fields that it reads or changes: "
                f"`jzero.{self.maker}(..., mutable={(*self.options.mutable, *of_state)})`. A key is passed by "
                "`step(state, batch, rng=key)`."
            )
        if rng is None and len(positional) > 2 and positional[2].default is inspect.Parameter.empty:
            raise TypeError(
                f"The loss takes a third argument, {positional[2].name!r}: pass a key, `step(state, batch, rng=key)`. "
                f"Arrays go into the batch together. {A_LOSS}"
            )
        if len(positional) < 2 and all(x.kind != x.VAR_POSITIONAL for x in parameters):
            raise TypeError(f"The loss must take two arguments: it takes {[x.name for x in positional]}. {A_LOSS}")
        if rng is not None and len(positional) < 3 and all(x.kind != x.VAR_POSITIONAL for x in parameters):
            raise TypeError("A key was passed as `rng`, but the loss takes none: `loss_fn(params, batch, rng)`.")

    def _num_parts(self, plan: ZeroPlan) -> int:
        """Returns into how many parts a batch is split, each of which the loss sees alone."""
        return num_batch_shards(plan.mesh, plan.config) * self.options.accumulate_steps

    def _bind(self, state: TrainStateLike, merge: Merge) -> tuple[Loss, dict[str, PyTree]]:
        """Returns `fn(params, batch, *rng, **carried) -> (loss, (aux, changed))`, and the carried state."""
        written_shape = merge.written_shape if self.differentiates else None
        loss_fn, carried = adapt(state).bind_loss(self.fn, self.options.mutable, written_shape)

        def call(
            params: PyTree, batch: PyTree, *rng: jax.Array, **carried: PyTree
        ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
            before = by_field(carried)  # now: the loss may write into the trees
            result, changed = loss_fn(params, batch, *rng, **carried)
            loss, aux = self.split(result)
            if self.options.mutable and written_shape is not None:
                changed, aux = split_mutable(aux, before, written_shape)
            return loss, (spread_marks(aux), changed)

        return call, carried


def _with_row_facts(traced: TracedLoss, merge: Merge, plan: ZeroPlan, doubled: Callable[[], TracedLoss]) -> TracedLoss:
    """Returns a traced loss with its `row_facts`, and their growth if that says more about any of them."""
    traced = traced.with_row_facts(plan)
    facts = traced.row_facts[len(traced.row_facts) - len(traced.written) :]
    without_word = [x for x, written in zip(facts, traced.written, strict=True) if merge.word(written.name) is None]
    asks = [x.needs_growth for x in attempt(results_of, traced) or []]
    if not any([*asks, *(x.needs_growth for x in without_word)]):
        return traced
    try:
        other = doubled()
    except Exception as error:  # the user's code may hold for one number of rows only
        logging.getLogger("jzero").info("No sum over rows is told from a mean: twice the rows fail (%s).", error)
        return traced
    return traced.with_growth(other)


def split_aux(result: PyTree, *, has_aux: bool) -> tuple[PyTree, PyTree]:
    """Returns the loss and its auxiliary values."""
    if not has_aux:
        if isinstance(result, tuple):
            raise TypeError("The loss returned a tuple. Say `has_aux=True` if it returns `(loss, aux)`.")
        return result, {}
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"With `has_aux=True` the loss must return `(loss, aux)`: got {type(result).__name__}.")
    return result


def _check_has_rows(state: TrainStateLike, plan: ZeroPlan) -> None:
    """Raises if a program could not read parameters on disk."""
    on_disk = [x.path for x in plan.view.params.flat(state.params) if isinstance(x, InRecords)]
    if on_disk:
        raise ValueError(
            f"{on_disk[0]!r} is on disk (`Offload(params='disk')`), from which only steps called from Python read: "
            "call this step outside of `jax.jit`, or keep parameters in the host's memory (`params='host'`)."
        )


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
