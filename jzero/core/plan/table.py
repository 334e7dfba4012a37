"""Formats a plan as a text table, or as data for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jzero.core.base.text import Part, Table, as_data, picked
from jzero.core.base.types import DType
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.mesh import batch_axes, row_axes, shard_axes
from jzero.core.plan.planned_bytes import PlannedBytes, WholeLeaf

T = TypeVar("T")
Row = Sequence[str]

ALONE = (
    "one device: nothing is partitioned; without accelerators, `jax.config.update('jax_num_cpu_devices', 8)` before\n"
    "jax is used makes eight devices of the CPU"
)


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes with a binary unit, e.g. `'1.50 MiB'`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def plan_parts(plan: PlannedBytes, *, max_rows: int | None) -> list[Part]:
    """Returns what `plan` prints, see `ZeroPlan.table`."""
    config = plan.config
    axes = ", ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
    head = (
        f"ZeRO stage {config.stage} over {', '.join(map(repr, shard_axes(config)))} (N={plan.num_shards}), "
        f"mesh ({axes}), batch over {row_axes(config)}"
    )
    if config.stage and plan.num_shards == 1:
        head += f"\n{ALONE}"
    idle = _idle_axes(plan)
    if idle:
        head += f"\nneither batch nor state is split over {', '.join(idle)}: these devices repeat each other's work"
    params: list[LeafPlan | StateLeaf] = [*plan.leaves, *(leaf for leaf in plan.other_leaves if leaf.is_param)]
    header: Row = ("parameter", "shape", "stored as", "gradient", "master", "scan", "optimizer state")
    sections: list[list[Part]] = [
        [head],
        [Table(_memory_rows(plan), left=5, rule=True)],
        _table(header, params, lambda x: _param_row(x, plan), max_rows),
    ]
    if plan.replicated:
        header = ("whole on every device", "path", "shape", "bytes", "reason")
        sections.append(_table(header, plan.replicated, _whole_row, max_rows))
    if plan.unquantized:
        kinds = ", ".join(sorted({*dataclasses.astuple(plan.config.quantization)} - {"none"}))
        header = (f"as they are, not {kinds}", "shape", "reason")
        sections.append(_table(header, plan.unquantized, lambda x: (x.path, str(x.shape), x.reason), max_rows))
    if work := plan.matrices.lines(", ".join(shard_axes(config)), plan.num_shards):
        sections.append([work[0], *work[1:][:max_rows], *_rest(len(work) - 1, max_rows)])
    gathered = f"gathered per step: {format_bytes(plan.gathered_bytes)}"
    if plan.traffic.gathers_of_loss:
        gathered += ", without what the loss's own jax.checkpoint adds (estimate_step_memory counts it)"
    sections.append([gathered, *_kept_lines(plan), *_level_lines(plan), *_stage_3_line(plan)])
    return [part for section in sections for part in ("", *section)][1:]


def _memory_rows(plan: PlannedBytes) -> list[Row]:
    """Returns bytes by term: on devices, on the host, on disk, and if nothing were partitioned."""
    ours, host, replicated = plan.bytes_per_device, plan.host_bytes_per_device, plan.replicated_bytes
    taken = plan.disk_bytes_per_device
    rows = {"this plan": (*ours, ours.total)}
    rows |= {"on the host": (*host, host.total)} if any(host) else {}
    rows |= {"on disk, two copies": (0, 0, taken, taken)} if taken else {}
    rows["replicated"] = (*replicated, replicated.total)
    header: Row = ("bytes per device", "params", "grads", "opt_state", "total")
    return [header, *((name, *map(format_bytes, sizes)) for name, sizes in rows.items())]


def _kept_lines(plan: PlannedBytes) -> list[str]:
    """Returns what stays on a device between the passes."""
    kept = plan.kept
    if kept is None:
        return []
    params = "all parameters" if len(kept.params) == kept.of_params else f"{len(kept.params)} of {kept.of_params}"
    blocks = f"{kept.blocks} of {kept.of_blocks} blocks"
    if kept.peak is not None and kept.limit is not None:  # its parts would not add up: compilers fuse what blocks save
        said = ([params] if kept.params else []) + ([blocks] if kept.of_blocks else [])
        fits = f"{format_bytes(kept.peak)} of {format_bytes(kept.limit)}, estimated"
        return [f"kept between passes: {', '.join(said)}: {fits} (`remat='cheap'` keeps less)"]
    said = [f"{params} ({format_bytes(kept.param_bytes)})"] if kept.params else []
    said += [f"{blocks} ({format_bytes(kept.block_bytes)})"] if kept.of_blocks else []
    return [f"kept between passes: {', '.join(said) or 'nothing'}"]


def _stage_3_line(plan: PlannedBytes) -> list[str]:
    """Suggests stage 3 with kept parameters, at stages 1 and 2, if that takes less memory."""
    config, saved = plan.config, 0
    for leaf in plan.leaves:
        rule = config.rule_for(leaf.path).persistent
        stays = leaf.param.size <= config.persistence_threshold if rule is None else rule
        if leaf.param.cut is None and leaf.grad.cut is not None and not stays:
            saved += leaf.param.bytes_per_device
            if leaf.master is None:  # a master is what stage 3 stores
                saved -= dataclasses.replace(leaf.param, cut=leaf.grad.cut).bytes_per_device
    if config.stage not in (1, 2) or plan.offloaded or not saved:
        return []
    here = plan.bytes_per_device.params + plan.bytes_per_device.opt_state
    return [
        "`stage=3, reshard_after_forward=False` gathers as much in each micro-batch, beside its forward pass instead of"
        f" after the update: params and opt_state take {format_bytes(here - saved)} then, not {format_bytes(here)}"
    ]


def _level_lines(plan: PlannedBytes) -> list[str]:
    """Returns what each device sends within and between nodes, and what the options for nodes cost."""
    over_nodes = plan.config.node_axis
    if over_nodes is None:
        return []
    if plan.mesh.shape[over_nodes] == 1:
        return [f"one node along {over_nodes!r}: there is nothing between nodes"]
    sent = plan.sent_bytes()
    lines = [
        f"sent per step and device: {format_bytes(sent.within)} within nodes, {format_bytes(sent.between)} between them"
    ]
    if plan.config.secondary_params:
        lines.append(f"secondary parameters: {format_bytes(plan.traffic.secondary_bytes)} per device during a step")
    return lines


def _idle_axes(plan: PlannedBytes) -> list[str]:
    """Returns the mesh axes over which neither batch nor state is split."""
    leaves = [*(leaf.param for leaf in plan.leaves), *plan.opt_leaves, *plan.other_leaves]
    used = {*batch_axes(plan.config), *jax.tree.leaves([tuple(x.base) for x in leaves])}
    return [f"{name!r} ({size})" for name, size in plan.mesh.shape.items() if size > 1 and name not in used]


def _param_row(leaf: LeafPlan | StateLeaf, plan: PlannedBytes) -> Row:
    if isinstance(leaf, StateLeaf):  # outside of the optimizer
        return (leaf.path, str(leaf.shape), _placement(leaf, plan), "none: not trained", "", "", "")
    scan = "" if leaf.scan_dim is None else f"dim {leaf.scan_dim}"
    grad = _placement(leaf.grad, plan) if leaf.trained else "none: not trained"
    master = "" if leaf.master is None else _placement(leaf.master, plan)
    memories = {_memory(x, plan) for _, x in plan.opt_leaves_of[plan.indices[leaf.path]]} if plan.offloaded else ()
    where = ", ".join(sorted(memories))
    return (leaf.path, str(leaf.param.shape), _placement(leaf.param, plan), grad, master, scan, where)


def _whole_row(leaf: WholeLeaf) -> Row:
    return (leaf.term, leaf.path, str(leaf.shape), format_bytes(leaf.num_bytes), leaf.reason)


def _memory(leaf: StateLeaf, plan: PlannedBytes) -> str:
    """Returns a leaf's memory as the table names it."""
    of_records = "host" if plan.config.offload.path is None else "disk"
    return of_records if leaf.in_records else leaf.memory


