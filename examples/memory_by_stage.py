"""Measures the bytes on one device at each ZeRO stage, and in replicated training, from live buffers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import rich.table

import jzero

STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes in the memory of one device, and in that of its host, for one way of training."""

    label: str
    params: int
    grads: int
    opt_state: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.params + self.grads + self.opt_state


def measure(
    state: Any,
    params_and_opt_state: Callable[[Any], tuple[Any, Any]],
    *,
    config: jzero.ZeroConfig,
    mesh: jax.sharding.Mesh,
) -> list[DeviceBytes]:
    """Shards a train state for every stage, and measures it; the first row is replicated training.

    Gradients live only inside a step, so their bytes come from the plan, and for replicated training from the
    parameters.

    Args:
      state: A sharded train state, of any stage; consumed.
      params_and_opt_state: Returns the two trees to measure from a state.
      config: The ZeRO settings; its stage is replaced.
      mesh: The mesh to shard over.
    """
    device = jax.local_devices()[0]
    state = jzero.unshard_train_state(state)
    params, opt_state = (bytes_on(device, tree) for tree in params_and_opt_state(state))
    rows = [DeviceBytes("replicated", params, params, opt_state)]
    for stage in STAGES:
        state = jzero.shard_train_state(state, config=dataclasses.replace(config, stage=stage), mesh=mesh)
        params, opt_state = (bytes_on(device, tree) for tree in params_and_opt_state(state))
        grads = jzero.plan_of(state).bytes_per_device.grads
        host = bytes_on(device, params_and_opt_state(state), memory="pinned_host")
        rows.append(DeviceBytes(f"stage {stage}", params, grads, opt_state, host))
    return rows


def bytes_on(device: jax.Device, tree: Any, memory: str = "device") -> int:
    """Returns the bytes of a tree's buffers on one device, or in its host's memory."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == memory]
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def as_table(rows: list[DeviceBytes], *, num_devices: int) -> rich.table.Table:
    """Returns the measurements as a table; shares are of replicated training, the first row."""
    table = rich.table.Table(title=f"Bytes per device on {num_devices} devices")
    table.add_column("")
    for heading in ("params", "grads (plan)", "optimizer", "total", "share"):
        table.add_column(heading, justify="right")
    offloads = any(row.host for row in rows)
    if offloads:
        table.add_column("on the host", justify="right")
    for row in rows:
        terms = [f"{value:,}" for value in (row.params, row.grads, row.opt_state, row.total)]
        host = [f"{row.host:,}"] if offloads else []
        table.add_row(row.label, *terms, f"{row.total / rows[0].total:.1%}", *host)
    return table
