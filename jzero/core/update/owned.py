"""Computes the matrix work of an update, each matrix on one device.

[Note: Matrices on one device each]
Elementwise updates run on each device's part without communication, and reductions (norms, Adafactor's means) cost a
number or a vector. Products, such as those of Muon's Newton-Schulz iteration, need whole matrices. If all devices
gathered them, all would compute the same; GSPMD would communicate in every product. So jzero finds the matrix work in
the update's jaxpr (`jzero.core.jaxpr.regions`) and divides it into units: the work of one parameter, or of one slice of
a stack of layers. Each unit runs on one device, for any unmodified optax optimizer.

Units of one kind do the same on equal shapes. With N devices and k units of a kind, each device computes k // N of
them in rounds, with one program. The rest of all kinds goes to the devices with the least work, largest first, in
batches of one unit per device, where each device branches to the kind that it computes. Devices exchange shards for
units, and results for shards, so each sends and receives 1/N of what a gather brings, twice:

    k shards [D/N, F]  --all_to_all-->  k/N matrices [D, F]  -- update -->  [D, F]  --all_to_all-->  k shards [D/N, F]

State of a stack that is cut across its slices, such as SOAP's bases [L, D, D] if N divides L, stays: device d computes
the slices that it has. Replicas each do their own work, so nothing crosses their slow links; between the nodes of two
levels, an exchange sends less than a gather would. What cannot be divided runs on all devices, over whole operands, and
the plan says why: a product of several parameters, a leaf that other mesh axes shard.

Arrays are one row, or one row per device, [N, ...]; a buffer has the rows side by side, [N, size]:

    f32[8, 5, 3], bf16[8, 7], f32[8, 2]    is    {"float32": [8, 17], "bfloat16": [8, 7]}
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

from jzero.core.base import compat
from jzero.core.base.types import DType, PyTree
from jzero.core.jaxpr.interpret import evaluate
from jzero.core.jaxpr.sizes import factorizes
from jzero.core.layout.cut import Cut
from jzero.core.layout.mesh import batch_axes, shard_axes
from jzero.core.plan.matrices import Port, Work, schedule_of
from jzero.core.plan.plan import ZeroPlan

AT_ONCE = 2**24
"""Elements of equal matrices that a device computes at once."""

Nested: TypeAlias = Sequence[Sequence[Sequence[jax.Array]]]  # arrays by group, work and operand
Rows: TypeAlias = Sequence[Sequence[jax.Array]]  # of the units of each group, by operand
UnitBatch: TypeAlias = Sequence[tuple[int, int] | None]  # for each device, group and number of its unit
UnitBatches: TypeAlias = Sequence[UnitBatch]
Unit: TypeAlias = Callable[..., list[jax.Array]]  # of operands, and of the number of a unit in its group
Swap: TypeAlias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """The works of one kind.

    Attributes:
      works: The works; what they share may differ from work to work, but not its shape.
      rounds: The number of units that every device computes.
    """

    works: Sequence[Work]
    rounds: int

    @property
    def inputs(self) -> tuple[Port, ...]:
        """How operands travel."""
        return self.works[0].inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """How results travel."""
        return self.works[0].outputs

    def rows(self, operands: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Returns this device's shard of each unit, for each operand. Per work [L, D/N, F] -> [count, 1, D/N, F]."""

        def of_units(x: jax.Array, port: Port) -> jax.Array:
            shape = port.shape if port.unit is None else port.unit.shard_shape
            return jnp.moveaxis(x, port.dims, range(len(port.dims))).reshape(-1, *shape)

        columns = zip(*operands, strict=True)
        return [
            jnp.concatenate([of_units(x, port) for x in column])
            for column, port in zip(columns, self.inputs, strict=True)
        ]

    def shards(self, rows: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Returns this device's shard of each work's results. [count, 1, D/N, F] -> per work [L, D/N, F]."""

        def of_leaf(x: jax.Array, port: Port) -> jax.Array:
            shape = list(port.cut.shard_shape)
            order = [*port.dims, *(d for d in range(len(shape)) if d not in port.dims)]
            return x.reshape([shape[d] for d in order]).transpose(np.argsort(order))

        ends = list(itertools.accumulate(w.count for w in self.works))
        parts = [jnp.split(x, ends[:-1]) for x in rows]
        return [list(map(of_leaf, x, self.outputs)) for x in zip(*parts, strict=True)]

    def unit(self, shared: Sequence[Sequence[jax.Array]]) -> Callable[..., list[jax.Array]]:
        """Returns the function of one unit: from operands, and its number in the group, to results.

        Args:
          shared: The shared values of each work.
        """
        work_of = np.repeat(np.arange(len(self.works)), [w.count for w in self.works])  # [count]
        slices = np.concatenate([w.numbers() for w in self.works])  # [count, number of sliced dimensions]
        columns = list(zip(*(w.region.shared for w in self.works), strict=True))
        same = [all(v is variables[0] for v in variables) for variables in columns]
        tables = [x[0] if s else jnp.stack(x) for x, s in zip(zip(*shared, strict=True), same, strict=True)]

        def run(operands: Sequence[jax.Array], number: jax.Array) -> list[jax.Array]:
            values = [x if s else x[jnp.asarray(work_of)[number]] for x, s in zip(tables, same, strict=True)]
            numbers = list(jnp.asarray(slices)[number])
            return evaluate(self.works[0].jaxpr, [*operands, *values, *numbers], compat.bind)

        return run


def compute_owned(plan: ZeroPlan, works: Sequence[Work], read: Callable[[Var], jax.Array]) -> dict[Var, jax.Array]:
    """Computes independent matrix work, each matrix on one device; call it inside `jit`.

    Args:
      plan: The plan.
      works: Works of one level.
      read: Returns the value of a variable of the update, in natural shape.

    Returns:
      The value of each output, in natural shape, laid out like the leaf of its shape.
    """
    grouped, schedule = schedule_of(works, plan.num_shards)
    groups = list(map(_Group, grouped, schedule.rounds))

    def spec(port: Port) -> PartitionSpec:
        return port.cut.spec(PartitionSpec(), shard_axes(plan.config))

    def placed(v: Var, port: Port) -> jax.Array:
        stored = port.cut.to_stored(read(v).reshape(port.leaf.shape))
        return lax.with_sharding_constraint(stored, NamedSharding(plan.mesh, spec(port)))

    def natural(y: jax.Array, v: Var, port: Port) -> jax.Array:
        x = port.cut.to_natural(y).reshape(compat.type_of(v).shape)
        # A flattened leaf has no natural dimension to cut: the compiler chooses its layout.
        is_free = not x.ndim or (port.leaf.cut is not None and port.leaf.cut.flat)
        return x if is_free else lax.with_sharding_constraint(x, port.leaf.device_sharding)

    fn = jax.shard_map(
        functools.partial(_exchange_and_compute, plan, groups, schedule.per_device_batches),
        mesh=plan.mesh,
        in_specs=([[list(map(spec, w.inputs)) for w in g.works] for g in groups], PartitionSpec()),
        out_specs=[[list(map(spec, w.outputs)) for w in g.works] for g in groups],
        axis_names=set(batch_axes(plan.config)),
        check_vma=False,
    )
    operands = [[list(map(placed, w.region.inputs, w.inputs)) for w in g.works] for g in groups]
    with jax.named_scope("zero_matrices"):
        results = fn(operands, [[list(map(read, w.region.shared)) for w in g.works] for g in groups])
    arrays = [y for of_group in results for of_work in of_group for y in of_work]
    ends = [x for g in groups for w in g.works for x in zip(w.region.outputs, w.outputs, strict=True)]
    return {v: natural(y, v, port) for (v, port), y in zip(ends, arrays, strict=True)}


def _exchange_and_compute(
    plan: ZeroPlan, groups: Sequence[_Group], batches: UnitBatches, operands: Nested, shared: Nested
) -> list[list[list[jax.Array]]]:
    """Computes all works, from shards of their operands to shards of their results."""
    axes = shard_axes(plan.config)
    me = lax.axis_index(axes if len(axes) > 1 else axes[0])

    def swap(x: jax.Array) -> jax.Array:  # [N, ...]: row d goes to device d
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    rows = [group.rows(x) for group, x in zip(groups, operands, strict=True)]
    units = [group.unit(x) for group, x in zip(groups, shared, strict=True)]
    done = [_in_rounds(*x, me, swap) for x in zip(groups, rows, units, strict=True)]
    for (g, _), results in sorted(_in_batches(groups, batches, rows, units, me, swap).items(), key=lambda x: x[0]):
        for parts, x in zip(done[g], results, strict=True):
            parts.append(x[None])
    return [group.shards(list(map(jnp.concatenate, parts))) for group, parts in zip(groups, done, strict=True)]


def _in_rounds(group: _Group, rows: list[jax.Array], unit: Unit, me: jax.Array, swap: Swap) -> list[list[jax.Array]]:
    """Computes the units that every device has equally many of. Returns parts of the rows of each result."""
    if not group.rounds:
        return [[] for _ in group.outputs]
    rounds = group.rounds

    def arrive(x: jax.Array, port: Port) -> jax.Array:  # [count, 1, D/N, F] -> [rounds, 1, D, F]
        if port.unit is None:
            return x
        num = port.unit.num_shards
        shards = swap(x[: num * rounds].reshape(num, rounds, *x.shape[1:]))
        return jax.vmap(port.unit.join, in_axes=1)(shards)

    def leave(y: jax.Array, port: Port) -> jax.Array:  # [rounds, 1, D, F] -> [N * rounds, 1, D/N, F]
        if port.unit is None:
            return y.reshape(rounds, *port.shape)
        shards = swap(jax.vmap(port.unit.divide, out_axes=1)(y))
        return shards.reshape(-1, *port.unit.shard_shape)

    matrices = list(map(arrive, rows, group.inputs))
    largest = max(math.prod(port.shape) for port in (*group.inputs, *group.outputs))
    # jaxlib's kernels for CPUs that factorize several matrices wait for threads that collectives hold.
    at_once = 1 if factorizes(group.works[0].jaxpr) else max(1, AT_ONCE // largest)
    outs = _mapped(lambda x: unit(*x), (matrices, me * rounds + jnp.arange(rounds)), rounds, at_once)
    return [[leave(y, port)] for y, port in zip(outs, group.outputs, strict=True)]


def _mapped(fn: Callable[[PyTree], PyTree], xs: PyTree, count: int, at_once: int) -> PyTree:
    """Returns `fn` of each of `count` rows, so many at once."""
    if count == 1:
        return jax.tree.map(lambda y: y[None], fn(jax.tree.map(lambda x: x[0], xs)))
    if count <= at_once:
        return jax.vmap(fn)(xs)
    return lax.map(fn, xs, batch_size=None if at_once == 1 else at_once)


def _in_batches(
    groups: Sequence[_Group], batches: UnitBatches, rows: Rows, units: Sequence[Unit], me: jax.Array, swap: Swap
) -> dict[tuple[int, int], list[jax.Array]]:
    """Computes the other units: in each batch, a device computes one of some kind. Returns the rows of each unit."""

    def packed(batch: UnitBatch) -> Buffers:  # what this device has of each unit, for the device that computes it
        return rows_below([{} if x is None else pack_rows([y[x[1]][None] for y in rows[x[0]]]) for x in batch])

    arrived = exchanged(list(map(packed, batches)), swap)
    replies = [_computed(groups, batch, x, units, me) for batch, x in zip(batches, arrived, strict=True)]
    results = {}
    for batch, returned in zip(batches, exchanged(replies, swap), strict=True):
        for device, x in enumerate(batch):
            if x is not None:
                mine = {dtype: y[device : device + 1] for dtype, y in returned.items()}
                results[x] = [y[0] for y in unpack_rows(mine, _shards_of(groups[x[0]].outputs))]
    return results


def _computed(
    groups: Sequence[_Group], batch: UnitBatch, arrived: Buffers, units: Sequence[Unit], me: jax.Array
) -> Buffers:
    """Computes the unit that this device has in a batch. Returns what it sends to each other device."""
    kinds = sorted({x[0] for x in batch if x is not None})

    def computed(g: int, buffers: Buffers, number: jax.Array) -> Buffers:
        inputs, outputs = groups[g].inputs, groups[g].outputs
        operands = list(map(Cut.join, _cuts_of(inputs), unpack_rows(buffers, _shards_of(inputs))))
        return pack_rows(list(map(Cut.divide, _cuts_of(outputs), units[g](operands, number))))

    branches: list[Callable[..., Buffers]] = [functools.partial(computed, g) for g in kinds]
    if None in batch:
        branches.append(lambda buffers, number: {})
    number = jnp.asarray([0 if x is None else x[1] for x in batch], jnp.int32)[me]
    which = jnp.asarray([len(kinds) if x is None else kinds.index(x[0]) for x in batch], jnp.int32)[me]
    if len(branches) == 1:
        return branches[0](arrived, number)
    widths = widest([jax.eval_shape(branch, arrived, number) for branch in branches])

    def wide(branch: Callable[..., Buffers]) -> Callable[..., Buffers]:
        return lambda *args: widened(branch(*args), widths, len(batch))

    reply: Buffers = lax.switch(which, list(map(wide, branches)), arrived, number)
    return reply


def _cuts_of(ports: Sequence[Port]) -> list[Cut]:
    """Returns how a unit of each operand or result is cut; in batches, all travel."""
    return [port.unit for port in ports if port.unit is not None]


def _shards_of(ports: Sequence[Port]) -> list[tuple[tuple[int, ...], DType]]:
    """Returns the shape and dtype of a shard of a unit of each operand or result."""
    return [(cut.shard_shape, port.dtype) for cut, port in zip(_cuts_of(ports), ports, strict=True)]


Buffers: TypeAlias = dict[str, jax.Array]


def pack_rows(arrays: Sequence[jax.Array]) -> Buffers:
    """Returns arrays with the same number of rows, side by side."""
    parts: dict[str, list[jax.Array]] = collections.defaultdict(list)
    for x in arrays:
        parts[x.dtype.name].append(x.reshape(len(x), -1))
    return {dtype: jnp.concatenate(xs, 1) for dtype, xs in parts.items()}


def unpack_rows(buffers: Buffers, shapes: Sequence[tuple[Sequence[int], DType]]) -> list[jax.Array]:
    """Returns the arrays that were packed, each with as many rows as the buffers; drops padding.

    Args:
      buffers: The buffers.
      shapes: The shape of a row of each array, and its dtype.
    """
    offsets: dict[str, int] = collections.defaultdict(int)
    arrays = []
    for shape, dtype in shapes:
        name, size = jnp.dtype(dtype).name, math.prod(shape)
        part = buffers[name][:, offsets[name] : offsets[name] + size]
        arrays.append(part.reshape(-1, *shape))
        offsets[name] += size
    return arrays


def widest(buffers: Sequence[Mapping[str, jax.Array | jax.ShapeDtypeStruct]]) -> dict[str, int]:
    """Returns for each dtype the width of the widest buffer."""
    widths: dict[str, int] = collections.defaultdict(int)
    for dtype, x in itertools.chain.from_iterable(x.items() for x in buffers):
        widths[dtype] = max(widths[dtype], x.shape[1])
    return dict(sorted(widths.items()))


def widened(buffers: Buffers, widths: Mapping[str, int], num_rows: int) -> Buffers:
    """Returns buffers of these dtypes and widths, padded with zeros."""

    def wide(dtype: str, width: int) -> jax.Array:
        x = buffers.get(dtype, jnp.zeros((num_rows, 0), dtype))
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1])))

    return {dtype: wide(dtype, width) for dtype, width in widths.items()}


def rows_below(buffers: Sequence[Buffers]) -> Buffers:
    """Returns buffers of one row each, one below the other, padded to the widest."""
    widths = widest(buffers)
    wide = [widened(x, widths, 1) for x in buffers]
    return {dtype: jnp.concatenate([x[dtype] for x in wide]) for dtype in widths}


def exchanged(buffers: Sequence[Buffers], swap: Callable[[jax.Array], jax.Array]) -> list[Buffers]:
    """Returns buffers after `swap`, which is called once per dtype."""
    results: list[Buffers] = [{} for _ in buffers]
    for dtype in sorted(set().union(*buffers)):
        having = [i for i, x in enumerate(buffers) if dtype in x]
        parts = [buffers[i][dtype] for i in having]
        ends = list(itertools.accumulate(x.shape[1] for x in parts))
        for i, x in zip(having, jnp.split(swap(jnp.concatenate(parts, 1)), ends[:-1], axis=1), strict=True):
            results[i][dtype] = x
    return results
