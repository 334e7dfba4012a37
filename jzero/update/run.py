"""Runs a whole update where its arrays lie: on the devices, and for state on the host chunk by chunk.

In: a `WholeUpdate` and its inputs as stored. Out: its results, in natural shape, or as stored for parameters with state
on the host. If all is on the devices and nothing needs whole matrices, the update is called as it was written.
Otherwise its jaxpr is split and evaluated equation by equation: matrix work of one parameter on one device, see
[Note: Matrices on one device each]; other matrix work on all devices, over operands that each of them gathers once;
what is elementwise in a parameter with state on the host in passes over chunks, see [Note: Streaming an update]. What
is elementwise in a parameter with state on disk is computed elsewhere, as its `Visit` says, see `records`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jzero import _compat
from jzero._compat import Atom
from jzero._types import DType
from jzero.jaxpr.flat import flattened
from jzero.jaxpr.identity import IdDict
from jzero.jaxpr.products import mixes
from jzero.jaxpr.structure import Structures
from jzero.layout.casts import holds, positions_of, round_to
from jzero.layout.leaves import StateLeaf
from jzero.layout.on_disk import OnDisk, Stored
from jzero.layout.placement import memory_of
from jzero.plan.matrices import Matrices, find_matrices, warn_of_whole
from jzero.plan.plan import ZeroPlan
from jzero.update.chunks import Pass, reduce_pass, run_pass
from jzero.update.fields import (
    Field,
    Input,
    far_params,
    grad_field,
    owners_of_inputs,
    param_field,
    params_as_stored,
    placed_fields,
)
from jzero.update.gathered import Everywhere
from jzero.update.owned import compute_owned
from jzero.update.split import Kernel, Kind, Split, kernel_of, split
from jzero.update.visits import NO_DISK, FromDisk
from jzero.update.whole import After, Before, WholeUpdate

T = TypeVar("T")
Targets: TypeAlias = Mapping[int, Stored | DType]
"""By the number of a result: the array or place on disk that it replaces, or its dtype."""


def run_update(update: WholeUpdate, stored: Before[Stored], disk: FromDisk = NO_DISK) -> After[Stored]:
    """Returns the results of an update; call it inside `jit`. State on disk comes back as it is.

    Args:
      update: The update.
      stored: Its inputs as stored; gradients also in natural shape.
      disk: Results of passes over records.
    """
    plan, far, kept = update.plan, far_params(update.plan), params_as_stored(update.plan)
    inputs = placed_fields(plan, stored)
    if plan.num_shards == 1 and not kept:
        return update(cast("Before[jax.Array]", inputs))
    leaves, jaxpr, out = traced(update, inputs)
    has_matrices = any(map(mixes, _compat.open_jaxpr(jaxpr)[0].eqns))
    if not kept and not has_matrices:  # already traced: call it
        return jax.jit(update)(inputs)
    run = Run(plan, flattened(jaxpr, chooses=bool(far)), leaves, disk.sums)
    run.evaluate(owners_of_inputs(plan, inputs) if has_matrices and plan.num_shards > 1 else None)
    assert not run.pending
    numbers = numbers_of(out)
    passed: dict[int, Stored] = {}
    for i in sorted(kept):
        targets = run.targets(i, inputs, numbers)
        if i in plan.disk_fields and disk.columns is not None and i in disk.columns.chosen:
            passed |= disk.columns.update(run, i, inputs, targets)
        elif i in plan.disk_fields:
            passed |= run.from_disk(i, inputs, targets, disk.results.get(i))
        else:
            passed |= run.update(i, inputs, targets)
    run.warn()
    outs = run.split.jaxpr.outvars
    return jax.tree.map(lambda k: passed[k] if k in passed else run.value(outs[k]), numbers)


def numbers_of(out: After[T]) -> After[int]:
    """Numbers the results of an update."""
    numbers: After[int] = jax.tree.unflatten(jax.tree.structure(out), range(len(jax.tree.leaves(out))))
    return numbers


def traced(update: WholeUpdate, inputs: Before[Input]) -> tuple[list[Input], ClosedJaxpr, After[jax.ShapeDtypeStruct]]:
    """Returns the inputs of an update in one list, its jaxpr, and the shapes of its results."""
    leaves, treedef = jax.tree.flatten(inputs)
    avals = treedef.unflatten([x.aval if isinstance(x, Field) else x for x in leaves])
    # What `update.functions` close over are constants of this jaxpr; of `jit(update).trace` they would be inputs.
    jaxpr, out = jax.make_jaxpr(update, return_shape=True)(avals)
    return leaves, jaxpr, out


class Run:
    """Evaluates a split update.

    Attributes:
      split: The split.
      env: Values of its variables: numbers, and arrays in natural shape.
      fields: The variables that are fields.
      matrix_results: The results of matrix work on one device each.
      materialized: Fields, and values elementwise in fields, that were needed on the devices, in natural shape.
      fetched: Paths of the parameters whose state on the host was needed whole.
      record_sums: The equations that make numbers over a parameter in records, with the number of each.
      sums: These numbers, as far as they are computed.
      pending: The equations that wait for such numbers.
    """

    def __init__(
        self, plan: ZeroPlan, flat: ClosedJaxpr, leaves: Sequence[Input], sums: Mapping[int, jax.Array]
    ) -> None:
        jaxpr, consts = _compat.open_jaxpr(flat)
        pairs = list(zip(jaxpr.invars, leaves, strict=True))
        self.plan = plan
        self.fields: dict[Var, Field] = {v: x for v, x in pairs if isinstance(x, Field)}
        self.split: Split = split(jaxpr, {v: x.number for v, x in self.fields.items()})
        self.env: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, consts, strict=True))
        self.env.update((v, x) for v, x in pairs if not isinstance(x, Field))
        self.matrix_results = frozenset[Var]()
        self.materialized: dict[Var, jax.Array] = {}
        self.fetched: set[str] = set()
        self.number_of, self.shared = Structures(), dict[int, Callable[..., list[jax.Array]]]()
        self.apply = Everywhere(plan)
        self.sums = dict(sums)
        self.record_sums = {i: k for k, i in enumerate(filter(self._sums_record, range(len(self.split.kinds))))}
        self.pending: list[int] = []

    def evaluate(self, owners: Sequence[int | None] | None) -> None:
        """Computes all values but those that are elementwise in a field.

        Args:
          owners: For each input the parameter that it belongs to, if matrix work is to run on one device each.
        """
        matrices = Matrices([], []) if owners is None else find_matrices(self.plan, self.split.jaxpr, owners)
        works = matrices.works
        if self.plan.matrices.unknown:  # the plan could not warn
            warn_of_whole(matrices.notes)
        replaced = frozenset[int]().union(*(work.region.eqns for work in works))
        self.matrix_results = frozenset(v for work in works for v in work.region.outputs)
        kinds = enumerate(self.split.kinds)
        pending = [i for i, kind in kinds if kind is not Kind.ELEMENT and i not in replaced]
        for level in sorted({work.region.level for work in works}):
            pending = self._evaluate(pending)
            self.env.update(compute_owned(self.plan, [x for x in works if x.region.level == level], self.value))
        self.pending = self._evaluate(pending)

    def _evaluate(self, numbers: Sequence[int]) -> list[int]:
        """Evaluates equations; returns those whose operands do not exist yet."""
        waiting = []
        for i in numbers:
            eqn = self.split.jaxpr.eqns[i]
            may_wait = self.matrix_results or len(self.sums) < len(self.record_sums)
            if may_wait and not all(map(self.is_available, eqn.invars)):
                waiting.append(i)
                continue
            number = self.record_sums.get(i)
            if number in self.sums:
                self.env[eqn.outvars[0]] = self.sums[number]
                continue
            if number is not None and self.reads_disk(eqn.invars):
                waiting.append(i)
                continue
            with _compat.equation_context(eqn):
                is_sum = self.split.kinds[i] is Kind.SUM
                outs = self._sum(eqn) if is_sum else self.apply(eqn, list(map(self.value, eqn.invars)))
            self.env.update(zip(eqn.outvars, outs, strict=True))
            self.sums.update({} if number is None else {number: outs[0]})
        return waiting

    def _sums_record(self, i: int) -> bool:
        if self.split.kinds[i] is not Kind.SUM:
            return False
        fields = (self.fields[v] for v in self.kernel(self.split.jaxpr.eqns[i].invars).reads if v in self.fields)
        return any(field.number in self.plan.disk_fields for field in fields)

    def reads_disk(self, atoms: Sequence[Atom]) -> str:
        """Returns the path of a parameter on disk that values are computed from element by element; else ""."""
        elements = [v for v in atoms if not _compat.is_literal(v) and v in self.split.elements]
        read = [self.fields[v] for v in self.kernel(elements).reads if v in self.fields] if elements else []
        return next((x.leaf.path for x in read if isinstance(x.array, OnDisk)), "")

    def is_available(self, atom: Atom) -> bool:
        """Whether a value exists, or can be computed element by element from values that do."""
        if _compat.is_literal(atom) or atom in self.env or atom in self.fields:
            return True
        if atom in self.matrix_results or atom not in self.split.elements:
            return False
        return all(map(self.is_available, self.kernel([atom]).reads))

    def kernel(self, outputs: Sequence[Atom]) -> Kernel:
        """Returns the elementwise function that computes some values from fields and from values that exist."""
        return kernel_of(self.split, outputs, self.matrix_results)

    def value(self, atom: Atom) -> jax.Array:
        """Returns a value on the devices, in natural shape."""
        if _compat.is_literal(atom):
            return _compat.value_of(atom)
        if atom in self.env:
            return self.env[atom]
        if atom not in self.materialized:
            if atom in self.fields:
                self.materialized[atom] = self._fetch(self.fields[atom])
            else:
                kernel = self.kernel([atom])
                reads = [
                    x.reshape(_compat.type_of(atom).shape) if jnp.ndim(x) else x for x in map(self.value, kernel.reads)
                ]
                self.materialized[atom] = kernel(reads, _compat.type_of(atom).shape)[0]
        return self.materialized[atom]

    def _fetch(self, field: Field) -> jax.Array:
        if field.array is None:
            return positions_of(field.leaf.shape)
        if memory_of(field.array) == "host":
            if self.plan.config.offload.compute == "host":
                raise ValueError(
                    f"`Offload(compute='host')` updates {field.leaf.path!r} where it lies, element by element, but the "
                    "optimizer needs more of it than elements and their sums (Muon's products, Adafactor's rows). "
                    "Use `compute='device'`, or keep the leaf on the devices (`LeafRule(offload=False)`)."
                )
            self.fetched.add(field.leaf.path)
        return field.leaf.load(field.array)

    def _sum(self, eqn: JaxprEqn) -> list[jax.Array]:
        fields = [self.fields[v] for v in self.kernel(eqn.invars).reads if v in self.fields]
        if not any(memory_of(x.array) == "host" or _is_flat(x) for x in fields):
            return _compat.bind(eqn, [self.value(v) for v in eqn.invars])
        operands = self._pass(fields[0].number, eqn.invars)
        return [reduce_pass(self.plan, operands, eqn.primitive.name, _compat.type_of(eqn.outvars[0]).dtype)]

    def targets(self, i: int, inputs: Before[Input], numbers: After[int]) -> Targets:
        """Returns the targets of the results of a parameter with state on the host or on disk."""
        leaf, result = self.plan.leaves[i], numbers.results[i]
        pairs = [(numbers.masters[i], inputs.masters[i]), *zip(numbers.inner, inputs.inner, strict=True)]
        is_away = leaf.param.memory != "device"
        pairs += [(result, inputs.params[i])] if is_away else []
        targets: dict[int, Stored | DType] = {
            k: x.stored for k, x in pairs if k is not None and isinstance(x, Field) and x.number == i
        }
        if result is not None and not is_away:
            targets[result] = _compat.type_of(self.split.jaxpr.outvars[result]).dtype
        return targets

    def update(self, i: int, inputs: Before[Input], targets: Targets) -> dict[int, jax.Array]:
        """Returns the results of a parameter that is read as stored, as stored, by their numbers among all results."""
        outs = self.split.jaxpr.outvars
        overwritten = {k: x for k, x in targets.items() if not isinstance(x, OnDisk)}
        near = {k: x for k, x in targets.items() if isinstance(x, np.dtype)}
        for k, dtype in near.items():  # it overwrites the gradient if that is wide enough
            array = grad_field(inputs, i).in_memory
            if holds(array.dtype, dtype) and memory_of(array) == "device":
                overwritten[k] = array
        if not targets:
            return {}
        results = run_pass(self.plan, self._pass(i, [outs[k] for k in targets], list(overwritten.values())))
        new = dict(zip(targets, results, strict=True))
        return new | {k: round_to(new[k], dtype) for k, dtype in near.items()}

    def from_disk(self, i: int, inputs: Before[Input], targets: Targets, result: jax.Array | None) -> dict[int, Stored]:
        """Returns the results of a parameter with state on disk, by their numbers: if nothing changes, the old ones."""
        leaf = self.plan.leaves[i]
        near = param_field(inputs, i).stored if result is None else result
        near = near if memory_of(near) != "device" else leaf.grad.load(near)
        return {k: x if isinstance(x, OnDisk) else near for k, x in targets.items()}

    def stored(self, v: Var, leaf: StateLeaf) -> Stored | None:
        """Returns a variable that a kernel reads: an array laid out like `leaf`, or a number; `None` for positions."""
        if v in self.fields:
            return self.fields[v].array
        x = jnp.asarray(self.value(v))
        return leaf.store(x.reshape(leaf.shape)) if x.ndim else x

    def _pass(self, i: int, outputs: Sequence[Atom], targets: Sequence[jax.Array | DType] = ()) -> Pass:
        """Returns the pass that computes `outputs` of a parameter, and overwrites the `targets` that are arrays."""
        leaf, kernel = self.plan.leaves[i].grad, self.kernel(outputs)
        fn = self.shared.setdefault(self.number_of(kernel.piece()), jax.jit(kernel.__call__, static_argnums=1))

        reads = [self.stored(v, leaf) for v in kernel.reads]
        assert not any(isinstance(x, OnDisk) for x in reads)
        distinct = IdDict((x, None) for x in (*reads, *targets) if isinstance(x, jax.Array))
        arrays, numbers = ([x for x in distinct if bool(x.ndim) == has_dims] for has_dims in (True, False))

        def on_chunks(
            chunks: Sequence[jax.Array], positions: Callable[[], jax.Array], some: Sequence[jax.Array]
        ) -> list[jax.Array]:
            here = IdDict(zip((*arrays, *numbers), (*chunks, *some), strict=True))
            values = [here[x] if isinstance(x, jax.Array) else positions() for x in reads]
            return fn(values, chunks[0].shape)

        place = IdDict((x, k) for k, x in enumerate(arrays))
        places = [place[x] if isinstance(x, jax.Array) else x for x in targets]
        return Pass(leaf, on_chunks, arrays, numbers, places, is_far=i in far_params(self.plan))

    def warn(self) -> None:
        """Warns of state on the host that was needed whole."""
        if self.fetched:
            warnings.warn(
                "The optimizer needs more than single elements, or their sum, of what is on the host, so each step "
                f"brings these leaves to the devices as a whole: {sorted(self.fetched)}. Their memory is needed once "
                "more there; keep them on the devices (`LeafRule(offload=False)`) if that is too much.",
                stacklevel=2,
            )


def _is_flat(field: Field) -> bool:
    """Whether a field is an array of a flattened parameter."""
    return field.leaf.cut is not None and field.leaf.cut.flat