def _placement(leaf: StateLeaf, plan: PlannedBytes) -> str:
    where = {"device": "", "host": ", on the host", "disk": ", on disk"}[_memory(leaf, plan)]
    if leaf.cut is None:
        return (
            f"{leaf.dtype} whole"
            + (f" over {', '.join(shard_axes(plan.config))}, {leaf.base}" if any(leaf.base) else "")
            + where
        )
    if leaf.cut.blocks is not None:
        return f"{leaf.dtype} as {leaf.cut.blocks.kind}, cut on dim {leaf.cut.packed_dim}{where}"
    text = f"dims {leaf.cut.dim}.. flattened" if leaf.cut.flat else f"dim {leaf.cut.dim}"
    padding = f", padded {leaf.cut.natural_size}->{leaf.cut.stored_size}" if leaf.cut.is_padded else ""
    beside = [f", dim {d} over {'+'.join(jax.tree.leaves(names))}" for d, names in enumerate(leaf.base) if names]
    return f"{leaf.dtype} cut on {text}{padding}{''.join(beside)}{where}"


def _table(header: Row, items: Sequence[T], row: Callable[[T], Row], max_rows: int | None) -> list[Part]:
    """Returns a table of the first items."""
    table = Table([header, *map(row, items[:max_rows])], left=len(header), optional=header, rule=True)
    return [table, *_rest(len(items), max_rows)]


