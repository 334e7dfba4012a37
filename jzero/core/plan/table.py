"""The rows of a plan's text and data: of leaves, of bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jzero.core.base.text import Part, Table, as_data, picked
from jzero.core.base.types import DType
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.mesh import AnyMesh, axis_size, batch_axes, row_axes, shard_axes
from jzero.core.plan.planned_bytes import BytesPerDevice

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


def head_lines(config: ZeroConfig, mesh: AnyMesh, leaves: Iterable[StateLeaf]) -> list[Part]:
    """Returns the stage, the mesh, and the mesh axes over which neither the batch nor any of the leaves is split."""
    axes, num_shards = ", ".join(f"{name}={size}" for name, size in mesh.shape.items()), axis_size(mesh, config)
    lines: list[Part] = [
        f"ZeRO stage {config.stage} over {', '.join(map(repr, shard_axes(config)))} (N={num_shards}), "
        f"mesh ({axes}), batch over {row_axes(config)}"
    ]
    if config.stage and num_shards == 1:
        lines.append(ALONE)
    used = {*batch_axes(config), *jax.tree.leaves([tuple(x.base) for x in leaves])}
    idle = [f"{name!r} ({size})" for name, size in mesh.shape.items() if size > 1 and name not in used]
    if idle:
        lines.append(f"neither batch nor state is split over {', '.join(idle)}: these devices repeat each other's work")
    return lines


def bytes_table(device: BytesPerDevice, host: BytesPerDevice, disk: int, replicated: BytesPerDevice) -> Table:
    """Returns bytes by term: on devices, on the host, on disk, and if nothing were partitioned."""
    rows = {"this plan": device, **({"on the host": host} if any(host) else {})}
    rows |= {"on disk, two copies": BytesPerDevice(0, 0, disk)} if disk else {}
    rows["replicated"] = replicated
    texts = [(name, *map(format_bytes, (*x, x.total))) for name, x in rows.items()]
    return Table([("bytes per device", *BytesPerDevice._fields, "total"), *texts], left=5, rule=True)


def stage_3_hint(config: ZeroConfig, leaves: Sequence[LeafPlan], device: BytesPerDevice) -> list[str]:
    """Suggests stage 3 with kept parameters, at stages 1 and 2, if that takes less memory."""
    saved = 0
    for leaf in leaves:
        rule = config.rule_for(leaf.path).persistent
        stays = leaf.param.size <= config.persistence_threshold if rule is None else rule
        if leaf.param.cut is None and leaf.grad.cut is not None and not stays:
            saved += leaf.param.bytes_per_device
            if leaf.master is None:  # a master is what stage 3 stores
                saved -= dataclasses.replace(leaf.param, cut=leaf.grad.cut).bytes_per_device
    if config.stage not in (1, 2) or not saved:
        return []
    here = device.params + device.opt_state
    return [
        "`stage=3, reshard_after_forward=False` gathers as much in each micro-batch, beside its forward pass instead of"
        f" after the update: params and opt_state take {format_bytes(here - saved)} then, not {format_bytes(here)}"
    ]


PARAM_TITLES = ("parameter", "shape", "stored as", "gradient", "master", "scan", "optimizer state")


def param_row(leaf: LeafPlan, config: ZeroConfig, opt_leaves: Iterable[StateLeaf]) -> Row:
    """Returns the row of a parameter, with the memories of some of its optimizer state."""
    scan = "" if leaf.scan_dim is None else f"dim {leaf.scan_dim}"
    grad = _placement(leaf.grad, config) if leaf.trained else "none: not trained"
    master = "" if leaf.master is None else _placement(leaf.master, config)
    where = ", ".join(sorted({_memory(x, config) for x in opt_leaves}))
    return (leaf.path, str(leaf.param.shape), _placement(leaf.param, config), grad, master, scan, where)


def frozen_row(leaf: StateLeaf, config: ZeroConfig) -> Row:
    """Returns the row of a parameter outside of the optimizer."""
    return (leaf.path, str(leaf.shape), _placement(leaf, config), "none: not trained", "", "", "")


def section(titles: Row, rows: Sequence[Row], max_rows: int | None) -> list[Part]:
    """Returns a table of the first rows, without the columns that are empty; nothing if there are no rows."""
    table = Table([titles, *rows[:max_rows]], left=len(titles), optional=titles, rule=True)
    return [table, *rest(rows, max_rows)] if rows else []


def rest(rows: Sequence[object], max_rows: int | None) -> list[str]:
    """Returns the line that counts the rows that are not shown, if there are any."""
    hidden = 0 if max_rows is None else len(rows) - max_rows
    return [f"... {hidden} more (plan.table(max_rows=None))"] if hidden > 0 else []


def _memory(leaf: StateLeaf, config: ZeroConfig) -> str:
    """Returns a leaf's memory as the table names it."""
    return config.offload.records_in if leaf.in_records else leaf.memory


def _placement(leaf: StateLeaf, config: ZeroConfig) -> str:
    where = {"device": "", "host": ", on the host", "disk": ", on disk"}[_memory(leaf, config)]
    if leaf.cut is None:
        return (
            f"{leaf.dtype} whole"
            + (f" over {', '.join(shard_axes(config))}, {leaf.base}" if any(leaf.base) else "")
            + where
        )
    if leaf.cut.blocks is not None:
        return f"{leaf.dtype} as {leaf.cut.blocks.kind}, cut on dim {leaf.cut.packed_dim}{where}"
    text = f"dims {leaf.cut.dim}.. flattened" if leaf.cut.flat else f"dim {leaf.cut.dim}"
    padding = f", padded {leaf.cut.natural_size}->{leaf.cut.stored_size}" if leaf.cut.is_padded else ""
    beside = [f", dim {d} over {'+'.join(jax.tree.leaves(names))}" for d, names in enumerate(leaf.base) if names]
    return f"{leaf.dtype} cut on {text}{padding}{''.join(beside)}{where}"


def leaf_data(leaf: StateLeaf, compute_dtype: DType | None, *, trained: bool) -> dict[str, Any]:
    """Returns a parameter as plain data."""
    return {
        **picked(leaf, "path", "shape", "stored_shape"),
        "spec": as_data(tuple(leaf.spec)),
        "dtype": str(leaf.dtype),
        "compute_dtype": str(compute_dtype),
        "stored_dtype": str(leaf.stored_dtype),
        "trained": trained,
        "padding": 0 if leaf.cut is None else leaf.cut.padding,
    }
