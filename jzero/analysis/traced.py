"""A traced step as buffers and operations: what takes memory, in which order, and what it costs.

[Note: How memory is reckoned]
A step's jaxpr says which values there are; what XLA makes of it decides which of them take memory. A few habits that
its compilers for GPUs and TPUs share are enough to tell:

* Elementwise operations, casts, broadcasts and slices are fused into what reads them and take no memory; what reads
  them reads their own inputs, which therefore live on. They are written only where something that cannot be fused asks
  for them: a product, a collective, a loop.
* What is written elementwise takes over the memory of an input of its size that nobody needs any more.
* A loop's carried values and what it stacks exist once, outside of its body; a donated argument and the result that
  replaces it are one.
* Operations count in the order of the program. The GPU compiler departs from it where a backward loop reduces
  gradients: to overlap them it reduces those of one pass during the next. What was reduced before the loop counts until
  after it: without that 1.4B at stage 3 is reckoned 7 % below what the compiler says, with it 2 %.
* On GPUs a stack of layers that is cut behind the first dimension of a layer is copied into another layout for as long
  as loops gather from it.
* On GPUs parameters that are gathered after the update exist twice until the end: a collective does not write into a
  donated argument there. Where that would take more than the scheduler plans with, they are gathered one by one.

Left out: workspaces of kernels, tiles and alignment, fragmentation, other copies into other layouts, gathering ahead,
`unroll` of loops; mesh axes other than ZeRO's (tensor parallelism), whose collectives are the compiler's and whose
parts of activations count whole; arrays that the loss closes over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax

from jzero import _compat
from jzero.analysis.sizes import bytes_of, product_flops
from jzero.jaxpr.liveness import needed
from jzero.jaxpr.primitives import RUNS, Trait, called, named

__all__ = ["Buffer", "Kind", "Operation", "TracedProgram", "Transfer", "trace_program"]

Kind = Literal["activations", "gradients", "gathered", "working"]

FUSIBLE = named(Trait.ELEMENTWISE | Trait.LAYOUT | Trait.RANDOM) | {"device_put"}
REDUCTIONS = named(Trait.REDUCTION) | {"gather"}
"""What elementwise operations are fused into, but not through."""
TRANSFERS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
NOTHING: frozenset[int] = frozenset()


@dataclasses.dataclass
class Buffer:
    """An array that takes memory.

    Attributes:
      num_bytes: On one device; 0 if it is part of an argument.
      name: The name stack and the primitive that it comes from.
      times: For a stack that a loop writes, the loop's trip count; else 1.
      kind: What it is for.
    """

    num_bytes: int
    name: str = ""
    times: int = 1
    kind: Kind = "working"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective.

    Attributes:
      kind: As HLO calls it.
      num_bytes: Of the whole array: what a gather makes, what a reduce-scatter or all-reduce takes, on one device.
      axes: The mesh axes that it goes over.
      times: How often a step does it.
      of_param: Whether it gathers a parameter for the loss.
    """

    kind: str
    num_bytes: int
    axes: tuple[str, ...]
    times: int = 1
    of_param: bool = False


@dataclasses.dataclass
class Operation:
    """Something that is done at one point of the program.

    Attributes:
      reads: Indices of buffers.
      writes: Indices of buffers.
      backward: Whether it is part of the backward pass.
      in_place: Whether what it writes may take over the memory of what it reads.
      inner: The body of a loop or branch.
      is_transfer: Whether it is a collective.
      gathers: Whether it is one that makes arrays whole.
    """

    reads: frozenset[int]
    writes: tuple[int, ...]
    backward: bool
    in_place: bool = False
    inner: TracedProgram | None = None
    is_transfer: bool = False
    gathers: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """An array of the program: a buffer, or something that is computed from other values wherever it is read.

    Attributes:
      num_bytes: What it takes on one device.
      name: Where it comes from.
      parts: Among how many devices it is split, outside of `shard_map`.
      buffer: The index of its buffer.
      sources: What it is computed from, if it has none.
      stack: Inside of a loop: which of the stacks that it runs over this is a slice of, casts aside.
    """

    num_bytes: int
    name: str = ""
    parts: int = 1
    buffer: int | None = None
    sources: tuple[_Value, ...] = ()
    stack: int | None = None


