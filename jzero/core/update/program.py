"""An update, analysed once: what is elementwise in which parameter, what is a sum, and what needs whole arrays.

    program_of(update, inputs, jaxpr) -> UpdateProgram    inside `jit`, of tracers
    record_program(update, stored) -> UpdateProgram       outside, of shapes

Whoever runs it computes its `steps` in their order, and the kernel of each parameter where that parameter's state is:

    step       c = count + 1                       scalars, and what needs whole arrays: on the devices
    step       n = sum(m * m), m in records        a pass over records that reads
    kernel i   g, m, c -> p', m'                   on the devices, in chunks of the host's memory, or record by record
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.base.types import DType, PyTree
from jzero.core.jaxpr.equations import find_needed
from jzero.core.jaxpr.flat import flattened
from jzero.core.jaxpr.references import check_references
from jzero.core.jaxpr.sizes import mixes
from jzero.core.jaxpr.structure import Structures
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import memory_of
from jzero.core.layout.stored import InRecords, Like
from jzero.core.plan.matrices import Matrices, Work, find_matrices
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.planned_matrices import warn_of_whole
from jzero.core.update.kernels import Field, OperandSource, PartKernel, SumTarget, Target, _in_records
from jzero.core.update.split import EquationKind, Kernel, Split, kernel_of, split_update
from jzero.core.update.whole import After, Before, Grad, WholeUpdate

L = TypeVar("L", bound=Like)


class UpdateStep(NamedTuple):
    """What a program computes next, on whole arrays.

    Attributes:
      level: How many passes over records come before.
      eqn: An equation; -1 for matrix work.
      works: Matrix work, each matrix on one device.
    """

    level: int
    eqn: int
    works: tuple[Work, ...] = ()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class UpdateProgram:
    """An update, analysed.

    Attributes:
      split: Its jaxpr, and the kinds of its equations.
      inputs: The variable of each input.
      fields: The inputs that are fields.
      results: The index of each result among the outputs of the jaxpr.
      steps: All that is not elementwise, in the order in which it can be computed.
      owned: The results of matrix work, which kernels read like fields.
      sums: By equation, the numbers of sums over parameters in records.
    """

    plan: ZeroPlan
    split: Split
    consts: Sequence[jax.Array]
    inputs: Before[Var]
    fields: Mapping[Var, Field]
    results: After[int]
    steps: tuple[UpdateStep, ...]
    owned: frozenset[Var]
    sums: Mapping[int, int]
    number_of: Structures = dataclasses.field(default_factory=Structures)

    @functools.cached_property
    def num_levels(self) -> int:
        """The number of passes over records that only read, for sums."""
        return max((step.level + self.reads_records(step) for step in self.steps), default=0)

    def kernel(self, outputs: Sequence[Atom]) -> Kernel:
        """Returns the elementwise function of some values."""
        return kernel_of(self.split, outputs, self.owned)

    def fields_of(self, atoms: Sequence[Atom]) -> list[Field]:
        """Returns the fields from which values are computed element by element."""
        elements = [v for v in atoms if not compat.is_literal(v) and v in self.split.elements]
        return [self.fields[v] for v in self.kernel(elements).reads if v in self.fields] if elements else []

    def reads_records(self, step: UpdateStep) -> bool:
        """Whether a step is a sum that a pass over records makes."""
        return step.eqn in self.sums and _in_records(self.fields_of(self.split.jaxpr.eqns[step.eqn].invars)) is not None

    def targets(self, i: int) -> dict[int, Var | DType]:
        """Returns, by the indices of a parameter's results, the field that each replaces, or its dtype."""
        leaf, result, outs = self.plan.leaves[i], self.results.results[i], self.split.jaxpr.outvars
        is_away = leaf.param.memory != "device"
        pairs = [
            (self.results.masters[i], self.inputs.masters[i]),
            *zip(self.results.inner, self.inputs.inner, strict=True),
            *([(result, self.inputs.params[i])] if is_away else []),
        ]
        targets: dict[int, Var | DType] = {
            k: v for k, v in pairs if k is not None and v is not None and v in self.fields and self.fields[v].param == i
        }
        if result is not None and not is_away:
            targets[result] = compat.type_of(outs[result]).dtype
        return targets

    @functools.cached_property
    def passes(self) -> list[list[PartKernel]]:
        """What each pass over records computes: those that only read, for sums, then the one that makes new records."""
        return [self._record_kernels(level) for level in range(self.num_levels + 1)]

    def _record_kernels(self, level: int) -> list[PartKernel]:
        """Returns what a pass over records computes: sums, or in the last one new records and parameters."""
        outs, kernels = self.split.jaxpr.outvars, []
        if level == self.num_levels:
            for i in self.plan.record_fields:
                targets = self.targets(i)
                places = [self._place(v) if isinstance(v, Var) else v for v in targets.values()]
                kernels += [self.part_kernel(i, [outs[k] for k in targets], places)] if targets else []
            return kernels
        sums: dict[int, list[int]] = {}
        for step in self.steps:
            if step.level == level and self.reads_records(step):
                sums.setdefault(self.fields_of(self.split.jaxpr.eqns[step.eqn].invars)[0].param, []).append(step.eqn)
        for i, members in sorted(sums.items()):
            eqns = [self.split.jaxpr.eqns[k] for k in members]
            of = [
                SumTarget(self.sums[k], x.primitive.name, len(x.invars), compat.type_of(x.outvars[0]).dtype)
                for k, x in zip(members, eqns, strict=True)
            ]
            kernels.append(self.part_kernel(i, [v for x in eqns for v in x.invars], of))
        return kernels

    def _place(self, v: Var) -> int | DType:
        source = self.fields[v].source
        return source.number if source.kind == "record" else compat.type_of(v).dtype

    def part_kernel(
        self, i: int, outputs: Sequence[Atom], targets: Sequence[Target] = (), *, in_memory: bool = False
    ) -> PartKernel:
        """Returns what computes some values of a parameter part by part; `in_memory`, if it reads no record."""
        kernel, arrays, scalars = self.kernel(outputs), list[Var](), list[Var]()
        as_arrays = ("array", "grads", "params") if in_memory else ("array",)

        def source(v: Var) -> OperandSource:
            field = self.fields.get(v)
            if field is not None and field.source.kind not in as_arrays:
                return field.source
            kind, of = ("array", arrays) if compat.type_of(v).shape else ("scalar", scalars)
            of.append(v)
            return OperandSource(kind, len(of) - 1)

        sources = tuple(map(source, kernel.reads))
        structure = self.number_of(kernel.piece())
        return PartKernel(i, kernel.__call__, sources, tuple(targets), tuple(arrays), tuple(scalars), structure)

    @functools.cached_property
    def needs_grads(self) -> bool:
        """Whether anything needs gradients of parameters in records, other than kernels and sums over them."""
        jaxpr = self.split.jaxpr
        from_records = {k for i in self.plan.record_fields for k in self.targets(i)}
        outputs = [v for k, v in enumerate(jaxpr.outvars) if k not in from_records]
        sums = {v for i in self.sums for v in jaxpr.eqns[i].outvars}
        needed = find_needed(jaxpr, outputs, side_effects=False, available=sums).variables
        return any(v in needed and field.source.kind == "grads" for v, field in self.fields.items())

    def check_elementwise(self) -> None:
        """Raises if an equation needs a field in records as a whole."""
        for i, kind in enumerate(self.split.kinds):
            if kind not in (EquationKind.WHOLE, EquationKind.MIXED):
                continue
            v = _in_records(self.fields_of(self.split.jaxpr.eqns[i].invars))
            if v is not None:
                path = v.leaf.path
                rule = f"rules={{{path!r}: jzero.LeafRule(offload=False)}}"
                raise ValueError(
                    f"`{self.split.maker(i)}` needs all of {path!r} at once, and its state is in records, on disk or "
                    "by `delay=1`, of which a step reads one after another: keep the state in memory, without delay "
                    f"(`Offload(optimizer='host')`), or that of this leaf on the devices (`{rule}`)."
                )

    def require_mean_of_gradients(self) -> None:
        """Raises unless the update can take the mean over the gradients of several steps, element by element."""
        if self.needs_grads or self.num_levels:
            raise ValueError(
                "`Offload.zenflow` applies means of gradients element by element, but this optimizer needs sums over "
                "its state (LAMB's norms), or rows of the gradient (Adafactor): use `delay=1`, or an optimizer such as "
                "AdamW."
            )


