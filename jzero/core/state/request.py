"""What a call asks for: its configuration, its mesh, and the state to plan for, as shapes."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jzero.core.base.types import Optimizer, PyTree, TrainStateLike
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import AnyMesh, axes_of_config, batch_axes, make_mesh, mesh_platform
from jzero.core.layout.padded import Leaf, Padded, is_padded
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.planner import make_plan
from jzero.core.plan.state_fields import check_state_fields
from jzero.core.plan.trainable import MaskedTransformation, restrict_opt_state, restrict_optimizer
from jzero.core.state.adapter import plan_if_sharded
from jzero.core.state.train_state import S

M = TypeVar("M", bound=AnyMesh)

COUNTED = {"replica_axis": "replicas", "node_axis": "nodes", "context_axis": "parts of a row"}
"""What an axis counts, by the field that names it."""


class Request(NamedTuple):
    """How to lay out a state.

    Attributes:
      config: What to partition, and how.
      mesh: The devices.
      natural: The state to plan for: shapes, with the user's own optimizer, restricted to the trained parameters.
      old: The plan of a state that was sharded before.
    """

    config: ZeroConfig
    mesh: AnyMesh
    natural: TrainStateLike
    old: ZeroPlan | None

    def plan(self) -> ZeroPlan:
        """Returns the plan."""
        return make_plan(self.natural, self.config, self.mesh)


def request_of(
    state: TrainStateLike,
    stage: int | None,
    config: ZeroConfig | None,
    mesh: AnyMesh | None,
    trainable: PyTree | str | None,
) -> Request:
    """Returns what the arguments of a call ask for; raises unless the state can be trained.

    Args:
      state: The state, plain or sharded before.
      stage: The stage, if there is no configuration.
      config: What to partition; by default as before.
      mesh: The devices; by default as before.
      trainable: Which parameters are trained.
    """
    old = plan_if_sharded(state)
    config = resolve_config(stage, config, old)
    mesh = resolve_mesh(old.explicit_mesh if mesh is None and old is not None else mesh, config)
    if old is None:
        natural = jax.tree.map(_natural_shape, state, is_leaf=is_padded)
    else:
        layout = old.plain
        natural = layout.view.rebuilt(state, list(map(_shape_of, layout.view.leaves)), tx=state.tx.inner)
    return Request(config, mesh, restrict(natural, trainable), old)


def restrict(state: S, trainable: PyTree | str | None) -> S:
    """Returns a plain state restricted to the trained parameters; raises unless its fields can be trained."""
    check_state_fields(state)
    return with_optimizer(state, state.params, restrict_optimizer(state.tx, trainable, state.params))


def with_optimizer(state: S, params: PyTree, tx: Optimizer) -> S:
    """Returns a plain state whose optimizer is `tx`, its own or one for some parameters; `params` may be shapes."""
    if tx is state.tx:
        return state
    assert isinstance(tx, MaskedTransformation)
    return state.replace(tx=tx, opt_state=restrict_opt_state(tx, params, state.opt_state))


def _natural_shape(x: Leaf) -> Leaf:
    """Returns a padded leaf of another sharded state as a natural shape; anything else as it is."""
    if not isinstance(x, Padded):
        return x
    spec, cut = getattr(getattr(x.stored, "sharding", None), "spec", ()), x.cut_now
    other_spec = PartitionSpec(*[None if cut.cuts(d) else names for d, names in enumerate(spec)])
    sharding = NamedSharding(x.stored.sharding.mesh, other_spec) if any(other_spec) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _shape_of(leaf: StateLeaf) -> jax.ShapeDtypeStruct:
    """Returns a leaf of a plain state as its natural shape, cut by the mesh axes that are not ZeRO's."""
    sharding = NamedSharding(leaf.mesh, leaf.base) if any(leaf.base) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.update_dtype or leaf.dtype, sharding=sharding)


def resolve_config(stage: int | None, config: ZeroConfig | None, old: ZeroPlan | None = None) -> ZeroConfig:
    """Returns the configuration by `stage=` or `config=`, or else that of an already sharded state."""
    if isinstance(stage, ZeroConfig):
        raise TypeError("A configuration is passed by name, `config=...`: got a `ZeroConfig` as `stage`.")
    if config is None:
        if stage is None:
            if old is not None:
                return old.config
            raise ValueError("Say what to partition: pass `stage=` (0, 1, 2 or 3) or `config=jzero.ZeroConfig(...)`.")
        return ZeroConfig(stage=stage)  # type: ignore[arg-type]  # checked by ZeroConfig
    if not isinstance(config, ZeroConfig):
        raise TypeError(f"`config` must be a `jzero.ZeroConfig`: got {type(config).__name__}.")
    if stage is not None and stage != config.stage:
        raise ValueError(f"`stage={stage}` contradicts `config.stage={config.stage}`: pass one of them.")
    return config


def resolve_mesh(mesh: M | None, config: ZeroConfig) -> M | Mesh:
    """Returns the mesh, or one of all devices."""
    if mesh is not None:
        return mesh
    check_sizes_are_known(config, "replica_axis", "node_axis", "context_axis")
    return make_mesh(devices=None, **axes_of_config(config))


def check_sizes_are_known(config: ZeroConfig, *fields: str) -> None:
    """Raises if one of these fields names an axis: without a mesh, nothing says its size."""
    for field in fields:
        if (name := getattr(config, field)) is not None:
            sizes = ", ".join(f"{axis}=..." for axis in batch_axes(config))
            raise ValueError(
                f"`{field}={name!r}` needs a mesh that says how many {COUNTED[field]} there are: pass "
                f"`mesh=jzero.make_mesh({sizes})`."
            )


def check_has_devices(mesh: AnyMesh | None) -> None:
    """Raises if a mesh is abstract."""
    if isinstance(mesh, AbstractMesh):
        raise TypeError(
            "An `AbstractMesh` has no devices to place arrays on: pass a mesh of devices, such as `jzero.make_mesh()`. "
            "`plan_train_state` and `abstract_train_state` take either, since they place nothing."
        )


def check_has_memories(plan: ZeroPlan) -> None:
    """Raises if arrays belong in host memory, but devices report no memories and would keep them."""
    if not plan.names_host_memory and any(plan.host_bytes_per_device):
        raise ValueError(
            f"The plan keeps {plan.host_bytes_per_device.total} bytes per device in host memory, but these devices "
            f"({mesh_platform(plan.mesh)}) do not say what memories they have, so nothing can be placed "
            "there. Set `offload=jzero.Offload()`."
        )