class TracedProgram:
    """One body of code: its buffers and operations, calls in it included.

    Attributes:
      buffers: Every array that takes memory.
      operations: In the order of the program.
      transfers: The collectives, those of inner loops included.
      flops: Operations of its products, those of inner loops included.
      outputs: The buffers that outlive it.
      transposed: Inside of a loop: the stacks that it gathers along another dimension than a layer's first.
      copies: For the buffers of such stacks, those of their copies.
      regathered: The buffers with results that the program gathers, which take the place of donated arguments.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.operations: list[Operation] = []
        self.transfers: list[Transfer] = []
        self.flops = 0.0
        self.outputs: frozenset[int] = NOTHING
        self.regathered: frozenset[int] = NOTHING
        self.transposed: set[int] = set()
        self.copies: dict[int, int] = {}
        self._written: dict[_Value, _Value] = {}

    def argument(self, aval: Any, parts: int = 1) -> _Value:
        """Returns a value that exists before the program starts, and after it."""
        self.buffers.append(Buffer(0))
        return _Value(bytes_of(aval) // parts, "", parts, buffer=len(self.buffers) - 1)

    def run(
        self, jaxpr: Any, inputs: Sequence[_Value], name: str, *, backward: bool, used: Sequence[bool] | None = None
    ) -> list[_Value]:
        """Adds a jaxpr, as far as its outputs are used; returns these, and nothings for the others."""
        jaxpr, _ = _compat.open_jaxpr(jaxpr)
        env: dict[Any, _Value] = {v: self.argument(v.aval) for v in jaxpr.constvars}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            if _compat.is_literal(atom):
                return _Value(bytes_of(atom.aval))
            return env.get(atom, _Value(bytes_of(atom.aval)))

        used = used or [True] * len(jaxpr.outvars)
        wanted = [v for v, is_used in zip(jaxpr.outvars, used, strict=True) if is_used]
        for eqn, is_read in needed(jaxpr, wanted).equations:
            stack = str(eqn.source_info.name_stack)
            path = "/".join(filter(None, [name, stack]))
            visitor = _Visitor(self, eqn, is_read, path, backward or "transpose(" in stack)
            env.update(zip(eqn.outvars, visitor([read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def finish(self, outputs: Iterable[_Value]) -> TracedProgram:
        """Says which values outlive the program."""
        self.outputs = self.reads(outputs)
        return self

    def reads(self, values: Iterable[_Value]) -> frozenset[int]:
        """Returns the buffers that are read to compute values: theirs, or those of what they are computed from."""
        found, seen, pending = set(), set(), list(values)
        while pending:
            x = pending.pop()
            x = self._written.get(x, x)
            if x.buffer is not None:
                found.add(x.buffer)
            elif x not in seen:
                seen.add(x)
                pending += x.sources
        return frozenset(found)

    def write(self, x: _Value, *, backward: bool) -> _Value:
        """Returns a value as a buffer: writes it, unless it is one or has been written before."""
        if x.buffer is not None or not x.num_bytes:
            return x
        if x not in self._written:
            reads = self.reads([x])
            self.buffers.append(Buffer(x.num_bytes, x.name))
            made = len(self.buffers) - 1
            self.operations.append(Operation(reads, (made,), backward, in_place=True))
            self._written[x] = dataclasses.replace(x, buffer=made, sources=())
        return self._written[x]

    def include(self, inner: TracedProgram, times: int) -> None:
        """Counts what a body does that runs `times` times."""
        self.flops += times * inner.flops
        self.transfers += [dataclasses.replace(x, times=times * x.times) for x in inner.transfers]


def trace_program(jaxpr: Any, parts: Sequence[int]) -> TracedProgram:
    """Returns the buffers and operations of a program, by [Note: How memory is reckoned].

    Args:
      jaxpr: Of the whole program, such as `jax.jit(...).trace(...).jaxpr`.
      parts: For each input, among how many devices it is split.
    """
    program = TracedProgram()
    opened, _ = _compat.open_jaxpr(jaxpr)
    inputs = [program.argument(v.aval, n) for v, n in zip(opened.invars, parts, strict=True)]
    outputs = program.run(jaxpr, inputs, "", backward=False)
    made = {x.buffer for x in outputs if x.buffer is not None}
    program.regathered = frozenset(i for i in program.reads(outputs) if program.buffers[i].kind == "gathered")
    for i in made - program.regathered:  # a result takes over the memory of the argument that it replaces
        program.buffers[i].num_bytes = 0
    return program


@dataclasses.dataclass
class _Visitor:
    """Adds one equation to a program."""

    program: TracedProgram
    eqn: Any
    used: list[bool]
    name: str
    backward: bool

    def __call__(self, inputs: list[_Value]) -> list[_Value]:
        kind = self.eqn.primitive.name
        if kind == "optimization_barrier":
            return [self._write(x) for x in inputs]
        if kind in named(Trait.ALIAS):
            return [self._resharded(inputs[0]) if kind == "sharding_constraint" else inputs[0]]
        if kind in RUNS:
            return self.program.run(called(self.eqn), inputs, self.name, backward=self.backward, used=self.used)
        if kind == "shard_map":
            return self._shard_map(inputs)
        if kind in FUSIBLE:
            stack = inputs[0].stack if len(inputs) == 1 else None
            return [
                _Value(num_bytes, f"{self.name}:{kind}", parts, sources=tuple(inputs), stack=stack)
                for num_bytes, parts in (_split(v.aval, inputs) for v in self.eqn.outvars)
            ]
        if kind == "scan":
            return self._scan(inputs)
        if kind in REDUCTIONS:
            return self._operation(inputs, inputs)
        return self._opaque(inputs)

    def _write(self, x: _Value) -> _Value:
        return self.program.write(x, backward=self.backward)

    def _resharded(self, x: _Value) -> _Value:
        """Outside of `shard_map`: a value that was split and no longer is has been gathered."""
        sharding = self.eqn.params["sharding"]
        names = jax.tree.leaves(tuple(getattr(sharding, "spec", ())))
        names = [n for n in names if isinstance(n, str)]
        parts = math.prod(int(sharding.mesh.shape[n]) for n in names)
        whole = x.num_bytes * x.parts
        if parts >= x.parts:
            return dataclasses.replace(x, parts=parts, num_bytes=whole // parts)
        axes = tuple(str(n) for n in sharding.mesh.shape if n not in names)
        self.program.transfers.append(Transfer("all-gather", whole // parts, axes))
        shard, x = self._write(x), dataclasses.replace(x, parts=parts)
        return self._operation([x], [shard], kind="gathered", moves=True)[0]

    def _shard_map(self, inputs: list[_Value]) -> list[_Value]:
        jaxpr = next(_compat.contained_jaxprs(self.eqn))
        local = [dataclasses.replace(x, parts=1) for x in inputs]
        outputs = self.program.run(jaxpr, local, self.name, backward=self.backward, used=self.used)
        found = []
        for v, inner, x in zip(self.eqn.outvars, jaxpr.outvars, outputs, strict=True):
            for i in self.program.reads([x]) if v.aval.ndim else ():
                if self.program.buffers[i].kind == "working":
                    self.program.buffers[i].kind = "gradients"
            found.append(dataclasses.replace(x, parts=max(1, bytes_of(v.aval) // max(1, bytes_of(inner.aval)))))
        return found

    def _scan(self, inputs: list[_Value]) -> list[_Value]:
        num_consts, num_carry = _compat.scan_groups(self.eqn)
        jaxpr, _ = _compat.open_jaxpr(self.eqn.params["jaxpr"])
        length, num_outside = int(self.eqn.params["length"]), num_consts + num_carry
        body = TracedProgram()
        given = [body.argument(v.aval) for v in jaxpr.invars[:num_outside]]
        # Slices of stacks are read where they are, until something needs one by itself.
        given += [
            _Value(bytes_of(v.aval), f"{self.name}:slice", sources=(body.argument(v.aval),), stack=i)
            for i, v in enumerate(jaxpr.invars[num_outside:], start=num_outside)
        ]
        outputs = body.run(jaxpr, given, self.name, backward=self.backward)
        self.program.include(body.finish(outputs), length)
        kind: Kind = "gradients" if self.backward else "working"
        # What the body does not read is not there: the compiler drops it.
        read = body.outputs.union(*(op.reads for op in body.operations))
        whole = [self._write(x) for x, inside in zip(inputs, given, strict=True) if body.reads([inside]) & read]
        copies = [self._transposed(self._write(inputs[i])) for i in sorted(body.transposed) if inputs[i].num_bytes]
        made = self._operation(inputs, [*whole, *copies], in_place=True, inner=body, kind=kind)
        for x, inside in zip(made[num_carry:], outputs[num_carry:], strict=True):
            assert x.buffer is not None
            self.program.buffers[x.buffer].times = length
            self.program.buffers[x.buffer].name = inside.name or f"{self.name}:carried"
        return made

    def _transposed(self, stack: _Value) -> _Value:
        """The copy of a stack in another layout, which every loop over it reads."""
        program = self.program
        assert stack.buffer is not None
        if stack.buffer not in program.copies:
            program.buffers.append(Buffer(stack.num_bytes, f"{self.name}:layout", kind="gathered"))
            made = program.copies[stack.buffer] = len(program.buffers) - 1
            program.operations.append(Operation(frozenset([stack.buffer]), (made,), self.backward))
        return dataclasses.replace(stack, buffer=program.copies[stack.buffer])

    def _opaque(self, inputs: list[_Value]) -> list[_Value]:
        """What needs its inputs as arrays: products, collectives, loops, kernels."""
        kind = self.eqn.primitive.name
        bodies = [self._body(jaxpr) for jaxpr in _compat.contained_jaxprs(self.eqn)]
        largest = max(bodies, key=lambda body: sum(x.num_bytes for x in body.buffers), default=None)
        if largest is not None:
            self.program.include(largest, 1)
        self.program.flops += product_flops(self.eqn)
        whole = [self._write(x) for x in inputs]
        if kind in TRANSFERS:
            axes = self.eqn.params.get("axis_name", self.eqn.params.get("axes", ()))
            axes = tuple(str(a) for a in (axes if isinstance(axes, tuple | list) else (axes,)))
            sizes = [max(x.num_bytes, bytes_of(v.aval)) for x, v in zip(inputs, self.eqn.outvars, strict=False)]
            of_param = TRANSFERS[kind] == "all-gather" and "zero_gather" in self.name
            self.program.transfers += [Transfer(TRANSFERS[kind], size, axes, of_param=of_param) for size in sizes]
        made: Kind = "gathered" if kind.startswith("all_gather") else "working"
        if made == "gathered" and self.eqn.params.get("all_gather_dimension", 0) > 0 and inputs[0].stack is not None:
            self.program.transposed.add(inputs[0].stack)
        return self._operation(
            inputs, whole, in_place=kind in named(Trait.IN_PLACE), inner=largest, kind=made, moves=kind in TRANSFERS
        )

    def _body(self, jaxpr: Any) -> TracedProgram:
        body = TracedProgram()
        inputs = [body.argument(v.aval) for v in jaxpr.invars]
        return body.finish(body.run(jaxpr, inputs, self.name, backward=self.backward))

    def _operation(
        self,
        inputs: Sequence[_Value],
        read: Sequence[_Value],
        *,
        in_place: bool = False,
        inner: TracedProgram | None = None,
        kind: Kind = "working",
        moves: bool = False,
    ) -> list[_Value]:
        """Adds the operation, which reads `read` and writes every output."""
        name = f"{self.name}:{self.eqn.primitive.name}"
        values, first = [], len(self.program.buffers)
        for i, v in enumerate(self.eqn.outvars):
            num_bytes, parts = _split(v.aval, inputs)
            self.program.buffers.append(Buffer(num_bytes, name, kind=kind))
            values.append(_Value(num_bytes, name, parts, buffer=first + i))
        writes = tuple(range(first, len(self.program.buffers)))
        gathers = moves and kind == "gathered"
        self.program.operations.append(
            Operation(self.program.reads(read), writes, self.backward, in_place, inner, moves, gathers)
        )
        return values


def _split(aval: Any, inputs: Iterable[_Value]) -> tuple[int, int]:
    """One device's bytes of a value, and among how many devices it is split, judging by what it is computed from."""
    num_bytes = bytes_of(aval)
    parts = max((x.parts for x in inputs if x.parts > 1 and 8 * x.num_bytes * x.parts >= num_bytes), default=1)
    return num_bytes // parts, parts
