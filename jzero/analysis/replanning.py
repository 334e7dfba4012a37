"""Lays out the arguments of a step for another machine, as shapes with shardings."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jzero.core.base.types import PyTree, TrainStateLike
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.mesh import AnyMesh, axes_of_config, make_mesh, with_explicit_axes
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.adapter import adapt, plan_if_sharded
from jzero.core.state.shard import abstract_train_state
from jzero.machines.machine import Machine


def abstract_mesh(num_devices: int, axes: dict[str, int]) -> AbstractMesh:
    """Returns a mesh without devices; one of `axes` may be -1, which takes the remaining devices."""
    product = math.prod(size for size in axes.values() if size != -1)
    sizes = {name: num_devices // product if size == -1 else size for name, size in axes.items()}
    if math.prod(sizes.values()) != num_devices:
        raise ValueError(
            f"The mesh axes {axes} (-1: what the others leave) do not divide {num_devices} devices: choose a machine "
            f"whose number of devices is a multiple of {product}, or pass `mesh=`."
        )
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def plan_of_argument(x: Any) -> ZeroPlan | None:
    """Returns the plan of a sharded state; `None` for anything else."""
    state = _as_state(x)
    return None if state is None else plan_if_sharded(state)


def relaid(
    x: Any,
    *,
    devices: list[jax.Device] | int | None = None,
    mesh: AnyMesh | None = None,
    config: ZeroConfig | None = None,
    trainable: PyTree | str | None = None,
    hardware: Machine | None = None,
) -> Any:
    """Returns a state as shapes laid out for the machine; anything else as it is.

    Args:
      x: An argument.
      devices: The machine's devices, or their number; the ZeRO axis takes all that the other axes leave.
      mesh: The mesh, if it is known.
      config: The configuration, if the state has none.
      trainable: Which parameters are trained, if the state does not say.
      hardware: The machine's specifications; an abstract mesh takes its platform, on which a trace depends.
    """
    state = _as_state(x)
    if state is None or all(option is None for option in (devices, mesh, config, trainable)):
        return x
    plan = plan_of_argument(x)
    config = config or (None if plan is None else plan.config)
    if config is None:  # a plain state of some plain function
        return x
    if mesh is None and devices is None and plan is not None:
        mesh = plan.explicit_mesh
    if mesh is None:
        sizes = {str(name): int(size) for name, size in plan.mesh.shape.items()} if plan is not None else {}
        named = axes_of_config(config)
        # In the order of the old mesh, which decides who is whose neighbour; ZeRO's axis, -1, takes the rest.
        axes = {name: size for name, size in named.items() if name not in sizes} | sizes
        axes |= {name: size for name, size in named.items() if size == -1}
        mesh = abstract_mesh(devices, axes) if isinstance(devices, int) else make_mesh(devices=devices, **axes)
        mesh = with_explicit_axes(mesh, () if plan is None else plan.explicit_axes)
    if hardware is not None and isinstance(mesh, AbstractMesh):
        device = AbstractDevice(device_kind=hardware.name, num_cores=None, platform=hardware.kind)
        mesh = mesh.update(abstract_device=device)
    # The state itself, not the library's objects: those of NNX cannot hold abstract arrays.
    return abstract_train_state(state, config=config, mesh=mesh, trainable=trainable)


def move_to_mesh(args: list[Any], keywords: dict[str, Any], mesh: Mesh) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments of a plain function for another machine: the same specs on its mesh."""

    def move(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return x
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh != mesh:
            names = jax.tree.leaves(tuple(sharding.spec))
            spec = sharding.spec if set(names) <= set(mesh.shape) else PartitionSpec()
            sharding = NamedSharding(mesh, spec)
        named = sharding if isinstance(sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named)

    there, named = jax.tree.map(move, (args, keywords))
    if any(getattr(x, "sharding", None) is not None for x in jax.tree.leaves((there, named))):
        return there, named

    def place(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(place, (there, named))


def mesh_of(args: PyTree) -> Mesh | None:
    """Returns the mesh of the first argument that has one."""
    for x in jax.tree.leaves(args):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _as_state(x: Any) -> TrainStateLike | None:
    """Returns `x` as a train state; `None` if it is not one."""
    try:
        return adapt(x).state
    except (TypeError, ValueError):  # arguments of a user's own jitted function may be anything
        return None