def off_device_params(plan: ZeroPlan) -> frozenset[int]:
    """Returns the parameters whose state is not all on the devices; a number is no array to stream."""
    return frozenset(i for i in plan.offloaded if plan.leaves[i].param.shape)


def params_as_stored(plan: ZeroPlan) -> frozenset[int]:
    """Returns the parameters whose arrays an update reads as they are stored.

    The natural shape of a flattened parameter has no part that a device holds: in that shape each operation of the
    optimizer would gather its operands.
    """
    grads = [leaf.grad.cut for leaf in plan.leaves]
    return off_device_params(plan) | {i for i, cut in enumerate(grads) if cut is not None and cut.flat}


@dataclasses.dataclass(frozen=True, eq=False)
class Input:
    """An input of an update: an array in natural shape, or a field as stored.

    Attributes:
      value: The array as stored, its place in records, or its shape; `None` for the positions of a field's elements,
        and for a gradient that was dropped.
      field: What it is; `None` for an array in natural shape.
    """

    value: Like | None
    field: Field | None = None

    @property
    def aval(self) -> Like:
        """What the optimizer sees of it."""
        if self.field is None:
            assert not isinstance(self.value, InRecords | None)
            return self.value
        return jax.ShapeDtypeStruct(self.field.leaf.shape, jnp.uint32 if self.value is None else self.value.dtype)


