"""The layout of a train state: where every leaf is, by arithmetic over shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import NamedTuple, Self

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from jzero.core.base.types import DType, PyTree
from jzero.core.config.precision import is_key
from jzero.core.config.zero import ZeroConfig
from jzero.core.jaxpr.sizes import itemsize
from jzero.core.layout.box import Box, record_boxes
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.mesh import (
    AnyMesh,
    axis_size,
    batch_axes,
    names_host_memory,
    of_one_device,
    row_axes,
    shard_axes,
    with_explicit_axes,
)
from jzero.core.layout.route import Route, route_of
from jzero.core.plan.assignment import NO_MATRICES, MatrixWork
from jzero.core.plan.trees import StateView, TreeView


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Where every leaf of a train state is; `ZeroPlan` says what that costs, and documents the fields."""

    config: ZeroConfig
    mesh: AnyMesh
    leaves: tuple[LeafPlan, ...]
    opt_leaves: tuple[StateLeaf, ...]
    other_leaves: tuple[StateLeaf, ...]
    params_treedef: PyTreeDef
    opt_treedef: PyTreeDef
    inner_treedef: PyTreeDef
    closed_over: tuple[StateLeaf, ...] = ()
    kept: Kept | None = None
    matrices: MatrixWork = NO_MATRICES
    explicit_axes: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(
            (self.config, self.mesh, self.leaves, self.opt_leaves, self.other_leaves, self.closed_over, self.kept)
        )

    @functools.cached_property
    def view(self) -> StateView:
        """Takes states of this layout apart, and puts them together."""
        leaves = (*(leaf.param for leaf in self.leaves), *self.opt_leaves, *self.other_leaves)
        opt_state = TreeView(self.opt_treedef, self.opt_leaves)
        return StateView(TreeView(self.params_treedef, self.leaves), opt_state, leaves)

    def leaves_of(self, field: str) -> list[StateLeaf]:
        """Returns the layouts of the arrays of a field other than the parameters."""
        if field == "opt_state":
            return [leaf for leaf in self.opt_leaves if not leaf.in_records]
        return [leaf for leaf in self.other_leaves if leaf.path.partition("/")[0] == field]

    @property
    def seen_dtypes(self) -> list[DType]:
        """The dtype of each parameter, and of each leaf of other fields, in a loss that takes it."""
        return [*(leaf.compute_dtype for leaf in self.leaves), *(leaf.seen_dtype for leaf in self.other_leaves)]

    def with_written(self, paths: Collection[str]) -> Self:
        """Returns the layout for a loss that writes these leaves: it sees them as they are, but for trained ones."""

        def written(leaf: StateLeaf) -> StateLeaf:
            dtype = leaf.dtype if leaf.is_param else None
            return dataclasses.replace(leaf, compute_dtype=dtype, is_written=True) if leaf.path in paths else leaf

        def written_param(leaf: LeafPlan) -> LeafPlan:
            exact = leaf.path in paths and not leaf.trained
            dtype = leaf.param.dtype if exact else leaf.compute_dtype
            return dataclasses.replace(leaf, param=written(leaf.param), compute_dtype=dtype)

        if not paths:
            return self
        leaves, others = tuple(map(written_param, self.leaves)), tuple(map(written, self.other_leaves))
        return dataclasses.replace(self, leaves=leaves, other_leaves=others)

    @property
    def num_shards(self) -> int:
        """N, the size of the ZeRO axis."""
        return axis_size(self.mesh, self.config)

    @property
    def inner_leaves(self) -> tuple[StateLeaf, ...]:
        """The leaves of the user's own optimizer's state."""
        return self.opt_leaves[: self.inner_treedef.num_leaves]

    @property
    def has_opt_state(self) -> bool:
        """Whether jzero adds state (masters, a loss scale …), so that `opt_state` is a `ZeroOptState`."""
        return bool(self.opt_treedef != self.inner_treedef)

    @property
    def regathers(self) -> bool:
        """Whether the backward pass gathers parameters again."""
        cut = any(leaf.param.cut for leaf in self.leaves) or any(x.is_param and x.cut for x in self.other_leaves)
        return self.config.reshard_after_forward and cut

    def regathers_param(self, path: str) -> bool:
        """Whether the backward pass gathers a partitioned parameter again."""
        return self.config.reshard_after_forward and (self.kept is None or path not in self.kept.params)

    @property
    def rounds_stochastically(self) -> bool:
        """Whether anything is rounded stochastically when it is stored."""
        return any(leaf.update_dtype is not None for leaf in self.opt_leaves) or any(
            leaf.trained and leaf.updated.dtype != leaf.update_dtype for leaf in self.leaves
        )

    @property
    def plain(self) -> Self:
        """The plan of the plain state: masters instead of parameters, the user's own optimizer state."""
        leaves = tuple(dataclasses.replace(leaf, param=leaf.updated, master=None) for leaf in self.leaves)
        return dataclasses.replace(
            self, leaves=leaves, opt_leaves=self.inner_leaves, opt_treedef=self.inner_treedef, closed_over=()
        )

    @property
    def params(self) -> PyTree:
        """`PartitionSpec` of each stored parameter."""
        return self.params_treedef.unflatten([leaf.param.spec for leaf in self.leaves])

    @property
    def grads(self) -> PyTree:
        """`PartitionSpec` of each gradient."""
        return self.params_treedef.unflatten([leaf.grad.spec for leaf in self.leaves])

    @property
    def opt_state(self) -> PyTree:
        """`PartitionSpec` of each leaf of the optimizer state."""
        return self.opt_treedef.unflatten([leaf.spec for leaf in self.opt_leaves])

    @property
    def padding(self) -> PyTree:
        """Elements that padding adds to each stored parameter, over all devices."""
        return self.params_treedef.unflatten([leaf.param.cut.padding if leaf.param.cut else 0 for leaf in self.leaves])

    @property
    def names_host_memory(self) -> bool:
        """Whether programs can distinguish host memory from device memory; those for compile-only GPUs cannot."""
        return names_host_memory(self.mesh)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of arrays of the batch: cut on their first dimension."""
        return NamedSharding(self.mesh, PartitionSpec(row_axes(self.config)))

    @property
    def explicit_mesh(self) -> AnyMesh:
        """The mesh with its Explicit axes, as it was given."""
        return with_explicit_axes(self.mesh, self.explicit_axes)

    @functools.cached_property
    def loss_mesh(self) -> AbstractMesh:
        """The mesh on which jax traces the loss, see [Note: Meshes in types]."""
        return of_one_device(self.explicit_mesh, batch_axes(self.config))

    @functools.cached_property
    def whole_sharding(self) -> NamedSharding:
        """The sharding of arrays that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def whole_leaf(self, path: str, shape: tuple[int, ...], dtype: DType, reason: str = "") -> StateLeaf:
        """Returns the layout of an array that every device holds whole."""
        return StateLeaf(path, shape, dtype, self.mesh, shard_axes(self.config), reason=reason)

    @functools.cached_property
    def route(self) -> Route:
        """How parameters and gradients travel."""
        return route_of(self.config, self.mesh)

    @functools.cached_property
    def indices(self) -> dict[str, int]:
        """The index of each parameter, by its path."""
        return {leaf.path: i for i, leaf in enumerate(self.leaves)}

    @functools.cached_property
    def opt_leaves_of(self) -> list[list[tuple[int, StateLeaf]]]:
        """For each parameter its leaves of the user's own optimizer's state, with their indices."""
        by_param: list[list[tuple[int, StateLeaf]]] = [[] for _ in self.leaves]
        for i, leaf in enumerate(self.inner_leaves):
            if leaf.owner is not None:
                by_param[leaf.owner].append((i, leaf))
        return by_param

    @functools.cached_property
    def keys(self) -> frozenset[int]:
        """Indices of the parameters that are random keys."""
        return frozenset(i for i, leaf in enumerate(self.leaves) if is_key(leaf.param.dtype))

    @functools.cached_property
    def offloaded(self) -> frozenset[int]:
        """Indices of the trained parameters that are not on the devices, or whose master or optimizer state is not."""
        memories = [{x.param.memory, x.updated.memory} for x in self.leaves]
        own = {i for i, x in enumerate(self.leaves) if x.trained and memories[i] != {"device"}}
        owners = {leaf.owner for leaf in self.inner_leaves if leaf.memory != "device" and leaf.owner is not None}
        return frozenset(own | owners)

    @functools.cached_property
    def wholly_offloaded(self) -> frozenset[int]:
        """Indices of the trained parameters that are not on the devices, nor is optimizer state of their shape."""
        on_device = {
            x.owner
            for x in self.inner_leaves
            if x.owner is not None and x.memory == "device" and x.shape == self.leaves[x.owner].param.shape
        }
        return frozenset(i for i in self.offloaded if self.leaves[i].param.memory != "device") - on_device

    @functools.cached_property
    def params_on_disk(self) -> tuple[int, ...]:
        """Indices of the parameters whose rows are on disk."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.param.in_records)

    @property
    def has_records(self) -> bool:
        """Whether any parameter, master or optimizer state is in records."""
        masters = [leaf.master for leaf in self.leaves if leaf.master is not None]
        return any(leaf.in_records for leaf in (*masters, *self.inner_leaves)) or bool(self.params_on_disk)

    @functools.cached_property
    def record_fields(self) -> dict[int, tuple[StateLeaf, ...]]:
        """The leaves in records of each parameter: itself, its master, its state. All are laid out like its gradient.

        The parameter comes first, so that its row can be read without the rest.
        """
        fields: dict[int, tuple[StateLeaf, ...]] = {i: (self.leaves[i].param,) for i in self.params_on_disk}
        for leaf in self.opt_leaves:
            if leaf.in_records and leaf.owner is not None:
                fields[leaf.owner] = (*fields.get(leaf.owner, ()), leaf)
        return dict(sorted(fields.items()))

    def record_boxes(self, i: int) -> list[Box]:
        """Returns the boxes of each device's part of a parameter that are records on disk."""
        per_element = sum(itemsize(leaf.dtype) for leaf in self.record_fields[i])
        shape, most = self.leaves[i].grad.part_shape, self.config.offload.chunk_bytes
        if i not in self.params_on_disk:
            return record_boxes(shape, per_element, most)
        of_row = record_boxes(shape[1:], per_element, most)  # programs read single rows
        return [Box((row, *x.start), (1, *x.shape)) for row in range(shape[0]) for x in of_row]

    def num_chosen(self, leaf: StateLeaf) -> int:
        """Returns how many columns each device chooses of its part of a leaf, see `Offload.zenflow`."""
        flow = self.config.offload.zenflow
        columns = leaf.part_shape[leaf.column_dim]
        return 0 if flow is None else min(columns, round(flow.topk_ratio * columns) or (flow.topk_ratio > 0))

    @property
    def all_params(self) -> list[StateLeaf]:
        """Every parameter as stored, trained or not."""
        return [*(leaf.param for leaf in self.leaves), *(leaf for leaf in self.other_leaves if leaf.is_param)]


class Kept(NamedTuple):
    """Values that stay on a device from the forward to the backward pass, though stage 3 could make them anew.

    Attributes:
      params: The paths of the parameters that stay whole, of those that are partitioned.
      of_params: How many are partitioned.
      param_bytes: Their bytes on one device.
      blocks: How many of the loss's repeated blocks, and of its loops over layers, keep what `Keep` says.
      of_blocks: How many there are.
      block_bytes: The bytes that these blocks save on one device for the backward pass.
      peak: The estimated peak of the step on one device, if the step chose by itself what it keeps.
      limit: What a step may use of a device, likewise.
    """

    params: frozenset[str]
    of_params: int
    param_bytes: int
    blocks: int
    of_blocks: int
    block_bytes: int
    peak: int | None = None
    limit: int | None = None
