"""Runs an elementwise function over arrays in host memory: chunk by chunk on the device, or on the host.

[Note: Streaming an update]
An update's elementwise part runs in one loop over chunks of a parameter's fields: the loop brings each chunk to the
device, computes, and writes the results back to the fields' memory. A sum over all elements (a norm) is a loop of its
own. Any other operation (a matrix product) gets its operands whole, on the devices. If they are on the host, that takes
the memory that offloading was meant to save, so jzero warns.

[Note: Updating on the host]
With `compute="host"` the host's CPU computes the same function, on each device's whole part at once: arrays on the
devices go down, results for the devices come up. jax offers two ways. `compute_on` works on CPUs, GPUs and TPUs today
(compiled for all three): it is part of the step's program, reads and overwrites the device's pinned memory in place,
and starts and ends asynchronously. Arrays of jax's CPU backend, the other way, have a memory of their own: every step
would copy the state there, and the plan would span two backends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from jzero.core.arrays.chunks import Chunk, Chunking, chunk_index, for_each_chunk, read_chunk, split, write_chunk
from jzero.core.arrays.host_compute import run_on_cpu
from jzero.core.base.types import PyTree
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import memory_of, on_device
from jzero.core.layout.platform import platform_facts
from jzero.core.plan.plan import ZeroPlan
from jzero.core.update.kernels import Part, PartKernel, SumTarget
from jzero.core.update.split import REDUCTIONS


class ChunkPass(NamedTuple):
    """One pass over the arrays of a parameter.

    Attributes:
      leaf: The layout of all these arrays.
      kernel: What it computes of each chunk. Its targets are numbers of `arrays`, on the host or on the devices, dtypes
        of new ones on the devices, or all sums.
      arrays: The arrays as stored.
      scalars: 0-d arrays.
      is_off_device: Whether arrays are on the host, so that the pass runs on each device's part, chunk by chunk; or
        it runs on whole arrays, which the compiler divides.
    """

    leaf: StateLeaf
    kernel: PartKernel
    arrays: Sequence[jax.Array]
    scalars: Sequence[jax.Array]
    is_off_device: bool

    @property
    def sums(self) -> list[SumTarget]:
        """Its targets, if all are sums; else none."""
        return [t for t in self.kernel.targets if isinstance(t, SumTarget)]

    def on(self, part: Part, here: Sequence[jax.Array], scalars: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results on a part of the arrays."""
        operands = {"array": here, "scalar": scalars}
        return self.kernel.on(part, lambda x: operands[x.kind][x.number], here[0].shape)


def run_pass(plan: ZeroPlan, x: ChunkPass) -> list[jax.Array]:
    """Returns the results of a pass as stored, or its sums, 0-d; call it inside `jit`."""
    if not x.is_off_device:
        outs = x.on(_whole(x.leaf), x.arrays, x.scalars)
        if x.sums:
            return outs
        dtypes = [x.arrays[t].dtype if isinstance(t, int) else t for t in x.kernel.targets]
        cast = [y.astype(dtype) for y, dtype in zip(outs, dtypes, strict=True)]
        return [lax.with_sharding_constraint(y, x.leaf.device_sharding) for y in cast]
    spec = x.leaf.device_sharding.spec
    one_each = PartitionSpec(tuple(jax.tree.leaves(tuple(spec))))
    mapped = jax.shard_map(
        functools.partial(_on_host if plan.config.offload.compute == "host" else _in_chunks, plan, x),
        mesh=plan.mesh,
        in_specs=([spec] * len(x.arrays), PartitionSpec()),
        out_specs=[one_each if x.sums else spec] * len(x.kernel.targets),
        check_vma=False,
    )
    results = mapped(list(x.arrays), list(x.scalars))
    if x.sums:  # one of each device
        return [REDUCTIONS[t.how].reduce(y).astype(t.dtype) for t, y in zip(x.sums, results, strict=True)]
    return results