def inputs_of(plan: ZeroPlan, stored: Before[L], load: Callable[[StateLeaf, L], Like]) -> Before[Input]:
    """Returns the inputs of an update: arrays in natural shape, and the fields of parameters with state elsewhere.

    Args:
      plan: The plan.
      stored: The inputs as stored, or their shapes.
      load: Returns an array in natural shape.
    """
    kept = params_as_stored(plan)

    def place(x: L, i: int | None, leaf: StateLeaf, name: str = "", *, is_laid_out: bool = True) -> Input:
        leaf.check_shape(x)
        if i not in kept or leaf.shape != plan.leaves[i].param.shape:
            is_ready = is_laid_out and leaf.stored_shape == leaf.shape and isinstance(x, jax.Array)
            # A constraint on what is laid out already would only be traced and lowered.
            return Input(x if is_ready and memory_of(x) == "device" else load(leaf, x))
        grad, paths = plan.leaves[i].grad, [field.path for field in plan.record_fields.get(i, ())]
        source = OperandSource(name or "array") if i in plan.record_fields else OperandSource("array")
        if isinstance(x, InRecords):
            source = OperandSource("record", paths.index(x.path))
        field = Field(i, grad, source)
        if isinstance(x, jax.ShapeDtypeStruct) or memory_of(x) != "device" or source.kind != "array":
            return Input(x, field)  # a constraint would make a copy of what a program only passes on
        return Input(leaf.relayout(x, grad), field)

    def of_param(i: int, x: L | None, name: str = "") -> Input | None:
        leaf = plan.leaves[i]
        if x is None or i in plan.keys:
            return None
        is_laid_out = leaf.param.cut == leaf.grad.cut
        layout = leaf.grad if leaf.trained else leaf.param
        return place(x, i, layout, name if is_laid_out else "", is_laid_out=is_laid_out)

    def of_grad(i: int, g: Grad[L]) -> Grad[Input]:
        leaf = plan.leaves[i].grad
        dropped = Input(None, Field(i, leaf, OperandSource("grads")))
        return Grad(dropped if g.reduced is None else place(g.reduced, i, leaf, "grads", is_laid_out=False), g.factors)

    grads = [None if g is None else of_grad(i, g) for i, g in enumerate(stored.grads)]
    inner = [place(x, leaf.owner, leaf) for x, leaf in zip(stored.inner, plan.inner_leaves, strict=True)]
    positions = [
        Input(None, Field(i, x.grad, OperandSource("positions"))) if stored.number is not None and i in kept else None
        for i, x in enumerate(plan.leaves)
    ]
    params = [of_param(i, x, "params") for i, x in enumerate(stored.params)]
    masters = [of_param(i, x) for i, x in enumerate(stored.masters)]
    others = stored.number, stored.applied, stored.value, stored.extra
    return Before(grads, params, masters, inner, positions, *others)


