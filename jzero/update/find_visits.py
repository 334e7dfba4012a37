"""Finds what passes over records compute: the part of an update that is elementwise in fields on disk.

In: an update and its inputs, some of them on disk. Out: visits, one per parameter, and what they read beside records.
First come passes that only read, for sums over fields on disk that the update needs (LAMB's norms), then the pass that
makes new records and parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.extend.core import Var

from jzero import _compat
from jzero._compat import Atom
from jzero._types import DType
from jzero.jaxpr.flat import flattened
from jzero.jaxpr.liveness import find_needed
from jzero.jaxpr.products import mixes
from jzero.layout.on_disk import OnDisk, Stored
from jzero.update.fields import owners_of_inputs, placed_fields
from jzero.update.run import Run, Targets, numbers_of, traced
from jzero.update.split import Kind
from jzero.update.visits import Programs, Source, SumTarget, Visit, VisitOperands
from jzero.update.whole import Before, WholeUpdate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NextPass:
    """The next pass over records: what the program that finds it returns.

    A compiled program keeps its static fields, so what a pass computes always belongs to its operands.

    Attributes:
      operands: What each visit reads beside records.
      sums: All numbers over parameters in records that are known, by number.
      programs: Its visits, and what computes them.
      needs_grads: Whether the rest of the update needs gradients of these parameters, too, other than their sums.
    """

    operands: list[VisitOperands]
    sums: dict[int, jax.Array]
    programs: Programs = dataclasses.field(metadata={"static": True})
    needs_grads: bool = dataclasses.field(metadata={"static": True})


def find_visits(update: WholeUpdate, stored: Before[Stored], sums: Mapping[int, jax.Array]) -> NextPass:
    """Returns the next pass over records that an update needs; call it inside `jit`.

    Args:
      update: The update.
      stored: Its inputs as stored.
      sums: The numbers over parameters in records that earlier passes computed.

    Raises:
      ValueError: The optimizer needs a field on disk as a whole.
    """
    plan = update.plan
    inputs = placed_fields(plan, stored)
    leaves, jaxpr, out = traced(update, inputs)
    run = Run(plan, flattened(jaxpr, chooses=True), leaves, sums)
    _check_elementwise(run)
    has_matrices = any(map(mixes, _compat.open_jaxpr(jaxpr)[0].eqns))
    run.evaluate(owners_of_inputs(plan, inputs) if has_matrices and plan.num_shards > 1 else None)
    numbers = numbers_of(out)
    targets = {i: run.targets(i, inputs, numbers) for i in plan.disk_fields}
    visits = _sum_visits(run) if run.pending else [result_visit(run, i, x) for i, x in targets.items() if x]
    from_records = set().union(*targets.values())
    needs = _needs_grads(run, [v for k, v in enumerate(run.split.jaxpr.outvars) if k not in from_records])
    return NextPass([x for _, x in visits], run.sums, Programs(plan, [x for x, _ in visits]), needs)


def check_adds_up(next_pass: NextPass) -> None:
    """Raises unless an update can take the mean over the gradients of several steps, element by element."""
    if next_pass.needs_grads or any(visit.makes_sums for visit in next_pass.programs.visits):
        raise ValueError(
            "`Offload.zenflow` applies means of gradients element by element, but this optimizer needs sums over its "
            "state (LAMB's norms), or rows of the gradient (Adafactor): use `delay=1`, or an optimizer such as AdamW."
        )


def _check_elementwise(run: Run) -> None:
    """Raises if an equation needs a field on disk as a whole."""
    for i, kind in enumerate(run.split.kinds):
        path = run.reads_disk(run.split.jaxpr.eqns[i].invars) if kind in (Kind.WHOLE, Kind.MIXED) else ""
        if path:
            rule = f"rules={{{path!r}: jzero.LeafRule(offload=False)}}"
            raise ValueError(
                f"`{run.split.maker(i)}` needs all of {path!r} at once, and its state is in records, on disk or by "
                "`delay=1`, of which a step reads one after another: keep the state in memory, without delay "
                f"(`Offload(optimizer='host')`), or that of this leaf on the devices (`{rule}`)."
            )


def _needs_grads(run: Run, outputs: Sequence[Atom]) -> bool:
    """Whether results need gradients of parameters in records, other than by numbers over them."""
    jaxpr = run.split.jaxpr
    sums = {v for i in run.record_sums for v in jaxpr.eqns[i].outvars}
    needed = find_needed(jaxpr, outputs, side_effects=False, available=sums).variables
    return any(v in needed and field.before_name == "grads" for v, field in run.fields.items())


def result_visit(run: Run, i: int, targets: Targets) -> tuple[Visit, VisitOperands]:
    """Returns the visit that computes the results of a parameter, and its operands."""
    place = {leaf.path: k for k, leaf in enumerate(run.plan.disk_fields[i])}
    results: list[int | DType | SumTarget] = [
        place[x.path] if isinstance(x, OnDisk) else x.dtype if isinstance(x, jax.Array) else x for x in targets.values()
    ]
    return visit_of(run, i, [run.split.jaxpr.outvars[k] for k in targets], results)


def _sum_visits(run: Run) -> list[tuple[Visit, VisitOperands]]:
    """Returns the visits that make the next sums over fields on disk."""
    ready: dict[int, list[int]] = {}
    for i in run.pending:
        eqn = run.split.jaxpr.eqns[i]
        if i in run.record_sums and all(map(run.is_available, eqn.invars)):
            read = next(v for v in run.kernel(eqn.invars).reads if v in run.fields)
            ready.setdefault(run.fields[read].number, []).append(i)
    visits = []
    for param, members in sorted(ready.items()):
        eqns = [run.split.jaxpr.eqns[i] for i in members]
        targets = [
            SumTarget(run.record_sums[i], x.primitive.name, len(x.invars), _compat.type_of(x.outvars[0]).dtype)
            for i, x in zip(members, eqns, strict=True)
        ]
        visits.append(visit_of(run, param, [v for x in eqns for v in x.invars], targets))
    return visits


def visit_of(
    run: Run, i: int, outputs: Sequence[Atom], targets: Sequence[int | DType | SumTarget]
) -> tuple[Visit, VisitOperands]:
    """Returns the visit that computes `outputs` from the records of a parameter, and its operands."""
    place = {leaf.path: k for k, leaf in enumerate(run.plan.disk_fields[i])}
    leaf, kernel, operands = run.plan.leaves[i].grad, run.kernel(outputs), VisitOperands([], [])

    def source(v: Var) -> Source:
        field = run.fields.get(v)
        if field is not None and field.before_name:
            return Source(field.before_name)
        x = run.stored(v, leaf)
        if x is None:
            return Source("positions")
        if isinstance(x, OnDisk):
            return Source("disk", place[x.path])
        kind, values = ("near", operands.near) if x.ndim else ("number", operands.numbers)
        values.append(x)
        return Source(kind, len(values) - 1)

    sources = tuple(map(source, kernel.reads))
    return Visit(i, kernel, sources, tuple(targets), run.number_of(kernel.piece())), operands
