"""The time of one instruction on a machine: the longer of its arithmetic and its memory traffic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jzero.analysis.collectives import CompiledCollective
from jzero.analysis.hlo import Computation, HloArray, HloProgram, Instruction
from jzero.estimate.buffers import KernelKey, Product
from jzero.machines.machine import Machine, rate_of

FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast opt-barrier after-all partition-id replica-id domain "
    "add-dependency while conditional call".split()
)
_BOOKKEEPING = (
    "AllocateBuffer",
    "AsyncCollective",
    "ConcatBitcast",
    "AssumeGatherIndicesInBound",
    "GatherScatterIndices",
    "Sharding",
)
Kernels: TypeAlias = Mapping[KernelKey, Sequence[Product | None]]
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def compute_seconds(program: HloProgram, computation: Computation, instruction: Instruction, machine: Machine) -> float:
    """Returns the seconds that an instruction keeps a device busy, without loops and calls."""
    if instruction.opcode in FREE or instruction.target.startswith(_BOOKKEEPING):
        return 0.0
    arithmetic = sum(flops / rate_of(machine, dtype, highest) for flops, dtype, highest in
                     flops_of(program, computation, instruction))  # fmt: skip
    return max(arithmetic, _bytes(program, computation, instruction) / machine.hbm_bytes_per_s)


def collective_seconds(collective: CompiledCollective, machine: Machine) -> float:
    """Returns the seconds of a collective: on the links within a node, or on its network ports if these are slower."""
    seconds = collective.sent_bytes / machine.intra_link_bytes_per_s
    if machine.inter_link_bytes_per_s is None:
        return seconds
    return max(seconds, collective.nic_bytes(machine.devices_per_node) / machine.inter_link_bytes_per_s)


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction is a kernel whose arithmetic HLO does not show, such as one of Pallas."""
    if instruction.opcode != "custom-call" or instruction.target.startswith(_BOOKKEEPING):
        return False
    return not any(x in instruction.target for x in ("gemm", "matmul", "cudnn$conv")) and not instruction.called


def kernel_of(instruction: Instruction, kernels: Kernels) -> Product | None:
    """Returns the arithmetic of a kernel, which has its name in that of the operation; `None` if it is unknown.

    Of several that look alike, such as those of the early and the late tokens of a row, it is the mean.
    """
    names, sizes = instruction.op_name.split("/"), {sum(x.size for x in instruction.results)}
    sizes |= {x.size for x in instruction.results}  # beside a workspace, cuDNN's
    keys = [(name, size) for name in reversed(names) for size in sizes if (name, size) in kernels]
    found = [x for x in kernels[keys[0]] if x is not None] if keys else []
    if not found or len(found) < len(kernels[keys[0]]):
        return None
    return found[0]._replace(flops=sum(x.flops for x in found) / len(found))


def flops_of(program: HloProgram, computation: Computation, x: Instruction) -> Iterator[tuple[float, str, bool]]:
    """Yields the operations of each product in an instruction, its dtype, and whether it asks for full precision."""
    highest = "operand_precision={highest" in x.attributes
    if x.opcode == "dot" or "gemm" in x.target or "matmul" in x.target:
        lhs = computation.arrays(x.operands[0])
        out = max(x.results, key=lambda array: array.size)
        if lhs:
            dims = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', x.attributes)
            contracted = [int(d) for d in re.findall(r"\d+", dims.group(1))] if dims else []
            yield 2.0 * out.size * math.prod(lhs[0].shape[d] for d in contracted), lhs[0].dtype, highest
    elif x.opcode == "convolution" or "cudnn$conv" in x.target:
        yield _convolution_flops(computation, x), computation.arrays(x.operands[0])[0].dtype, highest
    elif x.opcode.startswith(("fusion", "async")):
        for called in program.called_computations(x):
            for inner in called.instructions:
                yield from flops_of(program, called, inner)