def _rest(num_items: int, max_rows: int | None) -> list[str]:
    """Returns the line that counts the items that are not shown, if there are any."""
    hidden = 0 if max_rows is None else num_items - max_rows
    return [f"... {hidden} more (plan.table(max_rows=None))"] if hidden > 0 else []


def plan_as_dict(plan: PlannedBytes) -> dict[str, Any]:
    """Returns `plan` as data for JSON, see `ZeroPlan.to_dict`."""
    config = plan.config
    terms = {
        "bytes_per_device": plan.bytes_per_device,
        "host_bytes_per_device": plan.host_bytes_per_device,
        "bytes_replicated": plan.replicated_bytes,
    }
    rows = [
        {**_as_dict(leaf.param, plan, leaf.compute_dtype, leaf.trained), "offloaded": i in plan.offloaded}
        for i, leaf in enumerate(plan.leaves)
    ]
    rows += [_as_dict(x, plan, x.compute_dtype, trained=False) for x in plan.other_leaves if x.is_param]
    return {
        "stage": config.stage,
        "axis": "+".join(shard_axes(config)),
        "num_shards": plan.num_shards,
        "mesh": {str(name): int(size) for name, size in plan.mesh.shape.items()},
        "persistence_threshold": config.persistence_threshold,
        "padding_threshold": config.most_unpadded,
        **{name: {**as_data(x), "total": x.total} for name, x in terms.items()},
        "sent_bytes": as_data(plan.sent_bytes()),
        "secondary_bytes": plan.traffic.secondary_bytes,
        "parameters": rows,
        **picked(plan, "disk_bytes_per_device", "gathered_bytes", "kept", "unquantized", "matrices", "replicated"),
    }


def plan_summary(plan: PlannedBytes) -> dict[str, Any]:
    """Returns what identifies a plan among others of the same model, as data for JSON."""
    return {
        "stage": plan.config.stage,
        "num_shards": plan.num_shards,
        "mesh": {str(name): int(size) for name, size in plan.mesh.shape.items()},
        "parameters": sum(leaf.param.size for leaf in plan.leaves),
        "bytes_per_device": plan.bytes_per_device._asdict(),
    }


def _as_dict(leaf: StateLeaf, plan: PlannedBytes, compute_dtype: DType | None, trained: bool) -> dict[str, Any]:
    return {
        **picked(leaf, "path", "shape", "stored_shape"),
        "spec": as_data(tuple(leaf.spec)),
        "dtype": str(leaf.dtype),
        "compute_dtype": str(compute_dtype),
        "stored_dtype": str(leaf.stored_dtype),
        "trained": trained,
        "padding": 0 if leaf.cut is None else leaf.cut.padding,
    }
