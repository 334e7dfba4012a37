"""Values computed chunk by chunk, because what they are made of lies in host memory.

[Note: Streaming an update]
The jaxpr of an optimizer's update is evaluated on descriptions of values in place of arrays: a parameter's gradient,
its master copy, its moments are sources, and an operation that acts on each element alone is only noted down. What the
update returns for one parameter is then computed by one loop over chunks of these sources: each chunk is brought to
the device, all noted operations are applied to it, and the results go back to where they came from. A sum over all
elements (a norm) is a loop of its own. An operation that needs more (a matrix product) gets its operands whole, on the
devices; where they lie on the host that costs the memory that offloading was there to save, so it is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jzero._chunks import Chunk, Pieces, for_each_chunk, index_in, read_chunk, split, write_chunk
from jzero._placement import is_on_host, on_device
from jzero._plan import StateLeaf, ZeroPlan

__all__ = [
    "ELEMENTWISE",
    "Streamed",
    "applied",
    "constant",
    "is_tiled",
    "same_layout",
    "source",
    "sources_of",
    "stream",
    "streamed_sum",
]

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos "
    "cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min "
    "mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sharding_constraint sign "
    "sin sinh sqrt square stop_gradient sub tan tanh xor".split()
)
"""Operations that act on each element alone, whatever the shape."""


@dataclasses.dataclass(frozen=True, eq=False)
class Streamed:
    """A value of a parameter's natural shape that is not computed yet.

    Attributes:
      shape: Its natural shape.
      leaf: How its sources are cut; `None` if it is one number everywhere.
      array: Of a source: the array, in its stored shape; of a constant: the number.
      fn: Of anything else: a function of single elements.
      operands: What that is applied to: streamed values, and numbers as they are.
      on_host: Whether any of its sources lies on the host.
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

    def map(self, fn: Callable[..., Any], *others: Any) -> Streamed:
        """Returns `fn(self, *others)`, where `fn` acts on each element alone."""
        return applied(fn, (self, *others))


def source(array: jax.Array, leaf: StateLeaf, shape: tuple[int, ...]) -> Streamed:
    """Returns a stored array, on the host or on the devices, as a streamed value.

    Args:
      array: It, in the shape in which `leaf` is stored.
      leaf: Its layout.
      shape: Its natural shape.
    """
    return Streamed(shape, leaf, array, on_host=is_on_host(array))


def constant(value: Any, shape: tuple[int, ...]) -> Streamed:
    """Returns a number as a streamed value that has it everywhere."""
    return Streamed(shape, None, value)


def applied(fn: Callable[..., Any], operands: Sequence[Any]) -> Streamed:
    """Returns a function of single elements applied to streamed values of one layout, and numbers."""
    streamed = [x for x in operands if isinstance(x, Streamed)]
    leaf = next((x.leaf for x in streamed if x.leaf is not None), None)
    return Streamed(streamed[0].shape, leaf, None, fn, tuple(operands), any(x.on_host for x in streamed))


def same_layout(values: Iterable[Streamed]) -> bool:
    """Whether streamed values can be computed in one loop."""
    leaves = [x.leaf for x in values if x.leaf is not None]
    return all((x.cut, x.base) == (leaves[0].cut, leaves[0].base) for x in leaves)


def sources_of(values: Iterable[Streamed]) -> tuple[list[Streamed], list[Any]]:
    """Returns the distinct sources that values are made of, and the distinct numbers."""
    sources: dict[int, Streamed] = {}
    numbers: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if not isinstance(x, Streamed):
            numbers[id(x)] = x
        elif x.fn is not None:
            waiting += x.operands
        elif x.leaf is None:
            numbers[id(x.array)] = x.array
        else:
            sources.setdefault(id(x.array), x)
    return list(sources.values()), list(numbers.values())


def compute(values: Sequence[Streamed], arrays: dict[int, Any], shape: tuple[int, ...]) -> list[Any]:
    """Returns values as arrays of one shape.

    Args:
      values: The values.
      arrays: By the `id` of each source's array and of each number: what stands for it.
      shape: Shape of the results.
    """
    done: dict[int, Any] = {}

    def value(x: Any) -> Any:
        if not isinstance(x, Streamed):
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


