"""What a call lays out, and how: checks its arguments, plans, and brings the values of a state to the devices."""

from __future__ import annotations

import collections
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jzero.core.base.text import path_str
from jzero.core.base.types import Optimizer, PyTree, TrainStateLike
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import AnyMesh, axes_of_config, batch_axes, make_mesh, mesh_platform
from jzero.core.layout.padded import Leaf, Padded, is_padded, unbox
from jzero.core.layout.placement import gather_padded
from jzero.core.layout.stored import InRecords, Stored, when_read
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.planner import make_plan
from jzero.core.plan.state_fields import check_state_fields
from jzero.core.plan.trainable import MaskedTransformation, restrict_opt_state, restrict_optimizer
from jzero.core.state.adapter import plan_if_sharded
from jzero.core.state.gather import note_value
from jzero.core.state.record_states import checked_records, readable, records_of
from jzero.core.state.train_state import (
    S,
    abstract_leaf,
    check_alive,
    plain_state,
    stored_state,
)
from jzero.core.update.transformation import ZeroTransformation

M = TypeVar("M", bound=AnyMesh)

COUNTED = {"replica_axis": "replicas", "node_axis": "nodes", "context_axis": "parts of a row"}
"""What an axis counts, by the field that names it."""


class Placement:
    """A state, and how to lay it out.

    Args:
      state: The state, plain or sharded before.
      stage: The stage, if there is no configuration.
      config: What to partition; by default as before.
      mesh: The devices; by default as before.
      trainable: Which parameters are trained.

    Attributes:
      old: The plan of a state that was sharded before.
      natural: The state to plan for: shapes, with the user's own optimizer, restricted to the trained parameters.
    """

    def __init__(
        self,
        state: TrainStateLike,
        stage: int | None,
        config: ZeroConfig | None,
        mesh: AnyMesh | None,
        trainable: PyTree | str | None,
    ) -> None:
        self.state = state
        self.old = plan_if_sharded(state)
        self.config = resolve_config(stage, config, self.old)
        mesh = self.old.explicit_mesh if mesh is None and self.old is not None else mesh
        self.mesh: AnyMesh = resolve_mesh(mesh, self.config)
        self.natural = restrict(_natural_state(state, self.old), trainable)

    def check_values(self) -> None:
        """Raises unless the state has values to place."""
        leaves = jax.tree_util.tree_leaves_with_path(self.state)
        abstract = [path_str(path) for path, x in leaves if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer)]
        if abstract:
            raise TypeError(
                f"`shard_train_state` places arrays, but these leaves are abstract: {abstract[:5]}. Call it outside "
                "`jit`; plan an abstract state with `plan_train_state`, make one that is born sharded with "
                "`init_train_state`."
            )
        check_alive([x for _, x in leaves])
        if self.old is not None and self.old.has_records:  # before `donate` frees anything
            records_of(self.state)

    def make_plan(self) -> ZeroPlan:
        """Returns the plan."""
        return make_plan(self.natural, self.natural.tx, self.config, self.mesh)

    def abstract(self, plan: ZeroPlan) -> TrainStateLike:
        """Returns the state as `plan` stores it, as shapes."""
        return plan.view.rebuilt(self.state, map(abstract_leaf, plan.view.leaves), tx=self._wrapped(plan))

    def place(self, plan: ZeroPlan, *, donate: bool, values: list[str] | None) -> TrainStateLike:
        """Returns the state on the devices, as `plan` stores it; notes the values that this process supplies."""
        check_has_memories(plan)
        records = checked_records(self._wrapped(plan))
        nodes = self._nodes(plan)
        uses = collections.Counter(map(id, jax.tree.leaves(nodes)))
        for_records: dict[str, Any] = {}

        def place(x: Any, leaf: StateLeaf) -> Stored:
            if records is not None and leaf.in_records:  # once all that belongs to its parameter is known
                for_records[leaf.path] = x
                return records.node(leaf)
            return place_now(x, leaf)

        def place_now(x: Any, leaf: StateLeaf) -> jax.Array:
            array = unbox(x)
            placed = leaf.place(
                gather_padded(array.read() if isinstance(array, InRecords) else x), look=note_value(values, leaf)
            )
            if self.old is not None or donate or is_padded(x):  # one leaf at a time, so that at most one is whole
                jax.block_until_ready(placed)
            uses[id(array)] -= 1
            if donate and isinstance(array, jax.Array) and not uses[id(array)]:
                array.delete()
            return placed

        leaves = list(map(place, nodes, plan.view.leaves))
        if records is not None:
            records.fill(
                lambda i: [place_now(for_records[x.path], x) for x in plan.record_fields[i]], plan.record_fields
            )
            records.pipeline.store.commit()
        if donate:  # free the leaves that the new state does not need
            for x in jax.tree.leaves(self.state):
                if isinstance(x, jax.Array) and not x.is_deleted():
                    x.delete()
        return plan.view.rebuilt(self.state, leaves, tx=self._wrapped(plan))

    def _wrapped(self, plan: ZeroPlan) -> ZeroTransformation:
        return ZeroTransformation(self.natural.tx, plan)

    def _nodes(self, plan: ZeroPlan) -> list[Any]:
        """Returns the values that `plan` stores; padded ones know their own layout."""
        plain = self.state if self.old is None else _plain_values(self.state, self.old)
        trained = with_optimizer(plain, self.natural.params, self.natural.tx)
        return plan.view.nodes(stored_state(trained, plan, self.state.opt_state))


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


def _natural_state(state: S, old: ZeroPlan | None) -> S:
    """Returns the state to plan for: natural shapes and, if it was sharded before, its own optimizer."""
    if old is None:
        return jax.tree.map(_natural_shape, state, is_leaf=is_padded)
    layout = old.plain
    return layout.view.rebuilt(state, map(_shape_of, layout.view.leaves), tx=state.tx.inner)


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


def _plain_values(state: S, old: ZeroPlan) -> S:
    """Returns the plain values of a sharded state, which know their natural shapes; on disk, once they are read."""
    layout = old.plain
    leaves = layout.view.flat(plain_state(readable(state), old, take_edits=True))
    return layout.view.rebuilt(state, map(_known_shape, leaves, layout.view.leaves), tx=state.tx.inner)


def _known_shape(x: Stored, leaf: StateLeaf) -> Stored:
    return when_read(x, leaf.box) if isinstance(x, InRecords) else x


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
