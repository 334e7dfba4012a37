"""Models a traced step as buffers and operations: their memory, order and cost.

[Note: How memory is estimated]
A step's jaxpr lists the values; XLA decides which of them take memory. The model relies on a few habits that its
compilers for GPUs and TPUs share:

* XLA fuses elementwise operations, casts, broadcasts and slices into their readers, so they take no memory. The
  readers then read the inputs of the fused operations, which therefore live longer. XLA writes such a result only if
  an operation that cannot be fused reads it: a product, but for one on a TPU, a collective, a loop.
* The result of an elementwise operation takes over the memory of an input of equal size that is not read later. On GPUs
  not if it also reads sums or maxima of that input, as a softmax and its gradient do: one fusion makes them, too, so it
  reads a row twice. With rows of 4,096 that is a quarter of a step.
* A loop's carried values and stacked outputs exist once, outside its body. A donated argument and the result that
  replaces it share their memory.
* Operations run in the order of the program, with exceptions. Operations that make gradients run late on GPUs, and in
  loops on TPUs, too, see [Note: Postponed gradients]. Gradients that are reduced before a backward loop which reduces
  others count until after it: without this rule, the estimate for 1.4B at stage 3 on GPUs is 7 % below the compiler's
  figure, with it 2 %. GPUs reduce the gradients of one of its iterations during the next. On TPUs, a loop of the
  forward pass runs last if the backward pass needs nothing of it, such as one over recomputed parts of a loss.
* On GPUs, each reader recomputes a concatenation, and an elementwise result that a product needs in another layout. A
  fusion that sums an expensive value also writes that value if others read it, already in the forward pass if it sums
  it there and it is larger than what it is made of. What makes it expensive, as a GELU's `tanh`, is written where it is
  first computed, in the forward pass or, if the sum is divided, by another kernel. So is a recomputed block's input.
* What several read is written, too, if it is made of slices of slices of fused values, as in an associative scan.
* On GPUs, parameters gathered after the update exist twice until the end, since a collective does not write into a
  donated argument. If that would exceed the scheduler's limit, they are gathered one by one. Rows of stacks exist
  once: each is written into the stack's argument.

Left out: workspaces of kernels, tiles and alignment, fragmentation, other copies into other layouts, gathering ahead,
`unroll` of loops, and arrays that the loss closes over. Of mesh axes other than ZeRO's, collectives of the loss's own
`shard_map` count, but not those that the compiler adds; activations count as split where a constraint cuts them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.engine.placed import PLACED, collectives_of, gather_p, named_p, operations_of, unreduced_p
from jzero.core.jaxpr.equations import find_needed
from jzero.core.jaxpr.interpret import Piece, propagate
from jzero.core.jaxpr.kernels import KERNELS, kernel_flops, kernel_name
from jzero.core.jaxpr.primitives import REMAT, RUNS, Trait, called_jaxpr, primitives_with
from jzero.core.jaxpr.repeats import dims_are_adjacent, takes_one_lane
from jzero.core.jaxpr.sizes import product_flops
from jzero.estimate.buffers import (
    COSTLY,
    MOST_SLICES,
    SLICES,
    UNDIVIDED,
    UPDATE,
    Buffer,
    BufferKind,
    BufferOperation,
    BufferValue,
    Product,
    TracedProgram,
    Transfer,
    bytes_of,
    size_of,
    split_bytes,
)

FUSIBLE = primitives_with(Trait.ELEMENTWISE | Trait.LAYOUT | Trait.RANDOM) | {"device_put"}
REDUCTIONS = primitives_with(Trait.REDUCTION) | {"gather"}
"""Operations that elementwise operations are fused into, but not through."""
ALIASES = primitives_with(Trait.ALIAS) | {named_p.name, unreduced_p.name}
TRANSFERS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def trace_program(jaxpr: AnyJaxpr, parts: Sequence[int], *, fuses_products: bool = False) -> TracedProgram:
    """Returns the buffers and operations of a program; see [Note: How memory is estimated].

    Args:
      jaxpr: The whole program's jaxpr, such as `jax.jit(...).trace(...).jaxpr`.
      parts: For each input, the number of devices that it is split among.
      fuses_products: Whether the compiler does, see `PlatformFacts`.
    """
    program = TracedProgram(fuses_products=fuses_products)
    opened, _ = compat.open_jaxpr(jaxpr)
    inputs = [program.argument(v.aval, n) for v, n in zip(opened.invars, parts, strict=True)]
    outputs = _run(program, jaxpr, inputs, "", backward=False)
    program.settle()
    results = {x.buffer for x in outputs if x.buffer is not None}
    program.regathered = frozenset(i for i in program.reads(outputs) if program.buffers[i].kind == "gathered")
    for i in results - program.regathered:  # a result takes over the memory of the argument that it replaces
        program.buffers[i].num_bytes = 0
    program.result_bytes = program.bytes_to_store(outputs)
    return program


def trace_alone(jaxpr: AnyJaxpr) -> TracedProgram:
    """Returns a program as if one device had all of its inputs: its collectives and kernels are the same."""
    return trace_program(jaxpr, [1] * len(compat.open_jaxpr(jaxpr)[0].invars))


def _run(
    program: TracedProgram,
    jaxpr: AnyJaxpr,
    inputs: Sequence[BufferValue],
    name: str,
    *,
    backward: bool,
    used: Sequence[bool] | None = None,
) -> list[BufferValue]:
    """Adds the equations that the used outputs of a jaxpr need. Returns its outputs; unused ones have no buffer."""
    jaxpr, values = compat.open_jaxpr(jaxpr)
    used = used or [True] * len(jaxpr.outvars)
    outvars = [v for v, is_used in zip(jaxpr.outvars, used, strict=True) if is_used]
    equations, variables = find_needed(jaxpr, outvars)
    eqns = [eqn for eqn, _ in equations]
    uses = collections.Counter(v for eqn in eqns for v in {v for v in eqn.invars if not compat.is_literal(v)})

    def apply(eqn: JaxprEqn, values: list[BufferValue]) -> list[BufferValue]:
        stack = str(eqn.source_info.name_stack)
        path = "/".join(filter(None, [name, stack]))
        is_read, is_shared = [v in variables for v in eqn.outvars], [uses[v] > 1 for v in eqn.outvars]
        return _Visitor(program, eqn, is_read, is_shared, path, backward or "transpose(" in stack)(values)

    known = itertools.chain((None if isinstance(x, jax.core.Tracer) else x for x in values), itertools.repeat(None))
    constants = [program.argument(v.aval, constant=x) for v, x in zip(jaxpr.constvars, known, strict=False)]
    piece = Piece(jaxpr.invars, outvars, eqns, jaxpr.constvars)
    outputs = iter(propagate(piece, [*constants, *inputs], apply, _of_literal))
    return [
        next(outputs) if is_used else BufferValue(bytes_of(v.aval))
        for v, is_used in zip(jaxpr.outvars, used, strict=True)
    ]


@dataclasses.dataclass
class _Visitor:
    """Adds one equation to a program."""

    program: TracedProgram
    eqn: JaxprEqn
    used: list[bool]
    is_shared: list[bool]
    name: str
    backward: bool

    def __call__(self, inputs: list[BufferValue]) -> list[BufferValue]:
        kind = self.eqn.primitive.name
        if kind in ALIASES:
            return [self._reshard(inputs[0]) if kind == "sharding_constraint" else inputs[0]]
        if self.eqn.primitive in PLACED:
            return self._placed(inputs)
        if kind == "optimization_barrier":
            return self._barrier(inputs)
        if kind in RUNS:
            if kind in REMAT and self.eqn.params["differentiated"] and self.eqn.params["prevent_cse"]:
                inputs = self._barrier(inputs)  # jax lowers it so
            return _run(self.program, called_jaxpr(self.eqn), inputs, self.name, backward=self.backward, used=self.used)
        if kind == "shard_map":
            return self._shard_map(inputs)
        is_statistic = kind == "slice" and takes_one_lane(compat.type_of(self.eqn.invars[0]).shape, self.eqn.params)
        is_dilation = kind == "pad" and any(inner for _, _, inner in self.eqn.params["padding_config"])
        if kind in FUSIBLE and not is_statistic and not (is_dilation and self.program.fuses_products):
            return self._fused(inputs)
        if kind == "scan":
            return self._scan(inputs)
        if kind in REDUCTIONS:
            return self._reduction(inputs)
        return self._opaque(inputs)

    def _fused(self, inputs: list[BufferValue]) -> list[BufferValue]:
        kind = self.eqn.primitive.name
        fused = [x for x in inputs if not self.program.is_written(x)]
        is_costly = kind in COSTLY or any(x.is_costly for x in fused)
        slices = max((x.slices for x in fused), default=0) + (kind == "slice" and any(x.is_shared for x in fused))
        name, sources, constant = f"{self.name}:{kind}", tuple(inputs), _constant(self.eqn, inputs)
        values = [
            BufferValue(num_bytes, name, parts, None, sources, shared, is_costly, constant, slices)
            for (num_bytes, parts), shared in zip(
                (split_bytes(v.aval, inputs) for v in self.eqn.outvars), self.is_shared, strict=True
            )
        ]
        is_repeated = slices > MOST_SLICES and kind != "slice"
        return [self._write(x) if is_repeated and x.is_shared else x for x in values]

    def _reduction(self, inputs: list[BufferValue]) -> list[BufferValue]:
        axes, last = self.eqn.params.get("axes", ()), compat.type_of(self.eqn.invars[0]).ndim - 1
        divides = axes and last not in axes and self._row() > UNDIVIDED and not self.program.fuses_products
        unread = self.program.write_beside(inputs, divides=bool(divides)) if self.backward else 0
        outputs = self._operation(inputs, inputs)
        self.program.operations[-1].num_bytes -= unread
        return outputs

    def _row(self) -> int:
        return size_of(self.eqn.invars[0].aval) // max(1, size_of(self.eqn.outvars[0].aval))

    def _placed(self, inputs: list[BufferValue]) -> list[BufferValue]:
        """Adds the operations of a placed equation, with the transfers that its `Route` names."""
        before, barriers = len(self.program.transfers), list(self.program.barriers)
        outputs = _run(self.program, operations_of(self.eqn), inputs, self.name, backward=self.backward, used=self.used)
        if self.eqn.params.get("how") != "select":  # it delays a gather, not a gradient
            self.program.barriers = barriers
        of_param = self.eqn.primitive is gather_p
        self.program.transfers[before:] = [
            Transfer(x.kind, x.num_bytes, x.num_elements, x.axes, of_param=of_param, scope=self.name)
            for x in collectives_of(self.eqn)
        ]
        return outputs

    def _barrier(self, inputs: list[BufferValue]) -> list[BufferValue]:
        """Adds a barrier, which needs all its inputs as arrays."""
        start, waits = len(self.program.operations), len(self.program.reads(inputs)) > 1
        values = [self.program.write(x, backward=self.backward, waits=True) for x in inputs]
        written = range(start, len(self.program.operations))
        if waits:
            self.program.barriers.append(written)
        else:  # it only makes a cast round
            for t in written:
                self.program.operations[t].may_wait = True
        return values

    def _write(self, x: BufferValue) -> BufferValue:
        return self.program.write(x, backward=self.backward)

    def _reshard(self, x: BufferValue) -> BufferValue:
        """Adds the all-gather of a value that a sharding constraint splits less than before, outside `shard_map`."""
        sharding = self.eqn.params["sharding"]
        names = jax.tree.leaves(tuple(getattr(sharding, "spec", ())))
        names = [n for n in names if isinstance(n, str)]
        parts = math.prod(int(sharding.mesh.shape[n]) for n in names)
        full_bytes = x.num_bytes * x.parts
        if parts >= x.parts:
            return dataclasses.replace(x, parts=parts, num_bytes=full_bytes // parts)
        axes = tuple(str(n) for n in sharding.mesh.shape if n not in names)
        size = size_of(self.eqn.outvars[0].aval) // parts
        self.program.transfers.append(Transfer("all-gather", full_bytes // parts, size, axes, scope=self.name))
        shard, x = self._write(x), dataclasses.replace(x, parts=parts)
        return self._operation([x], [shard], kind="gathered", moves=True)[0]

    def _shard_map(self, inputs: list[BufferValue]) -> list[BufferValue]:
        jaxpr = next(compat.contained_jaxprs(self.eqn))
        local = [dataclasses.replace(x, parts=1) for x in inputs]
        outputs = _run(self.program, jaxpr, local, self.name, backward=self.backward, used=self.used)
        results = []
        for v, inner, x in zip(self.eqn.outvars, jaxpr.outvars, outputs, strict=True):
            for i in self.program.reads([x]) if compat.type_of(v).ndim else ():
                if self.program.buffers[i].kind == "working":
                    self.program.buffers[i].kind = "gradients"
            results.append(dataclasses.replace(x, parts=max(1, bytes_of(v.aval) // max(1, bytes_of(inner.aval)))))
        return results

    def _scan(self, inputs: list[BufferValue]) -> list[BufferValue]:
        num_consts, num_carry = compat.scan_groups(self.eqn)
        jaxpr, _ = compat.open_jaxpr(self.eqn.params["jaxpr"])
        length, num_outside = int(self.eqn.params["length"]), num_consts + num_carry
        body = TracedProgram(fuses_products=self.program.fuses_products)
        constants = [*(x.constant for x in inputs[:num_consts]), *[None] * num_carry]
        outside = zip(jaxpr.invars[:num_outside], constants, strict=True)
        arguments = [body.argument(v.aval, constant=x) for v, x in outside]
        # Slices are read inside their stack, unless an operation needs one as an array of its own.
        arguments += [
            BufferValue(bytes_of(v.aval), f"{self.name}:slice", sources=(body.argument(v.aval),))
            for v in jaxpr.invars[num_outside:]
        ]
        outputs = _run(body, jaxpr, arguments, self.name, backward=self.backward)
        self.program.include(body.finish(outputs, num_carry=num_carry), times=length)
        kind: BufferKind = "gradients" if self.backward else "working"
        # The compiler drops inputs that the body does not read.
        read = body.outputs.union(*(op.reads for op in body.operations))
        arrays = [self._write(x) for x, inside in zip(inputs, arguments, strict=True) if body.reads([inside]) & read]
        results = self._operation(inputs, arrays, in_place=True, inner=body, kind=kind)
        self.program.operations[-1].times = length
        for i, inside in enumerate(outputs[num_carry:], num_carry):
            number = results[i].buffer
            assert number is not None
            buffer = self.program.buffers[number]
            buffer.num_bytes, parts = split_bytes(self.eqn.outvars[i].aval, inputs, length)  # one iteration's decides
            buffer.times, buffer.name = length, inside.name or f"{self.name}:carried"
            results[i] = dataclasses.replace(results[i], num_bytes=buffer.num_bytes, parts=parts)
        return results

    def _opaque(self, inputs: list[BufferValue]) -> list[BufferValue]:
        """Adds an operation that needs its inputs as arrays: a product, collective, loop or kernel."""
        kind = self.eqn.primitive.name
        operands = inputs[1:] if kind == "cond" else []
        bodies = [self._body(jaxpr, operands) for jaxpr in compat.contained_jaxprs(self.eqn)]
        largest = max(bodies, key=lambda body: sum(x.num_bytes for x in body.buffers), default=None)
        if bodies:
            self.program.include(*bodies)
        in_order = dims_are_adjacent(self.eqn) or [True] * len(inputs)
        arrays = [
            x
            if kind == "dot_general" and self.program.fuses_products
            else self.program.write(x, backward=self.backward, keep=keep)
            for x, keep in zip(inputs, in_order, strict=True)
        ]
        if kind in TRANSFERS:
            axes = self.eqn.params.get("axis_name", self.eqn.params.get("axes", ()))
            axes = tuple(str(a) for a in (axes if isinstance(axes, tuple | list) else (axes,)))
            for x, source, v in zip(inputs, self.eqn.invars, self.eqn.outvars, strict=False):
                num_bytes, num_elements = max(x.num_bytes, bytes_of(v.aval)), max(size_of(source.aval), size_of(v.aval))
                transfer = Transfer(TRANSFERS[kind], num_bytes, num_elements, axes, scope=self.name)
                self.program.transfers.append(transfer)
        purpose: BufferKind = "gathered" if kind.startswith("all_gather") else "working"
        in_place, moves = kind in primitives_with(Trait.IN_PLACE), kind in TRANSFERS
        written = self._operation(inputs, arrays, in_place=in_place, inner=largest, kind=purpose, moves=moves)
        self.program.operations[-1].branches = tuple(bodies if kind == "cond" and UPDATE not in self.name else ())
        if kind == "dynamic_update_slice" and not self._size_of(inputs[0]):  # into a donated argument
            self.program.buffers[written[0].buffer or 0].num_bytes = 0
        return written

    def _size_of(self, x: BufferValue) -> int:
        """Returns the bytes that a value takes: none if it is part of an argument."""
        return x.num_bytes if x.buffer is None else self.program.buffers[x.buffer].num_bytes

    def _body(self, jaxpr: Jaxpr, operands: Sequence[BufferValue]) -> TracedProgram:
        """Returns the program of a body; only a branch has the equation's operands as they are."""
        body = TracedProgram(fuses_products=self.program.fuses_products)
        parts = [x.parts for x in operands] or [1] * len(jaxpr.invars)
        inputs = [body.argument(v.aval, n) for v, n in zip(jaxpr.invars, parts, strict=True)]
        return body.finish(_run(body, jaxpr, inputs, self.name, backward=self.backward))

    def _operation(
        self,
        inputs: Sequence[BufferValue],
        read: Sequence[BufferValue],
        *,
        in_place: bool = False,
        inner: TracedProgram | None = None,
        kind: BufferKind = "working",
        moves: bool = False,
    ) -> list[BufferValue]:
        """Adds the operation, which reads `read` and writes all its outputs."""
        name = f"{self.name}:{self.eqn.primitive.name}"
        values, first = [], len(self.program.buffers)
        for i, v in enumerate(self.eqn.outvars):
            num_bytes, parts = split_bytes(v.aval, inputs)
            self.program.buffers.append(Buffer(num_bytes, name, kind=kind))
            values.append(BufferValue(num_bytes, name, parts, buffer=first + i))
        writes = tuple(range(first, len(self.program.buffers)))
        gathers = moves and kind == "gathered"
        is_reduction = self.eqn.primitive.name in REDUCTIONS and not self.program.is_written(inputs[0])
        may_wait = product_flops(self.eqn) > 0 or (moves and not gathers) or is_reduction
        may_wait &= "rematted_computation" not in self.name  # what is recomputed stays in its block
        reduces = self.eqn.primitive.name in primitives_with(Trait.REDUCTION)
        is_row = reduces and inputs[0].is_costly and self.program.is_written(inputs[0])
        product = _product(self.program, self.eqn, inputs)
        self.program.flops += 0.0 if product is None else product.flops
        operation = BufferOperation(
            writes=writes,
            backward=self.backward,
            in_place=in_place,
            inner=inner,
            is_transfer=moves,
            gathers=gathers,
            may_wait=may_wait,
            num_bytes=0 if inner is not None or moves else self._bytes_moved(inputs, read, values),
            product=product,
            reduces=reduces,
            row=self._row() if is_row else 1,
        )
        self.program.add(operation, read)
        return values

    def _bytes_moved(
        self, inputs: Sequence[BufferValue], read: Sequence[BufferValue], outputs: Sequence[BufferValue]
    ) -> int:
        """Returns the bytes of device memory that an operation reads and writes."""
        kind = self.eqn.primitive.name
        if kind == "dynamic_update_slice":
            return 2 * inputs[1].num_bytes
        if kind.startswith("scatter"):
            return inputs[1].num_bytes + 2 * inputs[2].num_bytes
        written = sum(x.num_bytes for x in outputs)
        return 2 * written if kind in SLICES else self.program.bytes_read(read) + written


