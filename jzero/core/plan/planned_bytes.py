"""What the layout of a train state costs: bytes by term and memory, and what devices exchange in a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from jzero.core.config.precision import wide_dtype
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.box import field_offsets
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import mesh_platform
from jzero.core.layout.placement import Memory
from jzero.core.plan.state_layout import StateLayout
from jzero.core.plan.traffic import LevelBytes, Traffic, UnquantizedLeaf

Term = Literal["params", "grads", "opt_state", "other"]


class WholeLeaf(NamedTuple):
    """A leaf that every device of the ZeRO axis holds whole."""

    term: Term
    path: str
    shape: tuple[int, ...]
    num_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBytes(StateLayout):
    """A layout, and what it costs."""

    def check_host_memory(self) -> None:
        """Raises if arrays belong in host memory, but devices report no memories and would keep them."""
        if not self.names_host_memory and any(self.host_bytes_per_device):
            raise ValueError(
                f"The plan keeps {self.host_bytes_per_device.total} bytes per device in host memory, but these devices "
                f"({mesh_platform(self.mesh)}) do not say what memories they have, so nothing can be placed "
                "there. Set `offload=jzero.Offload()`."
            )

    @functools.cached_property
    def host_bytes_per_device(self) -> BytesPerDevice:
        """Bytes of one device in host memory, by term, padding included.

        Gradients count if they wait there for a later step (`Offload.delay`), or are added up (`Offload.zenflow`: one
        sum, and one that is being applied).
        """
        return host_bytes(self)

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
