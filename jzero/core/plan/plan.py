"""The plan of a train state: where every leaf is, and why. A value; what it costs and prints are functions of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from jzero.core.base.text import Part, Report, as_data, picked, printed
from jzero.core.base.types import DType, PyTree
from jzero.core.config.precision import is_key, wide_dtype
from jzero.core.config.zero import ZeroConfig
from jzero.core.jaxpr.lookups import TableReads
from jzero.core.jaxpr.sizes import array_bytes, itemsize
from jzero.core.layout.box import Box, field_offsets, record_boxes
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
from jzero.core.plan import table as text
from jzero.core.plan.assignment import NO_MATRICES, MatrixWork
from jzero.core.plan.planned_bytes import BytesPerDevice, Term, WholeLeaf, sum_bytes, whole_leaves
from jzero.core.plan.traffic import Kept, LevelBytes, Traffic, UnquantizedLeaf
from jzero.core.plan.trees import StateView, TreeView


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
      lookups: By path, what a loss reads of the parameters whose rows it looks up in their shards; likewise.
      matrices: The matrix work of the optimizer: what one device computes, and what all of them do.
      explicit_axes: The mesh axes that are Explicit while jax traces the loss.
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
    lookups: Mapping[str, TableReads] = dataclasses.field(default_factory=dict)

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
        """Returns the layouts of the arrays of a field."""
        if field == "params":
            return [leaf.param for leaf in self.leaves]
        if field == "opt_state":
            return [leaf for leaf in self.opt_leaves if not leaf.in_records]
        return [leaf for leaf in self.other_leaves if leaf.path.partition("/")[0] == field]

    @property
    def seen_dtypes(self) -> list[DType]:
        """The dtype of each parameter, and of each leaf of other fields, in a loss that takes it."""
        return [*(leaf.compute_dtype for leaf in self.leaves), *(leaf.seen_dtype for leaf in self.other_leaves)]

    def with_written(self, paths: Collection[str]) -> ZeroPlan:
        """Returns the plan for a loss that writes these leaves: it sees them as they are, but for trained ones."""
        if not paths:
            return self
        leaves = tuple(leaf.written() if leaf.path in paths else leaf for leaf in self.leaves)
        others = tuple(leaf.written() if leaf.path in paths else leaf for leaf in self.other_leaves)
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

    @functools.cached_property
    def bytes_per_device(self) -> BytesPerDevice:
        """Bytes in the memory of one device, by term, padding included; `host_bytes_per_device` has the host's.

        Gradients count at their maximum: cut at stages 2 and 3, whole at stages 0 and 1, since stage 1 sums whole local
        gradients if there are several micro-batches.
        """
        grads = [x if self.config.stage > 1 else dataclasses.replace(x, cut=None) for x in self._terms["grads"]]
        chosen = 0
        for i, fields in self.record_fields.items():
            leaf = self.leaves[i].grad
            share = self.num_chosen(leaf) / leaf.part_shape[leaf.column_dim]
            chosen += round(share * sum(x.bytes_per_device for x in fields))
        params, opt_state = sum_bytes(self._terms["params"]), sum_bytes(self.opt_leaves)
        return BytesPerDevice(params, sum_bytes(grads), opt_state + chosen)

    @functools.cached_property
    def host_bytes_per_device(self) -> BytesPerDevice:
        """Bytes of one device in host memory, by term, padding included.

        Gradients count if they wait there for a later step (`Offload.delay`), or are added up (`Offload.zenflow`: one
        sum, and one that is being applied).
        """
        offload, grads = self.config.offload, [self.leaves[i].grad for i in self.record_fields]
        sums = [dataclasses.replace(x, dtype=wide_dtype(x.dtype)) for x in grads]
        records = 0 if offload.records_in == "disk" else self._record_bytes * (1 if offload.delay else 2)
        return BytesPerDevice(
            params=sum_bytes(self._terms["params"], "host"),
            grads=2 * sum_bytes(sums) if offload.zenflow else sum_bytes(grads) if offload.delay else 0,
            opt_state=sum_bytes(self.opt_leaves, "host") + records,
        )

    @property
    def disk_bytes_per_device(self) -> int:
        """Bytes of one device's state on disk: two copies, since a step writes one while it reads the other."""
        return 2 * self._record_bytes if self.config.offload.records_in == "disk" else 0

    @functools.cached_property
    def _record_bytes(self) -> int:
        """The bytes of one device's records."""
        dtypes = {i: [leaf.dtype for leaf in fields] for i, fields in self.record_fields.items()}
        return sum(field_offsets(dtypes[i], box.size)[-1] for i in dtypes for box in self.record_boxes(i))

    @functools.cached_property
    def replicated_bytes(self) -> BytesPerDevice:
        """The same terms if every device held these leaves whole: in bf16 at stage 3 that is 14 bytes per parameter.

        Stage 0 itself takes 16 there, since its fp32 masters lie beside the parameters.
        """
        return BytesPerDevice(*(sum(array_bytes(x.size, x.dtype) for x in leaves) for leaves in self._terms.values()))

    @functools.cached_property
    def _terms(self) -> dict[Term, list[StateLeaf]]:
        """The leaves of parameters (trained or not), of gradients and of the optimizer state."""
        params = [*(leaf.param for leaf in self.leaves), *(leaf for leaf in self.other_leaves if leaf.is_param)]
        return {"params": params, "grads": [x.grad for x in self.leaves if x.trained], "opt_state": [*self.opt_leaves]}

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
        return Traffic(self.config, self.mesh, self.leaves, self.other_leaves, self.kept, self.lookups)

    @functools.cached_property
    def replicated(self) -> tuple[WholeLeaf, ...]:
        """Every leaf that stays whole on each device of the ZeRO axis, with the reason."""
        params, others = [leaf.param for leaf in self.leaves], [*self.other_leaves, *self.closed_over]
        return tuple(whole_leaves({**self._terms, "params": params, "other": others}))

    def parts(self, *, max_rows: int | None = 40) -> list[Part]:
        """Returns what `table` prints."""
        config = self.config
        state = self.opt_leaves_of if self.offloaded else [[] for _ in self.leaves]
        params = [text.param_row(x, config, (y for _, y in own)) for x, own in zip(self.leaves, state, strict=True)]
        params += [text.frozen_row(x, config) for x in self.other_leaves if x.is_param]
        whole = [(x.term, x.path, str(x.shape), text.format_bytes(x.num_bytes), x.reason) for x in self.replicated]
        kinds = ", ".join(sorted({*dataclasses.astuple(config.quantization)} - {"none"}))
        exact = [(x.path, str(x.shape), x.reason) for x in self.unquantized]
        matrices = self.matrices.lines(", ".join(shard_axes(config)), self.num_shards)
        device, host = self.bytes_per_device, self.host_bytes_per_device
        sections: list[Sequence[Part]] = [
            text.head_lines(config, self.mesh, self.view.leaves),
            [text.bytes_table(device, host, self.disk_bytes_per_device, self.replicated_bytes)],
            text.section(text.PARAM_TITLES, params, max_rows),
            text.section(("whole on every device", "path", "shape", "bytes", "reason"), whole, max_rows),
            text.section((f"as they are, not {kinds}", "shape", "reason"), exact, max_rows),
            [*matrices[:1], *matrices[1:][:max_rows], *text.rest(matrices[1:], max_rows)],
            [*self.traffic.lines(), *([] if self.offloaded else text.stage_3_hint(config, self.leaves, device))],
        ]
        return [part for lines in sections if lines for part in ("", *lines)][1:]

    def table(self, *, max_rows: int | None = 40) -> str:
        """Returns the plan as text: bytes by term, one row per parameter, the leaves that stay whole.

        Args:
          max_rows: Rows per section; the rest is only counted. `None` for all rows.
        """
        return printed(self.parts(max_rows=max_rows))

    def summary(self) -> dict[str, Any]:
        """Returns what identifies it among other plans of the same model, as plain data."""
        return {
            "stage": self.config.stage,
            "num_shards": self.num_shards,
            "mesh": {str(name): int(size) for name, size in self.mesh.shape.items()},
            "parameters": sum(leaf.param.size for leaf in self.leaves),
            "bytes_per_device": self.bytes_per_device._asdict(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data: bytes by term, one row per parameter, the leaves that stay whole."""
        config = self.config
        rows = [
            {**text.leaf_data(x.param, x.compute_dtype, trained=x.trained), "offloaded": i in self.offloaded}
            for i, x in enumerate(self.leaves)
        ]
        rows += [text.leaf_data(x, x.compute_dtype, trained=False) for x in self.other_leaves if x.is_param]
        device, host, whole = self.bytes_per_device, self.host_bytes_per_device, self.replicated_bytes
        terms = {"bytes_per_device": device, "host_bytes_per_device": host, "bytes_replicated": whole}
        return {
            "stage": config.stage,
            "axis": "+".join(shard_axes(config)),
            "num_shards": self.num_shards,
            "mesh": self.summary()["mesh"],
            "persistence_threshold": config.persistence_threshold,
            "padding_threshold": config.most_unpadded,
            **{name: {**as_data(x), "total": x.total} for name, x in terms.items()},
            "sent_bytes": as_data(self.sent_bytes()),
            "secondary_bytes": self.traffic.secondary_bytes,
            "parameters": rows,
            **picked(self, "disk_bytes_per_device", "gathered_bytes", "kept", "unquantized", "matrices", "replicated"),
        }