def natural_shape_of(leaf: StateLeaf, x: Like) -> jax.ShapeDtypeStruct:
    """Returns the natural shape of a stored array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.as_numbers.dtype)


def program_of(update: WholeUpdate, inputs: Before[Input], jaxpr: Traced | None = None) -> UpdateProgram:
    """Analyses an update; traces it, unless that was done."""
    plan = update.plan
    leaves, treedef = jax.tree.flatten(inputs)
    closed, out = trace_stored_update(update, inputs) if jaxpr is None else jaxpr
    has_matrices = plan.num_shards > 1 and any(map(mixes, compat.open_jaxpr(closed)[0].eqns))
    opened, consts = compat.open_jaxpr(flattened(closed, chooses=bool(off_device_params(plan))))
    fields = {
        v: x.field for v, x in zip(opened.invars, leaves, strict=True) if isinstance(x, Input) and x.field is not None
    }
    found = split_update(opened, {v: field.param for v, field in fields.items()})
    matrices = find_matrices(plan, opened, _owners(plan, inputs)) if has_matrices else Matrices([], [])
    if not plan.matrices.kinds and not plan.matrices.whole:  # the plan did not warn
        warn_of_whole(matrices.notes)
    indices = jax.tree.unflatten(jax.tree.structure(out), range(len(jax.tree.leaves(out))))
    owned = frozenset(v for work in matrices.works for v in work.region.outputs)
    program = UpdateProgram(plan, found, consts, treedef.unflatten(opened.invars), fields, indices, (), owned, {})
    sums = [i for i, kind in enumerate(found.kinds) if kind is EquationKind.SUM and _sums_record(program, i)]
    program = dataclasses.replace(program, sums={i: k for k, i in enumerate(sums)})
    return dataclasses.replace(program, steps=tuple(_steps(program, matrices.works)))


def record_program(update: WholeUpdate, stored: Before[Like]) -> UpdateProgram:
    """Returns the program of an update whose inputs are given as stored; touches no device.

    Raises:
      ValueError: The optimizer needs a field in records as a whole.
    """
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)), stored
    )
    program = program_of(update, inputs_of(update.plan, shapes, natural_shape_of))
    program.check_elementwise()
    return program


Traced: TypeAlias = "tuple[jax.extend.core.ClosedJaxpr, After[jax.ShapeDtypeStruct]]"


def trace_stored_update(update: WholeUpdate, inputs: Before[Input]) -> Traced:
    """Returns the jaxpr of an update, and the shapes of its results."""
    avals = jax.tree.map(lambda x: x.aval if isinstance(x, Input) else x, inputs)
    # What `update.functions` close over are constants of this jaxpr; of `jit(update).trace` they would be inputs.
    jaxpr, out = jax.make_jaxpr(update, return_shape=True)(avals)
    check_references(jaxpr, "The optimizer")
    return jaxpr, out


def _sums_record(program: UpdateProgram, i: int) -> bool:
    fields = program.fields_of(program.split.jaxpr.eqns[i].invars)
    return any(field.param in program.plan.record_fields for field in fields)


def _steps(program: UpdateProgram, works: Sequence[Work]) -> Iterator[UpdateStep]:
    """Returns the steps: by the number of matrix computations before each, then in the order of the jaxpr."""
    found, level, rank = program.split, dict[Var, int](), dict[Var, int]()
    replaced = frozenset[int]().union(*(work.region.eqns for work in works))
    by_rank: dict[int, list[Work]] = {}
    for work in works:
        by_rank.setdefault(work.region.level, []).append(work)
    ranks = {of: k for k, of in enumerate(sorted(by_rank))}
    rank |= {v: ranks[work.region.level] + 1 for work in works for v in work.region.outputs}
    steps: list[
        tuple[int, UpdateStep]
    ] = []  # each with its place: 2r before the matrix work of rank r, which is at 2r + 1
    for i, eqn in enumerate(found.jaxpr.eqns):
        read = [v for v in eqn.invars if not compat.is_literal(v)]
        before = max((rank.get(v, 0) for v in read), default=0)
        step = UpdateStep(max((level.get(v, 0) for v in read), default=0), i)
        for v in eqn.outvars:
            level[v], rank[v] = step.level + program.reads_records(step), max(before, rank.get(v, 0))
        if found.kinds[i] is not EquationKind.ELEMENT and i not in replaced:
            steps.append((2 * before, step))
    for of, members in by_rank.items():
        reads = [v for work in members for v in (*work.region.inputs, *work.region.shared)]
        steps.append(
            (2 * ranks[of] + 1, UpdateStep(max((level.get(v, 0) for v in reads), default=0), -1, tuple(members)))
        )
    return (step for _, step in sorted(steps, key=lambda x: x[0]))


def _owners(plan: ZeroPlan, inputs: Before[PyTree]) -> list[int | None]:
    """Returns the parameter that each input belongs to."""

    def marked(i: int | None, x: PyTree) -> PyTree:
        return jax.tree.map(lambda _: -1 if i is None else i, x)

    by_parameter = ("grads", "params", "masters", "positions")
    marks = marked(None, inputs)._replace(
        **{name: list(map(marked, range(len(plan.leaves)), getattr(inputs, name))) for name in by_parameter},
        inner=[marked(leaf.owner, x) for leaf, x in zip(plan.inner_leaves, inputs.inner, strict=True)],
    )
    return [None if i < 0 else i for i in jax.tree.leaves(marks)]