def stream(  # noqa: PLR0913  # a loop and all that goes through it
    plan: ZeroPlan,
    leaf: StateLeaf,
    values: Sequence[Streamed],
    old: Sequence[jax.Array],
    body: Callable[..., tuple[list[jax.Array], jax.Array | None]],
    out: Any,
    numbers: Sequence[Any] = (),
) -> tuple[list[jax.Array], jax.Array | None]:
    """Runs a loop over the chunks of one parameter, inside of `jit`.

    Args:
      plan: The plan.
      leaf: How everything of this parameter is cut.
      values: What to compute of each chunk.
      old: Arrays in host memory, as stored, that the loop overwrites.
      body: `body(position, values, old, *numbers)` takes `(device, chunk)`, which no two different chunks share, and
        chunks of `values` and `old` on the device. Returns the new chunks of `old`, and one for `out`.
      out: An array on the devices, as stored, that the results for the device overwrite; or the shape and dtype of a
        new one; `None` if there are no such results.
      numbers: 0-d arrays for `body`.

    Returns:
      The new arrays on the host, and the one on the devices.
    """
    sources, used = sources_of(values)
    used = [x for x in used if isinstance(x, jax.Array)]
    given = [out] if isinstance(out, jax.Array) else []
    overwritten = [id(x) for x in (*old, *given)]
    others = [x.array for x in sources if id(x.array) not in overwritten]
    config = plan.config

    def local(*given_here: list[Any]) -> Any:
        *arrays_here, used_here, numbers = given_here
        shape = next(x.shape for group in arrays_here for x in group)
        bytes_per_element = sum(x.dtype.itemsize for x in arrays_here[0])
        pieces = split(shape, bytes_per_element, config.offload.chunk_bytes, tiled=is_tiled(plan))
        old, given, read = ([x.reshape(pieces.view) for x in group] for group in arrays_here)
        results = given or [jnp.zeros(pieces.view, x.dtype) for x in ([] if out is None else [out])]
        device = _index(spec, dict(plan.mesh.shape))

        def step(chunk: Chunk, carry: Any) -> Any:
            old, results = carry
            before = [on_device(read_chunk(x, chunk, pieces)) for x in old]
            here = [*before, *(on_device(read_chunk(x, chunk, pieces)) for x in (*results[: len(given)], *read))]
            arrays = dict(zip([*overwritten, *map(id, others), *map(id, used)], [*here, *used_here], strict=True))
            chunk_shape = (before or here)[0].shape
            new, result = body((device, chunk.number), compute(values, arrays, chunk_shape), before, *numbers)
            new, result = _without_padding((new, result), leaf, shape, chunk, pieces, config.axis)
            if plan.names_host_memory:
                new = [jax.device_put(x, jax.memory.Space.Host) for x in new]
            old = [write_chunk(x, y, chunk, pieces) for x, y in zip(old, new, strict=True)]
            if result is not None:
                results = [write_chunk(x, result.astype(x.dtype), chunk, pieces) for x in results]
            return old, results

        old, results = for_each_chunk(step, (old, results), pieces)
        return [x.reshape(shape) for x in old], [x.reshape(shape) for x in results]

    whole = PartitionSpec()
    spec = plan.device_sharding(leaf).spec
    run = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=([spec] * len(old), [spec] * len(given), [spec] * len(others), whole, whole),
        out_specs=(spec, spec),
        check_vma=False,
    )
    new_old, results = run(list(old), given, others, used, list(numbers))
    return new_old, results[0] if results else None


def streamed_sum(plan: ZeroPlan, x: Streamed) -> jax.Array:
    """Returns the sum over all elements of a value, chunk by chunk, inside of `jit`: a 0-d array."""
    sources, used = sources_of([x])
    used = [y for y in used if isinstance(y, jax.Array)]
    arrays = [y.array for y in sources]
    leaf, dtype = sources[0].leaf, x.aval().dtype
    assert leaf is not None
    spec = plan.device_sharding(leaf).spec

    def local(read: list[Any], used_here: list[Any]) -> jax.Array:
        shape = read[0].shape
        bytes_per_element = sum(y.dtype.itemsize for y in read)
        pieces = split(shape, bytes_per_element, plan.config.offload.chunk_bytes, tiled=is_tiled(plan))
        read = [y.reshape(pieces.view) for y in read]

        def step(chunk: Chunk, total: jax.Array) -> jax.Array:
            here = [on_device(read_chunk(y, chunk, pieces)) for y in read]
            known = dict(zip([*map(id, arrays), *map(id, used)], [*here, *used_here], strict=True))
            values = compute([x], known, here[0].shape)[0]
            values = _without_padding(values, leaf, shape, chunk, pieces, plan.config.axis)
            return total + jnp.sum(values, dtype=dtype)

        total = for_each_chunk(step, jnp.zeros((), dtype), pieces)
        names = tuple(jax.tree.leaves(tuple(spec)))
        return jnp.asarray(lax.psum(total, names)) if names else total

    whole = PartitionSpec()
    run = jax.shard_map(local, mesh=plan.mesh, in_specs=([spec] * len(arrays), whole), out_specs=whole, check_vma=False)
    return run(arrays, used)


def _index(spec: PartitionSpec, sizes: dict[str, int]) -> jax.Array:
    """Returns the number of this device among those that hold different parts."""
    index = jnp.zeros((), jnp.int32)
    for name in jax.tree.leaves(tuple(spec)):
        index = index * sizes[name] + lax.axis_index(name)
    return index


def _without_padding(
    tree: Any, leaf: StateLeaf, shape: tuple[int, ...], chunk: Chunk, pieces: Pieces, axis: str
) -> Any:
    """Returns chunks of a device's part, which has this shape, with zeros where the leaf has no elements."""
    cut = leaf.cut
    if cut is None or not cut.is_padded:
        return tree
    index = lax.axis_index(axis) * shape[cut.dim] + index_in(cut.dim, shape, chunk, pieces)
    return jax.tree.map(lambda x: jnp.where(index < cut.natural_size, x, jnp.zeros((), x.dtype)), tree)


def is_tiled(plan: ZeroPlan) -> bool:
    """Whether the devices lay out arrays in tiles, or may do so."""
    return not isinstance(plan.mesh, Mesh) or plan.mesh.devices.flat[0].platform == "tpu"