def _convolution_flops(computation: Computation, x: Instruction) -> float:
    """Counts as XLA does, without products with padding or between dilated elements."""
    labels = _LABELS.search(x.attributes)
    lhs, rhs = (computation.arrays(name) for name in x.operands[:2])
    if labels is None or not lhs or not rhs:
        return 0.0
    ins, kernel, outs = labels.groups()
    out = max(x.results, key=lambda array: array.size)
    if "BackwardInput" in x.target:  # these two have the labels and the window of the forward pass
        lhs, out = (out,), lhs[0]
    elif "BackwardFilter" in x.target:
        rhs, out = (out,), rhs[0]
    window = dict(re.findall(r"(\w+)=([\w\-]+)", match.group(1))) if (match := _WINDOW.search(x.attributes)) else {}
    groups = re.search(r"batch_group_count=(\d+)", x.attributes)
    flops = 2.0 * out.shape[outs.index("f")] * rhs[0].shape[kernel.index("i")]
    flops *= lhs[0].shape[ins.index("b")] / (int(groups.group(1)) if groups else 1)
    for d in range(len(ins) - 2):
        sizes = [shape[names.index(str(d))] for shape, names in
                 ((lhs[0].shape, ins), (rhs[0].shape, kernel), (out.shape, outs))]  # fmt: skip
        flops *= _valid_positions(window, d, *sizes)
    return flops


def _valid_positions(window: dict[str, str], d: int, size: int, kernel: int, out: int) -> int:
    """Pairs of an output and a kernel position that meet an element of the input."""

    def number(key: str, default: str) -> str:
        return window[key].split("x")[d] if key in window else default

    stride, dilate, spread = (int(number(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(number("pad", "0_0").split("_")[0])
    last = (size - 1) * dilate
    places = (i * stride + k * spread - low for i in range(out) for k in range(kernel))
    return sum(0 <= place <= last and place % dilate == 0 for place in places)


def _bytes(program: HloProgram, computation: Computation, x: Instruction) -> float:
    """Bytes to and from main memory; what is in faster memory (`S(1)`) is free."""
    read = [_in_memory(computation.arrays(name)) for name in x.operands]
    written = _in_memory(x.results)
    base = x.opcode.removesuffix("-start")
    if base in ("dynamic-slice", "slice", "gather"):
        return 2.0 * written
    if base == "dynamic-update-slice":
        return 2.0 * read[1]
    if base == "scatter":
        return float(sum(read[len(read) // 3 :]) + read[-1])
    if base == "copy":
        return float(sum(read) + (read[0] if x.opcode.endswith("-start") else written))
    called = next(program.called_computations(x), None) if base == "fusion" else None
    if called is None:
        return float(sum(read) + written)
    return float(
        sum(_bytes_read(program, called, i, size) for i, size in enumerate(read)) + _bytes_written(program, called, x)
    )


def _in_memory(arrays: Sequence[HloArray]) -> int:
    return sum(x.num_bytes for x in arrays if not x.memory_space)


def _bytes_read(program: HloProgram, called: Computation, index: int, size: int) -> int:
    """Bytes that a fusion reads of one parameter; only the slices if it, or a fusion in it, only slices it."""
    parameter = next((x for x in called.instructions if x.opcode == "parameter" and x.operands == (str(index),)), None)
    if parameter is None or not size:
        return size
    pending, sliced = [parameter.name], 0
    while pending:
        name = pending.pop()
        for user in called.instructions:
            if name not in user.operands:
                continue
            if user.opcode in ("bitcast", "reshape"):
                pending.append(user.name)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                sliced += user.results[0].num_bytes
            elif user.opcode == "fusion" and (inner := next(program.called_computations(user), None)) is not None:
                sliced += sum(_bytes_read(program, inner, i, size) for i, x in enumerate(user.operands) if x == name)
            elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name):
                return size
    return min(size, sliced)


def _bytes_written(program: HloProgram, called: Computation, x: Instruction) -> int:
    """Bytes that a fusion writes; only the update if it, or a fusion in it, updates an array in place."""
    root = called.root
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0
    for name in outputs:
        source = called.by_name.get(name)
        while source is not None and source.opcode in ("bitcast", "reshape"):
            source = called.by_name.get(source.operands[0])
        if source is not None and source.opcode == "dynamic-update-slice":
            total += sum(array.num_bytes for array in called.arrays(source.operands[1]))
        elif (
            source is not None
            and source.opcode == "fusion"
            and (inner := next(program.called_computations(source), None)) is not None
        ):
            total += _bytes_written(program, inner, source)
        else:
            total += sum(array.num_bytes for array in called.arrays(name) if not array.memory_space)
    if all(array.memory_space for array in x.results):
        return 0
    return total
