"""Runs a whole update where its arrays lie: on the devices, and for state on the host chunk by chunk.

    run_update(update, stored, done) -> results     in natural shape; as stored where state is elsewhere

If all is on the devices and nothing needs whole matrices, the update is called as it was written.
Otherwise its `UpdateProgram` is evaluated step by step: matrix work of one parameter on one device, see
[Note: Matrices on one device each]; other matrix work on all devices, over operands that each of them gathers once;
what is elementwise in a parameter with state on the host in passes over chunks, see [Note: Streaming an update]. What
is elementwise in a parameter with state in records was computed before, see `jzero.core.records`.

    Everywhere(plan)(eqn, operands) -> results      arrays in natural shape

Matrix work that cannot be divided runs so, see
[Note: Matrices on one device each], also inside of a `cond`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom
from jzero.core.base.guard import warn
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import evaluate
from jzero.core.jaxpr.sizes import mixes
from jzero.core.layout.casts import can_represent, positions_of, round_to
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import batch_axes
from jzero.core.layout.placement import memory_of
from jzero.core.layout.stored import InRecords, Stored
from jzero.core.plan.plan import ZeroPlan
from jzero.core.update.chunks import ChunkPass, run_pass
from jzero.core.update.kernels import PartKernel, SumTarget, Target
from jzero.core.update.owned import compute_owned
from jzero.core.update.program import (
    Input,
    UpdateProgram,
    inputs_of,
    off_device_params,
    params_as_stored,
    program_of,
    trace_stored_update,
)
from jzero.core.update.split import EquationKind
from jzero.core.update.whole import After, Before, StepGrads, WholeUpdate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Done:
    """What passes over records computed, for the rest of an update.

    Attributes:
      program: The update.
      grads: The gradients that it applies; those that nothing else needs are `None`.
      sums: Numbers over parameters in records, by their number among all such sums.
      params: By parameter, its new value, laid out like its gradient.
    """

    program: UpdateProgram = dataclasses.field(metadata={"static": True})
    grads: StepGrads
    sums: Mapping[int, jax.Array]
    params: Mapping[int, jax.Array]


class Operands(NamedTuple):
    """What a pass over the records of a parameter reads beside them: arrays laid out like the gradient, and scalars."""

    arrays: list[jax.Array]
    scalars: list[jax.Array]


def run_update(update: WholeUpdate, stored: Before[Stored], done: Done | None = None) -> After[Stored]:
    """Returns the results of an update; call it inside `jit`. State in records comes back as it is.

    Args:
      update: The update.
      stored: Its inputs as stored; gradients also in natural shape.
      done: What passes over records computed, if state is there.
    """
    plan, kept = update.plan, params_as_stored(update.plan)
    inputs = inputs_of(plan, stored, StateLeaf.load)
    if done is not None:
        program = done.program
    else:
        if plan.num_shards == 1 and not kept:
            return update(_values(inputs))
        jaxpr = trace_stored_update(update, inputs)
        if not kept and not any(map(mixes, compat.open_jaxpr(jaxpr[0])[0].eqns)):  # already traced: call it
            return jax.jit(update)(_values(inputs))
        program = program_of(update, inputs, jaxpr)
    sums, params = ({}, {}) if done is None else (done.sums, done.params)
    run = Run(program, inputs, sums)
    run.evaluate(program.num_levels)
    passed: dict[int, Stored] = {}
    for i in sorted(kept):
        passed |= run.update(i) if i not in plan.record_fields else run.from_records(i, params.get(i))
    run.warn()
    outs = program.split.jaxpr.outvars
    return jax.tree.map(lambda k: passed[k] if k in passed else run.value(outs[k]), program.results)


def _values(inputs: Before[Input]) -> Before[jax.Array]:
    return cast("Before[jax.Array]", jax.tree.map(lambda x: x.value if isinstance(x, Input) else x, inputs))


class Run:
    """Evaluates a program on arrays; inside `jit`.

    Args:
      sums: Numbers over parameters in records, as far as they are known.

    Attributes:
      env: Values of its variables: scalars, and arrays in natural shape.
      arrays: The fields, as stored; positions have none.
      materialized: Fields, and values elementwise in fields, that were needed on the devices, in natural shape.
      fetched: Paths of the parameters whose state on the host was needed whole.
      sums: The same, and those that were computed.
    """

    def __init__(self, program: UpdateProgram, inputs: Before[Input], sums: Mapping[int, jax.Array]) -> None:
        self.program, self.plan, self.split = program, program.plan, program.split
        pairs = list(zip(jax.tree.leaves(program.inputs), jax.tree.leaves(inputs), strict=True))
        self.arrays: dict[Var, Stored] = {v: x.value for v, x in pairs if v in program.fields and x.value is not None}
        self.env: dict[Var, jax.Array] = dict(zip(self.split.jaxpr.constvars, program.consts, strict=True))
        self.env |= {v: x.value if isinstance(x, Input) else x for v, x in pairs if v not in program.fields}
        self.materialized: dict[Var, jax.Array] = {}
        self.fetched: set[str] = set()
        self.shared: dict[int, Callable[..., list[jax.Array]]] = {}
        self.apply = Everywhere(self.plan)
        self.sums = dict(sums)

    def evaluate(self, level: int) -> None:
        """Computes all that needs at most `level` passes over records before it, but what is elementwise in fields."""
        for step in self.program.steps:
            if step.level > level:
                continue
            if step.works:
                self.env |= compute_owned(self.plan, step.works, self.value)
                continue
            eqn, number = self.split.jaxpr.eqns[step.eqn], self.program.sums.get(step.eqn)
            if number in self.sums:
                outs = [self.sums[number]]
            elif number is not None and self.program.reads_records(step):
                continue  # the next pass makes it
            else:
                with compat.equation_context(eqn):
                    is_sum = self.split.kinds[step.eqn] is EquationKind.SUM
                    outs = self._sum(eqn) if is_sum else self.apply(eqn, list(map(self.value, eqn.invars)))
            self.env.update(zip(eqn.outvars, outs, strict=True))
            self.sums |= {} if number is None else {number: outs[0]}

    def value(self, atom: Atom) -> jax.Array:
        """Returns a value on the devices, in natural shape."""
        if compat.is_literal(atom):
            return compat.value_of(atom)
        if atom in self.env:
            return self.env[atom]
        if atom not in self.materialized:
            if atom in self.program.fields:
                self.materialized[atom] = self._fetch(atom)
            else:
                kernel = self.program.kernel([atom])
                reads = [
                    x.reshape(compat.type_of(atom).shape) if jnp.ndim(x) else x for x in map(self.value, kernel.reads)
                ]
                self.materialized[atom] = kernel(reads, compat.type_of(atom).shape)[0]
        return self.materialized[atom]

    def _fetch(self, v: Var) -> jax.Array:
        field, x = self.program.fields[v], self.arrays.get(v)
        if x is None:
            assert field.source.kind == "positions", "a gradient that was dropped"
            return positions_of(field.leaf.shape)
        if memory_of(x) == "host":
            if self.plan.config.offload.compute == "host":
                raise ValueError(
                    f"`Offload(compute='host')` updates {field.leaf.path!r} where it lies, element by element, but the "
                    "optimizer needs more of it than elements and their sums (Muon's products, Adafactor's rows). "
                    "Use `compute='device'`, or keep the leaf on the devices (`LeafRule(offload=False)`)."
                )
            self.fetched.add(field.leaf.path)
        return field.leaf.load(x)

    def _sum(self, eqn: JaxprEqn) -> list[jax.Array]:
        kernel = self.program.kernel(eqn.invars)
        read = [v for v in kernel.reads if v in self.program.fields]
        if not any(memory_of(self.arrays.get(v)) == "host" or _is_flat(self.program.fields[v].leaf) for v in read):
            return compat.bind(eqn, [self.value(v) for v in eqn.invars])
        target = SumTarget(0, eqn.primitive.name, len(eqn.invars), compat.type_of(eqn.outvars[0]).dtype)
        return run_pass(self.plan, self._pass(self.program.fields[read[0]].param, eqn.invars, [target]))

    def update(self, i: int) -> dict[int, jax.Array]:
        """Returns the results of a parameter that is read as stored, as stored, by their indices among all results."""
        outs, targets, grad = self.split.jaxpr.outvars, self.program.targets(i), self.program.inputs.grads[i]
        if not targets:
            return {}
        assert grad is not None
        leaf = self.plan.leaves[i].grad
        array, overwritten = self.array(grad.reduced, leaf), dict(targets)
        new_arrays = {k: x for k, x in targets.items() if isinstance(x, np.dtype)}
        for k, dtype in new_arrays.items():  # it overwrites the gradient if that is wide enough
            if can_represent(array.dtype, dtype) and memory_of(array) == "device":
                overwritten[k] = grad.reduced
        results = run_pass(self.plan, self._pass(i, [outs[k] for k in targets], list(overwritten.values())))
        new = dict(zip(targets, results, strict=True))
        return new | {k: round_to(new[k], dtype) for k, dtype in new_arrays.items()}

    def from_records(self, i: int, new: jax.Array | None) -> dict[int, Stored]:
        """Returns the results of a parameter with state in records, by their indices; its state stays there."""
        param = self.program.inputs.params[i]
        assert param is not None
        result: Stored = self.arrays[param] if new is None else new  # nothing changes it
        if memory_of(result) == "device":
            result = self.plan.leaves[i].grad.load(result)
        places = {k: self.arrays[v] for k, v in self.program.targets(i).items() if isinstance(v, Var)}
        return {k: x if isinstance(x := places.get(k), InRecords) else result for k in self.program.targets(i)}

    def operands(self, of: PartKernel) -> Operands:
        """Returns what a pass reads beside records: arrays laid out like the gradient, and scalars."""
        leaf = self.plan.leaves[of.param].grad
        return Operands(*([self.array(v, leaf) for v in some] for some in (of.arrays, of.scalars)))

    def array(self, v: Var, leaf: StateLeaf) -> jax.Array:
        """Returns a variable that a kernel reads and that is in memory."""
        x = self.stored(v, leaf)
        assert isinstance(x, jax.Array)
        return x

    def stored(self, v: Var, leaf: StateLeaf) -> Stored | None:
        """Returns a variable that a kernel reads: an array laid out like `leaf`, or a scalar; `None` for positions."""
        if v in self.program.fields:
            return self.arrays.get(v)
        x = jnp.asarray(self.value(v))
        return leaf.store(x.reshape(leaf.shape)) if x.ndim else x

    def _pass(self, i: int, outputs: Sequence[Atom], targets: Sequence[Var | Target]) -> ChunkPass:
        """Returns the pass that computes `outputs` of a parameter, and overwrites the `targets` that are variables."""
        leaf, of = self.plan.leaves[i].grad, self.program.part_kernel(i, outputs, in_memory=True)
        fn = self.shared.setdefault(of.structure, jax.jit(of.kernel, static_argnums=1))
        arrays = list(dict.fromkeys([*of.arrays, *(x for x in targets if isinstance(x, Var))]))
        places = tuple(arrays.index(x) if isinstance(x, Var) else x for x in targets)
        operands = self.operands(of._replace(arrays=tuple(arrays)))
        return ChunkPass(
            leaf, of._replace(kernel=fn, targets=places), *operands, is_off_device=i in off_device_params(self.plan)
        )

    def warn(self) -> None:
        """Warns of state on the host that was needed whole."""
        if self.fetched:
            warn(
                "The optimizer needs more than single elements, or their sum, of what is on the host, so each step "
                f"brings these leaves to the devices as a whole: {sorted(self.fetched)}. Their memory is needed once "
                "more there; keep them on the devices (`LeafRule(offload=False)`) if that is too much."
            )


def _is_flat(leaf: StateLeaf) -> bool:
    return leaf.cut is not None and leaf.cut.flat


class Everywhere:
    """Applies equations to arrays on the devices of a plan, to whole ones if they mix elements."""

    def __init__(self, plan: ZeroPlan) -> None:
        self.plan = plan
        self._gathered: IdDict[jax.Array, jax.Array] = IdDict()

    def __call__(self, eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        """Returns the results of an equation."""
        if not mixes(eqn):
            return compat.bind(eqn, inputs)
        if eqn.primitive.name == "cond":
            return list(lax.switch(inputs[0], [self._function(x) for x in eqn.params["branches"]], *inputs[1:]))
        fn = jax.shard_map(
            lambda *xs: tuple(compat.bind(eqn, xs)),
            mesh=self.plan.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(batch_axes(self.plan.config)),
            check_vma=False,
        )
        return list(fn(*map(self._gather, inputs)))

    def _function(self, jaxpr: AnyJaxpr) -> Callable[..., list[jax.Array]]:
        return lambda *inputs: evaluate(jaxpr, inputs, self)

    def _gather(self, x: jax.Array) -> jax.Array:
        """Returns an array whole on every device; the same one for each use."""
        if not jnp.ndim(x):
            return x
        if x not in self._gathered:
            self._gathered[x] = lax.with_sharding_constraint(x, self.plan.whole_sharding)
        return self._gathered[x]