def _in_chunks(plan: ZeroPlan, x: ChunkPass, arrays: list[jax.Array], scalars: list[jax.Array]) -> list[jax.Array]:
    """Runs a pass on a device's part, chunk by chunk."""
    shape, first = arrays[0].shape, first_index(x.leaf, arrays[0].shape)
    # By the number of an array: that of the result that overwrites it.
    overwriting = {t: k for k, t in enumerate(x.kernel.targets) if isinstance(t, int)}
    written = [arrays[t] for t in overwriting]
    chunking = _split(plan, [y for y in written if memory_of(y) == "host"] or written or arrays)
    views = [y.reshape(chunking.view) for y in arrays]

    def step(chunk: Chunk, results: list[jax.Array]) -> list[jax.Array]:
        now = [results[overwriting[k]] if k in overwriting else view for k, view in enumerate(views)]
        here = [on_device(read_chunk(y, chunk, chunking)) for y in now]
        outs = x.on(_part(x.leaf, shape, first, chunk, chunking), here, scalars)
        if x.sums:
            return [REDUCTIONS[t.how].join(y, z) for t, y, z in zip(x.sums, results, outs, strict=True)]
        new = [y.astype(z.dtype) for y, z in zip(outs, results, strict=True)]
        new = [_to_host(y) if memory_of(z) == "host" else y for y, z in zip(new, results, strict=True)]
        return [write_chunk(z, y, chunk, chunking) for y, z in zip(new, results, strict=True)]

    if x.sums:
        begin = [jnp.asarray(REDUCTIONS[t.how].neutral, t.dtype) for t in x.sums]
        return [y[None] for y in for_each_chunk(step, begin, chunking)]
    begin = [views[t] if isinstance(t, int) else jnp.zeros(chunking.view, t) for t in x.kernel.targets]
    return [y.reshape(shape) for y in for_each_chunk(step, begin, chunking)]


def _on_host(plan: ZeroPlan, x: ChunkPass, arrays: list[jax.Array], scalars: list[jax.Array]) -> list[jax.Array]:
    """Runs a pass on a device's part, on the host's CPU."""
    shape = arrays[0].shape
    host_targets = [t for t in x.kernel.targets if isinstance(t, int) and memory_of(arrays[t]) == "host"]
    stays = [t in host_targets for t in x.kernel.targets]

    def fn(first: list[jax.Array], *inputs: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = x.on(_part(x.leaf, shape, first, *_only_chunk(shape)), *inputs)
        staying = [y for y, s in zip(outs, stays, strict=True) if s]
        rising = [y for y, s in zip(outs, stays, strict=True) if not s]
        return [y.astype(arrays[t].dtype) for y, t in zip(staying, host_targets, strict=True)], rising

    there, here = map(iter, _on_cpu(plan, fn, (first_index(x.leaf, shape), arrays, scalars)))
    return [y[None] for y in here] if x.sums else [next(there) if s else next(here) for s in stays]


def _split(plan: ZeroPlan, arrays: Sequence[jax.Array]) -> Chunking:
    """Returns the chunking of arrays of one shape that are read together."""
    bytes_per_element = sum(x.dtype.itemsize for x in arrays)
    is_tiled = platform_facts(plan.mesh).is_tiled
    return split(arrays[0].shape, bytes_per_element, plan.config.offload.chunk_bytes, tiled=is_tiled)


def first_index(leaf: StateLeaf, shape: tuple[int, ...]) -> list[jax.Array]:
    """Returns the index of the first element of this device's part along each dimension, inside of a `shard_map`."""
    spec = leaf.device_sharding.spec
    names = [tuple(jax.tree.leaves(x)) for x in (*spec, *[None] * (len(shape) - len(spec)))]
    return [lax.axis_index(x) * n if x else cast("jax.Array", np.int32(0)) for x, n in zip(names, shape, strict=True)]


def _whole(leaf: StateLeaf) -> Part:
    """Returns the whole of a stored leaf, outside of a `shard_map`."""
    return Part(leaf, lambda dim: lax.broadcasted_iota(jnp.int32, leaf.stored_shape, dim))


def _part(
    leaf: StateLeaf, shape: tuple[int, ...], first: Sequence[jax.Array], chunk: Chunk, chunking: Chunking
) -> Part:
    """Returns a chunk of one device's part, whose first element has the index `first` along each dimension."""
    return Part(leaf, lambda dim: first[dim] + chunk_index(dim, shape, chunk, chunking))


def _only_chunk(shape: tuple[int, ...]) -> tuple[Chunk, Chunking]:
    """Returns the chunk of a part that is not split, and its chunking."""
    return Chunk(0, shape[0], 0), Chunking(shape, 0, shape[0])


def _on_cpu(plan: ZeroPlan, fn: Callable[..., tuple[PyTree, PyTree]], args: PyTree) -> tuple[PyTree, PyTree]:
    """Runs a function on the host's CPU; its first results stay there, its second ones go to the device."""
    memory = jax.memory.Space.Host if plan.names_host_memory else jax.memory.Space.Device
    return run_on_cpu(fn, jax.tree.map(functools.partial(_to_cpu, plan), args), (memory, jax.memory.Space.Device))


def _to_cpu(plan: ZeroPlan, x: jax.Array) -> jax.Array:
    """Returns an array in host memory; leaves scalars in place."""
    if not x.ndim or memory_of(x) == "host":
        return x
    if not platform_facts(plan.mesh).is_tiled:
        # XLA for GPUs (jax 0.12) gives the host's program row-major parameters, whatever the layout of its arguments.
        x = with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    return _to_host(x) if plan.names_host_memory else x


def _to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)
