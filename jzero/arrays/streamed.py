"""Computes values chunk by chunk if their sources are in host memory.

[Note: Streaming an update]
jzero evaluates the jaxpr of an optimizer's update on descriptions of values, not on arrays. A parameter's gradient,
master copy and moments are sources; elementwise operations are only recorded. One loop over chunks of the sources then
computes the update's results for one parameter: it brings each chunk to the device, applies all recorded operations,
and writes the results back to their memory. A sum over all elements (a norm) is a loop of its own. Any other operation
(a matrix product) gets its operands whole, on the devices. If they are on the host, that takes the memory that
offloading was meant to save, so jzero warns.

[Note: Updating on the host]
With `compute="host"` the host's CPU computes the same description, each device's whole part at once: arrays on the
devices go down, results for the devices come up. jax offers two ways. `compute_on` works on CPUs, GPUs and TPUs today
(compiled for all three): it is part of the step's program, reads and overwrites the device's pinned memory in place,
and starts and ends asynchronously. Arrays of jax's CPU backend, the other way, have a memory of their own: every step
would copy the state there, and the plan would span two backends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from jzero import _compat
from jzero.arrays.chunks import Chunk, Pieces, chunk_index, for_each_chunk, read_chunk, split, write_chunk
from jzero.arrays.placement import is_on_host, on_device
from jzero.plan.comm import shard_index, sum_along
from jzero.plan.leaves import StateLeaf
from jzero.plan.plan import ZeroPlan
from jzero.plan.platform import platform_facts

__all__ = [
    "StreamedValue",
    "Update",
    "apply",
    "constant",
    "same_layout",
    "source",
    "sources_of",
    "stream",
    "streamed_sum",
]


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedValue:
    """A value in a parameter's natural shape that is not computed yet: a source, a constant or a function of others.

    Attributes:
      shape: Its natural shape.
      leaf: The layout of its sources; `None` for a constant.
      array: For a source, the array in its stored shape; for a constant, the number.
      fn: For a function, the elementwise function.
      operands: The arguments of `fn`: streamed values and numbers.
      on_host: Whether any of its sources is on the host.
    """

    shape: tuple[int, ...]
    leaf: StateLeaf | None
    array: Any = None
    fn: Callable[..., Any] | None = None
    operands: tuple[Any, ...] = ()
    on_host: bool = False

    def aval(self) -> jax.ShapeDtypeStruct:
        """Returns its shape and dtype."""
        sources, numbers = sources_of([self])
        known = [*(x.array for x in sources), *numbers]
        one = [jax.ShapeDtypeStruct((), x.dtype) if hasattr(x, "dtype") else x for x in known]

        def value(*given: Any) -> Any:
            return compute([self], dict(zip(map(id, known), given, strict=True)), ())[0]

        return jax.ShapeDtypeStruct(self.shape, jax.eval_shape(value, *one).dtype)

    def map(self, fn: Callable[..., Any], *others: Any) -> StreamedValue:
        """Returns `fn(self, *others)`; `fn` must be elementwise."""
        return apply(fn, (self, *others))


def source(array: jax.Array, leaf: StateLeaf, shape: tuple[int, ...]) -> StreamedValue:
    """Returns a stored array, on the host or on the devices, as a streamed value.

    Args:
      array: The array, in the stored shape of `leaf`.
      leaf: Its layout.
      shape: Its natural shape.
    """
    return StreamedValue(shape, leaf, array, on_host=is_on_host(array))


def constant(value: Any, shape: tuple[int, ...]) -> StreamedValue:
    """Returns a streamed value whose elements all equal a number."""
    return StreamedValue(shape, None, value)


def apply(fn: Callable[..., Any], operands: Sequence[Any]) -> StreamedValue:
    """Returns an elementwise function, applied to numbers and to streamed values of one layout."""
    streamed = [x for x in operands if isinstance(x, StreamedValue)]
    leaf = next((x.leaf for x in streamed if x.leaf is not None), None)
    return StreamedValue(streamed[0].shape, leaf, None, fn, tuple(operands), any(x.on_host for x in streamed))


def same_layout(values: Iterable[StreamedValue]) -> bool:
    """Whether one loop can compute these streamed values."""
    leaves = [x.leaf for x in values if x.leaf is not None]
    return all((x.cut, x.base) == (leaves[0].cut, leaves[0].base) for x in leaves)


def sources_of(values: Iterable[StreamedValue]) -> tuple[list[StreamedValue], list[Any]]:
    """Returns the distinct sources of values, and their distinct numbers."""
    sources: dict[int, StreamedValue] = {}
    numbers: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if not isinstance(x, StreamedValue):
            numbers[id(x)] = x
        elif x.fn is not None:
            waiting += x.operands
        elif x.leaf is None:
            numbers[id(x.array)] = x.array
        else:
            sources.setdefault(id(x.array), x)
    return list(sources.values()), list(numbers.values())


def compute(values: Sequence[StreamedValue], arrays: dict[int, Any], shape: tuple[int, ...]) -> list[Any]:
    """Returns values as arrays of one shape.

    Args:
      values: The values.
      arrays: Replacements for the sources' arrays and for numbers, by the `id` of each.
      shape: Shape of the results.
    """
    done: dict[int, Any] = {}

    def value(x: Any) -> Any:
        if not isinstance(x, StreamedValue):
            return arrays.get(id(x), x)
        if id(x) not in done:
            if x.fn is not None:
                done[id(x)] = x.fn(*(value(y) for y in x.operands))
            elif x.leaf is None:
                done[id(x)] = jnp.broadcast_to(arrays.get(id(x.array), x.array), shape)
            else:
                done[id(x)] = arrays[id(x.array)]
        return done[id(x)]

    return [jnp.broadcast_to(value(x), shape) for x in values]


class _Inputs(NamedTuple):
    """The inputs to a computation of streamed values.

    Attributes:
      arrays: The arrays of its sources.
      numbers: Its numbers that are jax arrays.
      leaf: The layout of its sources; `None` without sources.
    """

    arrays: list[jax.Array]
    numbers: list[jax.Array]
    leaf: StateLeaf | None


def _inputs_of(values: Sequence[StreamedValue]) -> _Inputs:
    sources, numbers = sources_of(values)
    traced = [x for x in numbers if isinstance(x, jax.Array)]
    return _Inputs([x.array for x in sources], traced, sources[0].leaf if sources else None)


@dataclasses.dataclass(frozen=True)
class Update:
    """A computation over one parameter's arrays, for `stream`.

    Attributes:
      leaf: The layout of all these arrays.
      values: The values to compute for each chunk.
      old: Arrays in host memory, as stored, that the results overwrite.
      body: `body(position, values, old, *numbers)`. `position` is `(device, chunk)`, which no two different chunks
        share; `values` and `old` are chunks, on the device or CPU that computes. Returns the new chunks of `old`, and
        one for `out`.
      out: The array on the devices, as stored, that the chunks for `out` overwrite; or the shape and dtype of a new
        one; `None` if there are no such chunks. The host always makes a new one, in the dtype that `body` returns.
      numbers: 0-d arrays and keys for `body`.
    """

    leaf: StateLeaf
    values: Sequence[StreamedValue]
    old: Sequence[jax.Array]
    body: Callable[..., tuple[list[jax.Array], jax.Array | None]]
    out: Any = None
    numbers: Sequence[Any] = ()

    @functools.cached_property
    def inputs(self) -> _Inputs:
        """The inputs to `values`."""
        return _inputs_of(self.values)

    @property
    def given(self) -> list[jax.Array]:
        """The array on the devices that the results overwrite, if there is one."""
        return [self.out] if isinstance(self.out, jax.Array) else []

    @property
    def others(self) -> list[jax.Array]:
        """The arrays that the computation only reads."""
        overwritten = [id(x) for x in (*self.old, *self.given)]
        return [x for x in self.inputs.arrays if id(x) not in overwritten]

    def arguments(self) -> tuple[list[Any], ...]:
        """Returns the arguments of `on_cpu` and `in_chunks`, which get a device's part of each."""
        return list(self.old), self.given, self.others, self.inputs.numbers, list(self.numbers)

    def specs(self, plan: ZeroPlan) -> tuple[Any, ...]:
        """Returns the partition specs of `arguments`."""
        spec, whole = plan.device_sharding(self.leaf).spec, PartitionSpec()
        return [spec] * len(self.old), [spec] * len(self.given), [spec] * len(self.others), whole, whole

    def _compute(self, arrays: Sequence[Any], used: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
        names = map(id, (*self.old, *self.given, *self.others, *self.inputs.numbers))
        return compute(self.values, dict(zip(names, [*arrays, *used], strict=True)), shape)

    def in_chunks(
        self, plan: ZeroPlan, old: list[Any], given: list[Any], read: list[Any], used: list[Any], numbers: list[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Computes one device's part on the device, in chunks."""
        shape = next(x.shape for x in (*old, *given, *read))
        bytes_per_element = sum(x.dtype.itemsize for x in old)
        is_tiled = platform_facts(plan.mesh).is_tiled
        pieces = split(shape, bytes_per_element, plan.config.offload.chunk_bytes, tiled=is_tiled)
        old, given, read = ([x.reshape(pieces.view) for x in group] for group in (old, given, read))
        fresh = [] if given or self.out is None else [jnp.zeros(pieces.view, self.out.dtype)]
        device, first = _place_of(self.leaf, shape, plan)

        def step(chunk: Chunk, carry: Any) -> Any:
            old, results = carry
            before = [on_device(read_chunk(x, chunk, pieces)) for x in old]
            here = [*before, *(on_device(read_chunk(x, chunk, pieces)) for x in (*results[: len(given)], *read))]
            values = self._compute(here, used, here[0].shape)
            made = self.body((device, chunk.number), values, before, *numbers)
            new, result = _zero_padding(made, self.leaf, first, shape, chunk, pieces)
            if plan.names_host_memory:
                new = [jax.device_put(x, jax.memory.Space.Host) for x in new]
            old = [write_chunk(x, y, chunk, pieces) for x, y in zip(old, new, strict=True)]
            if result is not None:
                results = [write_chunk(x, result.astype(x.dtype), chunk, pieces) for x in results]
            return old, results

        old, results = for_each_chunk(step, (old, given or fresh), pieces)
        return [x.reshape(shape) for x in old], [x.reshape(shape) for x in results]

    def on_cpu(
        self, here: tuple[Any, Any], old: list[Any], given: list[Any], read: list[Any], used: list[Any], numbers: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Computes one device's part at once, for `_on_cpu`; `here` is the result of `_place_of`."""
        arrays = [*old, *given, *read]
        shape, (device, first) = arrays[0].shape, here
        made = self.body((device, 0), self._compute(arrays, used, shape), old, *numbers)
        new, result = _zero_padding(made, self.leaf, first, shape, *_single_chunk(shape))
        return new, [] if result is None else [result]


def stream(plan: ZeroPlan, update: Update) -> tuple[list[jax.Array], jax.Array | None]:
    """Computes an update in a loop over chunks, or at once on the host, as the plan says; call it inside `jit`.

    Returns:
      The new arrays on the host, and the one on the devices.
    """

    def on_cpu(*groups: list[Any]) -> Any:
        place = _place_of(update.leaf, next(x.shape for group in groups for x in group), plan)
        return _on_cpu(plan, update.on_cpu, (place, *groups))

    spec = plan.device_sharding(update.leaf).spec
    run = jax.shard_map(
        on_cpu if plan.config.offload.compute == "host" else functools.partial(update.in_chunks, plan),
        mesh=plan.mesh,
        in_specs=update.specs(plan),
        out_specs=(spec, spec),
        check_vma=False,
    )
    new, near = run(*update.arguments())
    return new, near[0] if near else None


def _on_cpu(plan: ZeroPlan, fn: Callable[..., tuple[Any, Any]], args: Any) -> tuple[Any, Any]:
    """Runs a function on the host's CPU; its first results stay there, its second ones go to the device."""
    down = jax.tree.map(functools.partial(_to_host, plan), args)
    kept = jax.memory.Space.Host if plan.names_host_memory else jax.memory.Space.Device
    return _compat.compute_on_host(fn, down, (kept, jax.memory.Space.Device))


def _to_host(plan: ZeroPlan, x: jax.Array) -> jax.Array:
    """Returns an array in host memory; leaves numbers and keys in place."""
    if not x.ndim or is_on_host(x) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    if not platform_facts(plan.mesh).is_tiled:
        # XLA for GPUs (jax 0.12) gives the host's program row-major parameters, whatever the layout of its arguments.
        x = with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    return jax.device_put(x, jax.memory.Space.Host) if plan.names_host_memory else x


def streamed_sum(plan: ZeroPlan, x: StreamedValue) -> jax.Array:
    """Sums all elements of a value, chunk by chunk or on the host, to a 0-d array; call it inside `jit`."""
    inputs, dtype = _inputs_of([x]), x.aval().dtype
    leaf = inputs.leaf
    assert leaf is not None
    spec = plan.device_sharding(leaf).spec
    names = [*map(id, inputs.arrays), *map(id, inputs.numbers)]

    def local(read: list[Any], used_here: list[Any]) -> jax.Array:
        shape = read[0].shape
        bytes_per_element = sum(y.dtype.itemsize for y in read)
        is_tiled = platform_facts(plan.mesh).is_tiled
        pieces = split(shape, bytes_per_element, plan.config.offload.chunk_bytes, tiled=is_tiled)
        read = [y.reshape(pieces.view) for y in read]
        first = _first_row(leaf, shape, plan)

        def step(chunk: Chunk, total: jax.Array) -> jax.Array:
            here = [on_device(read_chunk(y, chunk, pieces)) for y in read]
            values = compute([x], dict(zip(names, [*here, *used_here], strict=True)), here[0].shape)[0]
            values = _zero_padding(values, leaf, first, shape, chunk, pieces)
            return total + jnp.sum(values, dtype=dtype)

        return over_devices(for_each_chunk(step, jnp.zeros((), dtype), pieces))

    def local_on_cpu(read: list[Any], used_here: list[Any]) -> jax.Array:
        shape = read[0].shape
        first = _first_row(leaf, shape, plan)

        def on_cpu(first: Any, read: list[Any], used: list[Any]) -> Any:
            values = compute([x], dict(zip(names, [*read, *used], strict=True)), shape)[0]
            values = _zero_padding(values, leaf, first, shape, *_single_chunk(shape))
            return (), jnp.sum(values, dtype=dtype)

        return over_devices(_on_cpu(plan, on_cpu, (first, read, used_here))[1])

    def over_devices(total: jax.Array) -> jax.Array:
        return jnp.asarray(sum_along(total, *jax.tree.leaves(tuple(spec))))

    whole = PartitionSpec()
    run = jax.shard_map(
        local_on_cpu if plan.config.offload.compute == "host" else local,
        mesh=plan.mesh,
        in_specs=([spec] * len(inputs.arrays), whole),
        out_specs=whole,
        check_vma=False,
    )
    return run(inputs.arrays, inputs.numbers)


def _place_of(leaf: StateLeaf, shape: tuple[int, ...], plan: ZeroPlan) -> tuple[jax.Array, Any]:
    """Returns this device's number among those with different parts, and the first row of its part of this shape."""
    sizes = dict(plan.mesh.shape)
    index = jnp.zeros((), jnp.int32)
    for name in jax.tree.leaves(tuple(plan.device_sharding(leaf).spec)):
        index = index * sizes[name] + lax.axis_index(name)
    return index, _first_row(leaf, shape, plan)


def _single_chunk(shape: tuple[int, ...]) -> tuple[Chunk, Pieces]:
    """Returns the only chunk of an array that is not split, and its pieces."""
    return Chunk(0, shape[0], 0), Pieces(shape, 0, shape[0])


def _first_row(leaf: StateLeaf, shape: tuple[int, ...], plan: ZeroPlan) -> Any:
    """Returns the first row of this device's part, of this shape, in the dimension that is cut."""
    cut = leaf.cut
    return jnp.zeros((), jnp.int32) if cut is None else shard_index(plan.comm) * shape[cut.dim]


def _zero_padding(tree: Any, leaf: StateLeaf, first: Any, shape: tuple[int, ...], chunk: Chunk, pieces: Pieces) -> Any:
    """Returns chunks of a device's part, of this shape, with zeros in place of padding."""
    cut = leaf.cut
    if cut is None or not cut.is_padded:
        return tree
    index = first + chunk_index(cut.dim, shape, chunk, pieces)
    return jax.tree.map(lambda x: jnp.where(index < cut.natural_size, x, jnp.zeros((), x.dtype)), tree)
