"""The buffers and operations of a traced program; `traced` fills them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from jzero.core.base.types import DType
from jzero.core.jaxpr.sizes import array_bytes

BufferKind = Literal["activations", "gradients", "gathered", "working"]

JOINED = ":concatenate"
"""The operation that compilers but those for TPUs repeat for each reader, and store no result beside its operands."""
UPDATE = "zero_update"
"""The scope of a step's update."""
SLICES = ("slice", "dynamic_slice", "gather", "split")
"""Operations that read no more of an array than they return."""
SLICE_NAMES = tuple(f":{kind}" for kind in SLICES)
COSTLY = {"exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "tanh", "erf", "sin", "cos", "pow"}
"""Elementwise operations that compilers do not repeat in each reader."""
NOTHING: frozenset[int] = frozenset()
MOST_SLICES = 1
"""How many slices of fused values may follow one another in a fused value that several read: each doubles its work."""
UNDIVIDED = 4096
"""The longest column that compilers for GPUs sum in one step; they divide longer ones among more blocks."""
FILLED = 7 / 8
"""The part of a tile, a power of two of elements, that rows of a softmax fill if its gradient is one kernel on GPUs."""
KernelKey: TypeAlias = tuple[str, int]
"""The name of a kernel and the number of elements that it returns, by which compiled programs show the same one."""


@dataclasses.dataclass
class Buffer:
    """An array that takes memory.

    Attributes:
      num_bytes: On one device; 0 if it is part of an argument.
      name: The name stack and the primitive that make it.
      times: For a stack that a loop writes, the loop's trip count; else 1.
      kind: Its purpose.
    """

    num_bytes: int
    name: str = ""
    times: int = 1
    kind: BufferKind = "working"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective.

    Attributes:
      kind: Its name in HLO.
      num_bytes: Of the whole array on one device: the output of a gather, the input of a reduce-scatter or all-reduce.
      num_elements: Of the same array.
      axes: The mesh axes that it spans.
      times: How often a step runs it.
      of_param: Whether it gathers a parameter for the loss.
      scope: Where it is: the name stack.
    """

    kind: str
    num_bytes: int
    num_elements: int
    axes: tuple[str, ...]
    times: int = 1
    of_param: bool = False
    scope: str = ""


class Product(NamedTuple):
    """The arithmetic of a matrix product or convolution.

    Attributes:
      flops: Its operations on one device.
      dtype: That of its first operand.
      highest: Whether it asks for full precision.
    """

    flops: float
    dtype: DType
    highest: bool


class Normalization(NamedTuple):
    """Buffers that an operation reads beside reductions of them.

    Attributes:
      buffers: Their indices.
      reductions: The positions of the reductions, of one another, too.
    """

    buffers: frozenset[int]
    reductions: frozenset[int]


@dataclasses.dataclass
class BufferOperation:
    """An operation at one point of the program.

    Attributes:
      writes: Indices of buffers.
      backward: Whether it is part of the backward pass.
      reads: Indices of buffers; `TracedProgram` sets them.
      in_place: Whether its outputs may take over the memory of its inputs.
      inner: The body of a loop, or the largest branch of a conditional.
      branches: All branches of a conditional of the loss.
      is_transfer: Whether it is a collective.
      gathers: Whether it is a collective that gathers whole arrays.
      may_wait: Whether compilers may postpone it: a product, or a reduction, over devices or of a fused value.
      num_bytes: What it reads and writes of the device's memory, without `inner`.
      product: Its arithmetic, if it is a product.
      reduces: Whether it computes few elements from many.
      row: The number of elements that it reduces to one, if it reduces what is costly and read by others, too.
      times: How often `inner` runs.
    """

    writes: tuple[int, ...]
    backward: bool
    reads: frozenset[int] = NOTHING
    in_place: bool = False
    inner: TracedProgram | None = None
    branches: tuple[TracedProgram, ...] = ()
    is_transfer: bool = False
    gathers: bool = False
    may_wait: bool = False
    num_bytes: int = 0
    product: Product | None = None
    reduces: bool = False
    row: int = 1
    times: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class BufferValue:
    """An array of the program: a buffer, or a fused value, computed from other values wherever it is read.

    Attributes:
      num_bytes: Its bytes on one device.
      name: The name stack and the primitive that make it.
      parts: The number of devices that it is split among; 1 inside `shard_map`.
      buffer: The index of its buffer.
      sources: If it has no buffer, the values that it is computed from.
      is_shared: Whether several equations read it.
      is_costly: If it has no buffer, whether computing it takes more than reading it, as an exponential does.
      constant: Its value, if it is a constant of the program.
      slices: The most slices of fused values, that others read, too, that follow one another from arrays to it.
    """

    num_bytes: int
    name: str = ""
    parts: int = 1
    buffer: int | None = None
    sources: tuple[BufferValue, ...] = ()
    is_shared: bool = False
    is_costly: bool = False
    constant: Any = None
    slices: int = 0


class TracedProgram:
    """The buffers and operations of one body of code, including calls in it.

    Attributes:
      fuses_products: As on TPUs: products compute what is elementwise in their operands; no pad between elements fuses.
      buffers: Every array that takes memory.
      operations: In the order of the program.
      transfers: The collectives, including those of inner loops.
      flops: Operations of its products, including those of inner loops.
      outputs: The buffers that outlive it.
      barriers: The barriers that make arrays wait for others, each as its range of operations.
      result_bytes: What the device reads and writes to store results that no operation writes.
      regathered: The buffers of results that the program gathers, which replace donated arguments.
      kernels: The arithmetic of each kernel, including those of inner loops; `None` where it is unknown.
    """

    def __init__(self, *, fuses_products: bool = False) -> None:
        self.fuses_products = fuses_products
        self.buffers: list[Buffer] = []
        self.operations: list[BufferOperation] = []
        self.transfers: list[Transfer] = []
        self.flops = 0.0
        self.outputs: frozenset[int] = NOTHING
        self.barriers: list[range] = []
        self.result_bytes = 0
        self.regathered: frozenset[int] = NOTHING
        self.kernels: dict[KernelKey, list[Product | None]] = {}
        self._written: dict[BufferValue, BufferValue] = {}
        self._writer: dict[BufferValue, int] = {}  # the operation that writes each of these
        self._first_reader: dict[BufferValue, int] = {}  # of fused values
        self._read: list[Sequence[BufferValue]] = []  # by each operation
        self._has_late_writes = False

    def add(self, operation: BufferOperation, values: Sequence[BufferValue]) -> None:
        """Adds an operation that reads values; it computes those, and their sources, that are fused."""
        buffers, fused = self._sources(values)
        for x in fused:
            self._first_reader.setdefault(x, len(self.operations))
        operation.reads = buffers
        self.operations.append(operation)
        self._read.append(values)

    def settle(self) -> None:
        """Lets operations read values that turned out to be written before them, not the sources of these."""
        if self._has_late_writes:
            for t, (operation, values) in enumerate(zip(self.operations, self._read, strict=True)):
                operation.reads, _ = self._sources(values, before=t)

    def argument(self, aval: jax.core.AbstractValue, parts: int = 1, constant: Any = None) -> BufferValue:
        """Adds a value that exists before the program starts and after it ends."""
        self.buffers.append(Buffer(0))
        return BufferValue(bytes_of(aval) // parts, "", parts, buffer=len(self.buffers) - 1, constant=constant)

    def finish(self, outputs: Sequence[BufferValue], *, num_carry: int | None = None) -> TracedProgram:
        """Sets the values that outlive the program; in a loop, `num_carry` carried ones, then slices of stacks."""
        self.settle()
        self.outputs = self.reads(outputs)
        stacked = [] if num_carry is None else outputs[num_carry:]
        self.result_bytes = self.bytes_to_store(outputs) + sum(2 * x.num_bytes for x in stacked if self.is_written(x))
        return self

    def bytes_to_store(self, results: Iterable[BufferValue]) -> int:
        """Returns the bytes read and written to compute the results that have no buffer yet."""
        fused = [x for x in results if not self.is_written(x)]
        return self.bytes_read(fused) + sum(x.num_bytes for x in fused)

    def reads(self, values: Iterable[BufferValue]) -> frozenset[int]:
        """Returns the buffers that are read to compute values: their own, or those of their sources."""
        return self._sources(values)[0]

    def _sources(
        self, values: Iterable[BufferValue], before: float = math.inf
    ) -> tuple[frozenset[int], set[BufferValue]]:
        """Returns the buffers, written before an operation, that values are computed from, and the fused values."""
        buffers: set[int] = set()
        fused: set[BufferValue] = set()
        pending = list(values)
        while pending:
            x = pending.pop()
            if self._writer.get(x, math.inf) < before:
                x = self._written[x]
            if x.buffer is not None:
                buffers.add(x.buffer)
            elif x not in fused:
                fused.add(x)
                pending += x.sources
        return frozenset(buffers), fused

    def is_written(self, x: BufferValue) -> bool:
        """Returns whether a value has a buffer."""
        return self._written.get(x, x).buffer is not None

    def write_beside(self, inputs: Sequence[BufferValue], *, divides: bool) -> int:
        """Writes expensive inputs of a backward reduction that others read too: a fusion can have several outputs.

        Also what makes them so, where an operation computed it before, see [Note: How memory is estimated]. Returns
        the bytes that the reduction need not read, since a divided one is a kernel with what writes them.
        """
        pending, start = list(inputs), len(self.operations)
        while pending:
            x = pending.pop()
            if self.is_written(x):
                continue
            if x.is_shared and x.is_costly:
                for y in self._computed_before(x):
                    if divides or not self.operations[self._first_reader[y]].backward:
                        self.write(y, backward=True, waits=True)
                self.write(x, backward=True, waits=self.is_summed(x))
            else:
                pending += _as_large(x)
        beside = [i for op in self.operations[start:] for i in op.writes]
        return sum(self.buffers[i].num_bytes for i in beside) if divides else 0

    def _computed_before(self, x: BufferValue) -> Iterator[BufferValue]:
        """Yields the expensive values that make a fused value so, if operations computed them, from as much or more."""
        pending, seen = _as_large(x), set[BufferValue]()
        while pending:
            y = pending.pop()
            if y in seen or self.is_written(y):
                continue
            seen.add(y)
            if y.name.rpartition(":")[2] not in COSTLY:
                pending += _as_large(y)
            elif y in self._first_reader and self.bytes_read([y]) >= y.num_bytes:
                yield y

    def is_summed(self, x: BufferValue) -> bool:
        """Returns whether a fused value was first computed for a reduction, from less than it would take itself."""
        reader = self._first_reader.get(x)
        return reader is not None and self.operations[reader].reduces and self.bytes_read([x]) < x.num_bytes

    def bytes_read(self, values: Iterable[BufferValue]) -> int:
        """Returns the bytes of buffers that are read to compute values, each once; slices count alone."""
        sizes: dict[int, float] = {}
        bounds: dict[BufferValue, float] = {}
        pending: list[tuple[BufferValue, float]] = [(x, math.inf) for x in values]
        while pending:
            x, most = pending.pop()
            x = self._written.get(x, x)
            if x.buffer is not None:
                sizes[x.buffer] = max(sizes.get(x.buffer, 0), min(x.num_bytes, most))
            elif bounds.get(x, -1) < most:
                bounds[x] = most
                if x.name.endswith(SLICE_NAMES):
                    most = min(most, x.num_bytes)
                pending += [(source, most) for source in x.sources]
        return int(sum(sizes.values()))

    def write(self, x: BufferValue, *, backward: bool, keep: bool = True, waits: bool = False) -> BufferValue:
        """Returns a value in a buffer, written if it has none yet.

        Args:
          x: The value.
          backward: Whether the backward pass needs it.
          keep: Whether later readers share the buffer.
          waits: Whether a barrier or a sum writes it: such a value is written where it is first computed.
        """
        if x.buffer is not None or not x.num_bytes:
            return x
        if x in self._written:
            return self._written[x]
        stays = keep and (self.fuses_products or not x.name.endswith(JOINED))
        reader = self._first_reader.get(x) if waits and stays else None
        num_bytes = self.bytes_to_store([x])
        self.buffers.append(Buffer(x.num_bytes, x.name))
        written = len(self.buffers) - 1
        done = dataclasses.replace(x, buffer=written, sources=())
        if reader is not None and backward:
            self.operations[reader].writes += (written,)
            self.operations[reader].num_bytes += x.num_bytes
            self._has_late_writes = True
        else:
            reader = len(self.operations)
            self.add(BufferOperation((written,), backward, in_place=True, num_bytes=num_bytes), x.sources)
        if stays:
            self._written[x], self._writer[x] = done, reader
        else:
            self._first_reader.setdefault(x, reader)
        return done

    def normalizations(self) -> Iterator[tuple[int, Normalization]]:
        """Yields what is read beside a reduction of it in the same pass, as a softmax and its gradient do.

        Compilers fuse the reductions with the operation that reads both, which is the first of each pair. On GPUs
        they do so for the sums of a softmax's gradient only if its rows fill their tiles.
        """
        reduced: dict[tuple[int, bool], Normalization] = {}
        apart: set[tuple[int, bool]] = set()  # what they do not fuse
        for t, op in enumerate(self.operations):
            before = [x for i in op.reads if (x := reduced.get((i, op.backward)))]
            buffers = NOTHING.union(*(x.buffers for x in before))
            reductions = NOTHING.union(*(x.reductions for x in before))
            if buffers & op.reads:
                yield t, Normalization(buffers & op.reads, reductions)
            fills = self.fuses_products or op.row >= FILLED * 2 ** (op.row - 1).bit_length()
            if op.reduces and not (fills and apart.isdisjoint((i, op.backward) for i in op.reads)):
                apart |= {(i, op.backward) for i in op.writes}
            elif op.reduces:
                whole = Normalization(buffers | op.reads, reductions | {t})
                reduced.update({(i, op.backward): whole for i in op.writes})

    def include(self, *bodies: TracedProgram, times: int = 1) -> None:
        """Adds the flops, transfers and kernels of a body that runs `times` times; of branches, the largest."""
        for key, found in (item for body in bodies for item in body.kernels.items()):
            self.kernels.setdefault(key, []).extend(found)
        self.flops += times * max(body.flops for body in bodies)
        busiest = max(bodies, key=lambda body: sum(x.times * x.num_bytes for x in body.transfers))
        self.transfers += [dataclasses.replace(x, times=times * x.times) for x in busiest.transfers]


def _as_large(x: BufferValue) -> list[BufferValue]:
    """Returns the values that a fused value is computed from, but for smaller ones."""
    return [y for y in x.sources if y.num_bytes >= x.num_bytes]


def bytes_of(aval: jax.core.AbstractValue) -> int:
    """Returns the bytes on the device of an array of this type; 0 if it is on the host, or not an array."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return 0
    return array_bytes(math.prod(aval.shape), aval.dtype)


def size_of(aval: jax.core.AbstractValue) -> int:
    """Returns the number of elements of an array of this type; 0 if it is none."""
    return math.prod(getattr(aval, "shape", (0,)))


def split_bytes(aval: jax.core.AbstractValue, inputs: Iterable[BufferValue], length: int = 1) -> tuple[int, int]:
    """Returns a value's bytes on one device, and the number of devices that it is split among, judging by `inputs`.

    One that stacks the results of so many iterations is judged by a single one.
    """
    num_bytes = bytes_of(aval)
    least = num_bytes / max(1, length) / 8
    parts = max((x.parts for x in inputs if x.parts > 1 and x.num_bytes * x.parts >= least), default=1)
    return num_bytes // parts, parts
