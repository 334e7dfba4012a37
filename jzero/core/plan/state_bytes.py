"""The bytes of a training state on one device, on its host and on its disk, padding included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jzero.core.config.precision import wide_dtype
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import Memory
from jzero.core.layout.records import field_offsets
from jzero.core.plan.state_layout import StateLayout


class BytesPerDevice(NamedTuple):
    """Bytes on one device, by term. `grads` is the maximum during a step."""

    params: int
    grads: int
    opt_state: int

    @property
    def total(self) -> int:
        """Sum of the terms."""
        return self.params + self.grads + self.opt_state


def device_bytes(plan: StateLayout) -> BytesPerDevice:
    """Returns `ZeroPlan.bytes_per_device`."""
    grads = [leaf.grad for leaf in plan.leaves if leaf.trained]
    if plan.config.stage < 2:
        grads = [dataclasses.replace(leaf, cut=None) for leaf in grads]
    return BytesPerDevice(
        params=_sum_bytes(plan.all_params),
        grads=_sum_bytes(grads),
        opt_state=_sum_bytes(plan.opt_leaves) + _chosen_bytes(plan),
    )


def host_bytes(plan: StateLayout) -> BytesPerDevice:
    """Returns `ZeroPlan.host_bytes_per_device`."""
    offload, grads = plan.config.offload, [plan.leaves[i].grad for i in plan.record_fields]
    sums = [dataclasses.replace(x, dtype=wide_dtype(x.dtype)) for x in grads]
    records = 0 if offload.optimizer == "disk" else record_bytes(plan) * (1 if offload.delay else 2)
    return BytesPerDevice(
        params=_sum_bytes(plan.all_params, "host"),
        grads=2 * _sum_bytes(sums) if offload.zenflow else _sum_bytes(grads) if offload.delay else 0,
        opt_state=_sum_bytes(plan.opt_leaves, "host") + records,
    )


def replicated_bytes(plan: StateLayout) -> BytesPerDevice:
    """Returns `ZeroPlan.replicated_bytes`."""
    terms = (plan.all_params, [leaf.grad for leaf in plan.leaves if leaf.trained], plan.opt_leaves)
    return BytesPerDevice(*(sum(array_bytes(leaf.size, leaf.dtype) for leaf in leaves) for leaves in terms))


def record_bytes(plan: StateLayout) -> int:
    """Returns the bytes of one device's records."""
    sizes = (
        field_offsets([leaf.dtype for leaf in fields], record.size)[-1]
        for i, fields in plan.record_fields.items()
        for record in plan.record_boxes(i)
    )
    return sum(sizes)


def _chosen_bytes(plan: StateLayout) -> int:
    """Returns the bytes of masters and optimizer state of the columns that one device has chosen."""
    total = 0
    for i, fields in plan.record_fields.items():
        leaf = plan.leaves[i].grad
        share = plan.num_chosen(leaf) / leaf.part_shape[leaf.column_dim]
        total += round(share * sum(x.bytes_per_device for x in fields))
    return total


def _sum_bytes(leaves: Sequence[StateLeaf], memory: Memory = "device") -> int:
    return sum(leaf.bytes_per_device for leaf in leaves if leaf.memory == memory)
