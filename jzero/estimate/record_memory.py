"""The device memory of an update on records, beside the state, from a plan.

`estimate_step_memory` takes the larger of this peak and that of loss and gradients, whose program ends before. All
reduced gradients are on the device, and the shards of new parameters. Beside them either records pass through, or
parameters that every device stores unsharded are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jzero.core.jaxpr.sizes import itemsize
from jzero.core.plan.plan import ZeroPlan
from jzero.estimate.buffers import BufferKind
from jzero.estimate.footprint import regathered_bytes


def update_at_peak(plan: ZeroPlan, *, gpu: bool, limit: float) -> Mapping[BufferKind, int]:
    """Returns the bytes at the peak of an update on records, by purpose.

    Args:
      plan: The plan of a state in records.
      gpu: Whether XLA compiles for GPUs, where it gathers new parameters together.
      limit: The bytes that its scheduler plans with.
    """
    on_device = [leaf.grad for leaf in plan.leaves if leaf.trained and leaf.param.memory != "host"]
    grads = sum(leaf.bytes_per_device for leaf in on_device)
    new = sum(math.prod(plan.leaves[i].grad.part_shape) * _result_bytes(plan, i) for i in plan.record_fields)
    unsharded = [leaf.param for leaf in plan.leaves if leaf.trained and not leaf.param.cut and leaf.grad.cut]
    sizes = [leaf.bytes_per_device for leaf in unsharded] if gpu else []
    gathered, moving = regathered_bytes(sizes, limit), _moving_bytes(plan)
    return {
        "activations": 0,
        "gradients": grads,
        "gathered": gathered if gathered > moving else 0,
        "working": new + (0 if gathered > moving else moving),
    }


def _moving_bytes(plan: ZeroPlan) -> int:
    """Returns the bytes of the records that pass through a device at a time."""
    offload = plan.config.offload
    if offload.compute == "host":
        return 0
    sizes = []
    for i, fields in plan.record_fields.items():
        leaf = plan.leaves[i]
        # Fields pass both ways; the gradient, and a parameter without a master, come in; the new parameter goes out.
        read = itemsize(leaf.grad.dtype) + (0 if leaf.master else itemsize(leaf.param.dtype))
        per_element = 2 * sum(itemsize(x.dtype) for x in fields) + read + _result_bytes(plan, i)
        sizes.append(per_element * max(record.size for record in plan.record_boxes(i)))
    return (2 * offload.disk_threads + 1) * max(sizes, default=0)


def _result_bytes(plan: ZeroPlan, i: int) -> int:
    """Returns the bytes of an element of a new parameter; one on the host is never complete on the device."""
    leaf = plan.leaves[i].param
    return 0 if leaf.memory == "host" else itemsize(leaf.dtype)
