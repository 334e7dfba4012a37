"""Meshes: making them, checking them against a configuration, platforms and memories of their devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jzero.core.base.guard import warn
from jzero.core.base.types import AxisNames
from jzero.core.config.settings import Setting, check, integer
from jzero.core.config.zero import ZeroConfig

AnyMesh: TypeAlias = Mesh | AbstractMesh
M = TypeVar("M", Mesh, AbstractMesh, AnyMesh)

AXIS_SIZE = Setting("the size of a mesh axis, >= 1 (or -1 for the rest)", lambda x: -1 if x == -1 else integer(1).of(x))
HOST_MEMORY = "pinned_host"
"""Page-locked memory of the host, which devices copy from and to directly."""


def make_mesh(*, devices: Sequence[jax.Device] | None = None, **axis_sizes: int) -> Mesh:
    """Returns a mesh for ZeRO: by default, every device on one axis, `"data"`.

    Pass axis sizes by name, the slowest-varying first; over several TPU slices the first axes run over slices. One of
    them may be -1: it takes the remaining devices. The axis named by `ZeroConfig.replica_axis` replicates the shards,
    that named by `node_axis` runs over nodes, along that named by `context_axis` devices share rows of the batch; other
    axes are for GSPMD (tensor parallelism).

    Args:
      devices: The devices to use, in order. All of `jax.devices()` by default.
      **axis_sizes: Size of each axis, e.g. `replica=2, data=4`.

    Returns:
      A `jax.sharding.Mesh` with automatic axes.

    Raises:
      ValueError: The sizes do not multiply to the number of devices, or do not run over the TPU slices, or a device
        is named twice.
      TypeError: `devices` is not a sequence of devices.

    Example:
      >>> jzero.make_mesh(replica=2, data=4).shape["data"]
      4
    """
    listed: object = jax.devices() if devices is None else devices
    items = list(listed) if isinstance(listed, Iterable) and not isinstance(listed, str) else [None]
    chosen = [x for x in items if isinstance(x, jax.Device)]
    if len(chosen) < len(items):
        raise TypeError(f"`devices` must be a sequence of devices, such as `jax.devices()[:4]`: got {devices!r:.200}.")
    if not chosen:
        raise ValueError("`devices` is empty: a mesh needs at least one device.")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"`devices` names a device twice: {chosen}.")
    sizes = {name: check(name, size, AXIS_SIZE) for name, size in axis_sizes.items()} or {"data": len(chosen)}
    free = [name for name, size in sizes.items() if size == -1]
    product = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise ValueError(f"Only one mesh axis may be -1: got {free}.")
    if free and len(chosen) % product == 0:
        sizes[free[0]] = len(chosen) // product
    if math.prod(sizes.values()) != len(chosen):
        raise ValueError(
            f"Mesh axes {axis_sizes} do not multiply to the {len(chosen)} devices given. Pass `devices=` with as "
            "many devices as the axes need, or set one axis to -1."
        )
    auto = (AxisType.Auto,) * len(sizes)
    num_slices = len({getattr(x, "slice_index", 0) for x in chosen})
    if num_slices > 1:
        return Mesh(_over_slices(sizes, num_slices, chosen), tuple(sizes), axis_types=auto)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=chosen)


def _over_slices(sizes: Mapping[str, int], num_slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices of several TPU slices as an array: the first axes run over slices, as far as they do."""
    over, left = [], num_slices
    for size in sizes.values():
        over.append(math.gcd(size, left))
        left //= over[-1]
    if left > 1:
        raise ValueError(
            f"The devices are {num_slices} TPU slices, which no axes of {dict(sizes)} run over: let the first axes, "
            "such as `replica` and `node`, multiply to the number of slices."
        )
    inside = [size // parts for size, parts in zip(sizes.values(), over, strict=True)]
    grid: np.ndarray = create_hybrid_device_mesh(inside, over, devices)
    return grid


def with_explicit_axes(mesh: M, names: Collection[str] = ()) -> M:
    """Returns a mesh with these axes as Explicit and all others as Auto."""
    types = [AxisType.Explicit if name in names else AxisType.Auto for name in mesh.axis_names]
    return mesh.update(axis_types=tuple(types))


def explicit_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the names of the Explicit axes of a mesh."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(name) for name, kind in pairs if kind == AxisType.Explicit)


def of_one_device(mesh: AnyMesh, names: Collection[str]) -> AbstractMesh:
    """Returns a mesh with one device along some axes."""
    sizes = tuple(1 if name in names else mesh.shape[name] for name in mesh.axis_names)
    return (mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh).update(axis_sizes=sizes)


def check_mesh(mesh: AnyMesh, config: ZeroConfig) -> None:
    """Raises if `mesh` lacks an axis that `config` names; warns if devices would be idle."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"`mesh` must be a `jax.sharding.Mesh`: got {type(mesh).__name__}. Make one with `jzero.make_mesh`."
        )
    for field in ("axis", "node_axis", "context_axis", "replica_axis"):
        name = getattr(config, field)
        if name is not None and name not in mesh.axis_names:
            raise ValueError(
                f"`{field}` must name an axis of the mesh: got {name!r}, but the mesh has axes {mesh.axis_names}. "
                f"Set `ZeroConfig({field}=...)`, or make the mesh with `jzero.make_mesh({name}=...)`."
            )
    if isinstance(mesh, Mesh) and mesh.size == 1 and jax.device_count() > 1:
        warn(
            f"The mesh has one device, but {jax.device_count()} are there: nothing is partitioned. "
            "Use `jzero.make_mesh()` for all of them."
        )
    if isinstance(mesh, Mesh) and config.node_axis is not None:
        processes = np.vectorize(lambda x: x.process_index, otypes=[int])(mesh.devices)
        within, between = (num_along(processes, mesh.axis_names.index(x)) for x in (config.axis, config.node_axis))
        if within > between:
            warn(
                f"`node_axis` {config.node_axis!r} runs over {between} processes, and `axis` {config.axis!r} over "
                f"{within}: hops within nodes would cross the network. Let the axis over hosts come first, "
                f"`jzero.make_mesh({config.node_axis}=..., {config.axis}=...)`."
            )


def num_along(values: np.ndarray, dim: int) -> int:
    """Returns how many values are different along one dimension, where there are most."""
    lines = np.moveaxis(values, dim, -1).reshape(-1, values.shape[dim])
    return max(len(set(line.tolist())) for line in lines)


def platform_of(device: jax.Device | AbstractDevice) -> str:
    """Returns `cpu`, `gpu` or `tpu`, whatever the plugin calls itself."""
    return "gpu" if device.platform in ("cuda", "rocm") else str(device.platform)


def mesh_platform(mesh: AnyMesh) -> str | None:
    """Returns the platform of a mesh's devices; `None` of an abstract mesh that names none."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
    return None if device is None else platform_of(device)


def memory_kinds(device: jax.Device) -> list[str]:
    """Returns the kinds of memory that a device can address; compile-only GPUs report none."""
    return [memory.kind for memory in device.addressable_memories()]


@functools.lru_cache(maxsize=64)
def names_host_memory(mesh: AnyMesh) -> bool:
    """Whether programs can distinguish host memory from device memory; those for compile-only GPUs cannot."""
    if not isinstance(mesh, Mesh):
        return True
    here = mesh.local_devices or list(mesh.devices.flat)
    return HOST_MEMORY in memory_kinds(here[0])


def check_host_memory(mesh: AnyMesh) -> None:
    """Raises if existing devices have no pinned host memory. Nothing is known about absent ones."""
    if not isinstance(mesh, Mesh):
        return
    for device in mesh.local_devices:
        kinds = memory_kinds(device)
        if kinds and HOST_MEMORY not in kinds:
            raise ValueError(
                f"The devices of this mesh ({device.platform}) have no memory of the kind {HOST_MEMORY!r}, only "
                f"{kinds}: nothing can be kept on the host here."
            )


def shard_axes(config: ZeroConfig) -> tuple[str, ...]:
    """Returns ZeRO's mesh axes, along which devices hold different shards, the slowest-varying first."""
    return (*axes_within_nodes(config), *(() if config.node_axis is None else (config.node_axis,)))


def axes_within_nodes(config: ZeroConfig) -> tuple[str, ...]:
    """Returns ZeRO's mesh axes that one hop runs over: all but the one over nodes."""
    return (config.axis,) if config.context_axis is None else (config.axis, config.context_axis)


def axis_size(mesh: AnyMesh, config: ZeroConfig) -> int:
    """Returns N, the number of devices that hold different shards."""
    return num_parts(mesh, shard_axes(config))


def num_parts(mesh: AnyMesh, names: AxisNames) -> int:
    """Returns into how many parts mesh axes cut a dimension, given as in a `PartitionSpec`."""
    return math.prod(int(mesh.shape[name]) for name in jax.tree.leaves(names))


def batch_axes(config: ZeroConfig) -> tuple[str, ...]:
    """Returns the mesh axes over which the work on a batch is split, the slowest-varying first."""
    return (*row_axes(config), *(() if config.context_axis is None else (config.context_axis,)))


def row_axes(config: ZeroConfig) -> tuple[str, ...]:
    """Returns the mesh axes over which the rows of a batch are split, the slowest-varying first."""
    return tuple(name for name in (config.replica_axis, config.node_axis, config.axis) if name is not None)


def axes_of_config(
    config: ZeroConfig, num_shards: int = -1, num_replicas: int = 1, num_nodes: int = 1
) -> dict[str, int]:
    """Returns the mesh axes that a configuration names, with their sizes, as `make_mesh` takes them.

    `num_shards` of them are on different nodes if there are several, or all that the other axes leave, -1.
    """
    replicas = {} if config.replica_axis is None or num_replicas == 1 else {config.replica_axis: num_replicas}
    if config.node_axis is None:
        return {**replicas, config.axis: num_shards}
    return {**replicas, config.node_axis: num_nodes, config.axis: -1 if num_shards == -1 else num_shards // num_nodes}


def num_batch_shards(mesh: AnyMesh, config: ZeroConfig) -> int:
    """Returns how many devices share the work on a batch."""
    return num_parts(mesh, batch_axes(config))


def num_row_shards(mesh: AnyMesh, config: ZeroConfig) -> int:
    """Returns how many parts the rows of a batch are split into."""
    return num_parts(mesh, row_axes(config))
