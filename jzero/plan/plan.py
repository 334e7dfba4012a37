"""The plan of a train state: the layout and bytes of every leaf, and the reason for each leaf that stays whole."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from jzero._text import Report
from jzero._types import DType, PyTree
from jzero.config.precision import is_key
from jzero.config.zero import ZeroConfig
from jzero.jaxpr.sizes import itemsize
from jzero.layout.box import Box
from jzero.layout.leaves import LeafPlan, StateLeaf
from jzero.layout.mesh import (
    AnyMesh,
    axis_size,
    batch_axes,
    mesh_platform,
    names_host_memory,
    shard_axes,
    with_explicit_axes,
)
from jzero.layout.padded import Padded
from jzero.layout.records import record_boxes
from jzero.layout.route import Route, route_of
from jzero.plan.assignment import NO_MATRICES, MatrixWork
from jzero.plan.kept import Kept
from jzero.plan.state_bytes import BytesPerDevice, device_bytes, host_bytes, record_bytes, replicated_bytes
from jzero.plan.table import format_plan, plan_as_dict
from jzero.plan.traffic import LevelBytes, Traffic, UnquantizedLeaf

Term = Literal["params", "grads", "opt_state", "other"]


class WholeLeaf(NamedTuple):
    """A leaf that every device of the ZeRO axis holds whole."""

    term: Term
    path: str
    shape: tuple[int, ...]
    num_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ZeroPlan(Report):
    """Where every leaf of a train state lives. Immutable, hashable, made by `plan_train_state`.

    Attributes:
      config: Its configuration.
      mesh: The mesh; abstract if the plan was made without devices.
      leaves: One `LeafPlan` per parameter.
      opt_leaves: One `StateLeaf` per leaf of the optimizer state as stored; those of the user's own optimizer first.
      other_leaves: One `StateLeaf` per leaf of the state's other fields (`step`, `batch_stats` …).
      closed_over: Arrays that the loss closes over, of more elements than the persistence threshold and than 4,096.
        Every device holds them whole; only the plan from `step.plan(state, batch)` knows them.
      kept: What a step with `remat=Keep(...)` keeps between its passes; likewise.
      matrices: The matrix work of the optimizer: what one device computes, and what all of them do.
      explicit_axes: The mesh axes beside ZeRO's that are Explicit while jax traces the loss.
      params_treedef: Structure of `state.params`.
      opt_treedef: Structure of `state.opt_state`, as stored.
      inner_treedef: Structure of the state of the user's own optimizer; equal to `opt_treedef` unless the
        precision policy, or state in records, adds state.

    Example:
      >>> plan = jzero.plan_of(state)
      >>> tuple(plan.params["w"]), plan.bytes_per_device.params == 512 * 512 * 4 // plan.num_shards
      (('data',), True)
    """

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

    def flat_params(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of a tree with the parameters' structure; for padded leaves, the stored arrays."""
        return [leaf.unbox(x) for leaf, x in zip(self.leaves, self.params_treedef.flatten_up_to(tree), strict=True)]

    def stored_params(self, leaves: Sequence[object]) -> PyTree:
        """Returns the tree of parameters for a state, see [Note: Padded leaves in your own loop]."""
        return self.params_treedef.unflatten([x.param.box(y) for x, y in zip(self.leaves, leaves, strict=True)])

    def flat_opt_state(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of an optimizer state; for padded leaves, the stored arrays."""
        return [leaf.unbox(x) for leaf, x in zip(self.opt_leaves, self.opt_treedef.flatten_up_to(tree), strict=True)]

    def stored_opt_state(self, leaves: Sequence[object]) -> PyTree:
        """Returns the optimizer state for a state, see [Note: Padded leaves in your own loop]."""
        return self.opt_treedef.unflatten([leaf.box(x) for leaf, x in zip(self.opt_leaves, leaves, strict=True)])

    def stored_grads(self, leaves: Sequence[object]) -> PyTree:
        """Returns the tree of gradients for user code: padded ones, and those of padded parameters, as nodes."""

        def node(leaf: LeafPlan, x: object) -> object:
            cut = None if leaf.trained else leaf.param.padded_cut
            return leaf.grad.box(x) if cut is None else Padded(x, leaf.path, cut)

        return self.params_treedef.unflatten([node(*x) for x in zip(self.leaves, leaves, strict=True)])

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
    def plain(self) -> ZeroPlan:
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

    def check_host_memory(self) -> None:
        """Raises if arrays belong in host memory, but devices report no memories and would keep them."""
        if not self.names_host_memory and any(self.host_bytes_per_device):
            raise ValueError(
                f"The plan keeps {self.host_bytes_per_device.total} bytes per device in host memory, but these devices "
                f"({mesh_platform(self.mesh)}) do not say what memories they have, so nothing can be placed "
                "there. Set `offload=jzero.Offload()`."
            )

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of arrays of the batch: cut on their first dimension."""
        return NamedSharding(self.mesh, PartitionSpec(batch_axes(self.config)))

    @functools.cached_property
    def loss_mesh(self) -> AnyMesh:
        """The mesh with its Explicit axes, on which jax traces the loss."""
        return with_explicit_axes(self.mesh, self.explicit_axes)

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

    @functools.cached_property
    def host_bytes_per_device(self) -> BytesPerDevice:
        """Bytes of one device in host memory, by term, padding included.

        Gradients count if they wait there for a later step (`Offload.delay`), or are added up (`Offload.zenflow`: one
        sum, and one that is being applied).
        """
        return host_bytes(self)

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

    @functools.cached_property
    def disk_bytes_per_device(self) -> int:
        """Bytes of one device's state on disk: two copies, since a step writes one while it reads the other."""
        return 2 * record_bytes(self) if self.config.offload.optimizer == "disk" else 0

    @functools.cached_property
    def bytes_per_device(self) -> BytesPerDevice:
        """Bytes in the memory of one device, by term, padding included; `host_bytes_per_device` has the host's.

        Gradients count at their maximum: cut at stages 2 and 3, whole at stages 0 and 1, since stage 1 sums whole local
        gradients if there are several micro-batches.
        """
        return device_bytes(self)

    @functools.cached_property
    def replicated_bytes(self) -> BytesPerDevice:
        """The same terms if every device held these leaves whole: in bf16 at stage 3 that is 14 bytes per parameter.

        Stage 0 itself takes 16 there, since its fp32 masters lie beside the parameters.
        """
        return replicated_bytes(self)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of parameters that one device gathers in a step, padding included.

        It counts a step with one micro-batch whose loss uses each parameter once and recomputes nothing itself.
        Stage 3 gathers a partitioned parameter for the forward pass and, with `reshard_after_forward`, again for the
        backward pass. Parameters that stay whole are gathered once, after their update. The plan does not know the
        loss, which may gather more if it uses a parameter more than once or has its own `jax.checkpoint`.
        `estimate_step_memory` and `analyze` count that.
        """
        return self.traffic.bytes_gathered_in(micro_batches=1)

    def sent_bytes(self, *, micro_batches: int = 1) -> LevelBytes:
        """Returns the bytes that one device sends per step for parameters and gradients, within and between nodes.

        It counts the uses that `gathered_bytes` counts, and one reduction per micro-batch from stage 2 on, one per step
        at stage 1. Without `ZeroConfig.node_axis` all is within.
        """
        return self.traffic.sent_bytes(micro_batches=micro_batches)

    @functools.cached_property
    def unquantized(self) -> tuple[UnquantizedLeaf, ...]:
        """Every partitioned parameter that `Quantization` leaves as it is, with the reason."""
        return self.traffic.unquantized()

    @functools.cached_property
    def traffic(self) -> Traffic:
        """What devices exchange in one step."""
        return Traffic(self)

    @property
    def all_params(self) -> list[StateLeaf]:
        """Every parameter as stored, trained or not."""
        return [*(leaf.param for leaf in self.leaves), *(leaf for leaf in self.other_leaves if leaf.is_param)]

    @functools.cached_property
    def replicated(self) -> tuple[WholeLeaf, ...]:
        """Every leaf that stays whole on each device of the ZeRO axis, with the reason."""
        return tuple(self._replicated())

    def _replicated(self) -> Iterator[WholeLeaf]:
        params = [leaf.param for leaf in self.leaves]
        terms: list[tuple[Term, Sequence[StateLeaf]]] = [
            ("params", params),
            ("grads", [leaf.grad for leaf in self.leaves if leaf.trained]),
            ("opt_state", self.opt_leaves),
            ("other", (*self.other_leaves, *self.closed_over)),
        ]
        for term, leaves in terms:
            for leaf in leaves:
                if leaf.cut is None:
                    num_bytes = leaf.bytes_per_device
                    yield WholeLeaf(term, leaf.path, leaf.shape, num_bytes, leaf.reason)

    def __str__(self) -> str:
        return self.table()

    def table(self, *, max_rows: int | None = 40) -> str:
        """Returns the plan as text: bytes by term, one row per parameter, the leaves that stay whole.

        Args:
          max_rows: Rows per section; the rest is only counted. `None` for all rows.
        """
        return format_plan(self, max_rows=max_rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data: bytes by term, one row per parameter, the leaves that stay whole."""
        return plan_as_dict(self)