def _of_literal(literal: Literal) -> BufferValue:
    return BufferValue(bytes_of(literal.aval), constant=compat.value_of(literal))


def _constant(eqn: JaxprEqn, inputs: Sequence[BufferValue]) -> Any:
    """Returns the value of a whole number, or of a part of a constant, on the first device; `None` if it is unknown."""
    if eqn.primitive.name == "axis_index":
        return np.zeros((), np.int32)
    (result, *others), known = (compat.type_of(v) for v in eqn.outvars), [x.constant for x in inputs]
    is_read = result.shape == () or eqn.primitive.name == "dynamic_slice"
    is_read &= jnp.issubdtype(result.dtype, jnp.integer) or result.dtype == jnp.bool_  # as kernels count blocks
    if others or not known or any(x is None for x in known) or not is_read:
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(compat.bind(eqn, known)[0])


def _product(program: TracedProgram, eqn: JaxprEqn, inputs: Sequence[BufferValue]) -> Product | None:
    """Returns the arithmetic of an equation, `None` if it has none or it is unknown; notes that of kernels."""
    highest = jax.lax.Precision.HIGHEST in jax.tree.leaves([eqn.params.get("precision")])
    if eqn.primitive.name not in KERNELS:
        flops = product_flops(eqn)
        return Product(flops, compat.type_of(eqn.invars[0]).dtype, highest) if flops else None
    flops_of_kernel, types = kernel_flops(eqn, [x.constant for x in inputs]), [compat.type_of(v) for v in eqn.invars]
    dtype = max(types, key=lambda x: (jnp.issubdtype(x.dtype, jnp.floating), math.prod(x.shape))).dtype
    product = None if flops_of_kernel is None else Product(flops_of_kernel, dtype, highest)
    key = kernel_name(eqn), sum(size_of(v.aval) for v in eqn.outvars)
    program.kernels.setdefault(key, []).append(product)
    return product
