"""What holds for single keys in some configurations, in place of their rows; and what values become arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jzero.core.config.offload import ZenFlow
from jzero.deepspeed.facts import (
    BATCH_KEYS,
    ZERO,
    asked_params_home,
    compute_dtype,
    is_alone_on_disk,
    is_on_disk,
    optimizer_home,
    params_home,
    sizes,
    stage,
)
from jzero.deepspeed.key import Parsed, Ruling, where
from jzero.deepspeed.kinds import NO_CAP

THREADS = "aio.intra_op_parallelism"
ADAM_BYTES = 12
"""Per parameter: its fp32 master and Adam's two moments."""
CHUNK_IN_WORDS = "`Offload.chunk_bytes` = 16 MiB"
REPLICA_AXIS, NODE_AXIS = "replica", "node"


def partitions(c: Parsed, path: str) -> Ruling | None:
    """The rule for all keys of `zero_optimization` but the stage."""
    is_off = stage(c) == 0 and path != f"{ZERO}.stage"
    return Ruling("ignored", "stage 0 partitions nothing") if is_off else None


def switched_on(c: Parsed, path: str) -> Ruling | None:
    """The rule for the keys of a block with a switch; "auto" leaves the switch itself undecided."""
    switch = f"{path.partition('.')[0]}.enabled"
    is_on = c[switch] or (path == switch and c.is_auto(path))
    return None if is_on else Ruling("ignored", f"`{switch}` is not true")


at_1_2 = where(lambda c: stage(c) not in (1, 2), "DeepSpeed reads it at stages 1 and 2 only")
at_3 = where(lambda c: stage(c) != 3, "DeepSpeed reads it at stage 3 only")
params_at_3 = where(lambda c: stage(c) < 3 and asked_params_home(c) != "none", "DeepSpeed reads it at stage 3 only")
not_replaced = where(lambda c: c.has_optimizer, "`optimizer=` was given in its place")
fetched_early = where(
    lambda c: asked_params_home(c) != "none",
    "parameters that are offloaded are fetched where they are gathered",
    "compiler",
)
both_on_disk = where(is_alone_on_disk, "it also needs `offload_optimizer.device: nvme`; or set cpu", "refused")
offloaded = where(lambda c: optimizer_home(c) == "none", "no optimizer state is offloaded")
params_on_devices = where(
    lambda c: params_home(c) != "none", "parameters are offloaded, too: it needs them on the devices", "refused"
)
has_zenflow = where(lambda c: not any(x.startswith(f"{ZERO}.zenflow.") for x in c.entries), "there is no such block")
by_steps = where(
    lambda c: c[f"{ZERO}.zenflow.select_strategy"] == "epoch", "steps do not know epochs: set it to step", "refused"
)
on_disk = where(lambda c: not is_on_disk(c), "no optimizer state goes to NVMe")
pinned = where(is_on_disk, "records pass through buffers of their own")
copied = where(is_on_disk, "records are read ahead and written behind")
many_threads = where(lambda c: c[THREADS] <= 1, "DeepSpeed's default; `Offload.disk_threads` stays 2")
dynamic = where(lambda c: c["fp16.loss_scale"] != 0, "the loss scale is static")
some_modules = where(lambda c: c["data_types.keep_in_fp32_modules"] == [], "off")
more_than_one = where(lambda c: c["tensor_parallel"] in ({"autotp_size": 0}, {"autotp_size": 1}), "off")


def tiles(c: Parsed, path: str) -> Ruling:
    """What the tiles of an update are here."""
    notes = {
        "none": "tiles of an update on the host",
        "disk": f"a record is one request: {CHUNK_IN_WORDS}",
        "host": f"its tiles stay in host memory. jzero's chunks, {CHUNK_IN_WORDS}, pass through the device: at "
        f"{ADAM_BYTES} bytes an element (master and moments) this size would be {c[path] * ADAM_BYTES}",
    }
    return Ruling("ignored", notes[optimizer_home(c)])


def size(c: Parsed, path: str) -> str | None:
    """Returns a batch size, in words."""
    found = sizes(c)[BATCH_KEYS.index(path)]
    return None if found is None else f"{found}, which follows from the others"


def clips(c: Parsed, path: str) -> Ruling:
    """What DeepSpeed does without `gradient_clipping`."""
    return Ruling("honoured", "DeepSpeed's default, 1.0: `make_train_step(clip_norm=)`")


def travel_bytes(c: Parsed, path: str) -> int | None:
    """Returns the bytes of a number of elements of the dtype that travels; `None` for DeepSpeed's default."""
    dtype = c["communication_data_type"] if path.endswith("reduce_bucket_size") else None
    return min(c[path] * jnp.dtype(dtype or compute_dtype(c)).itemsize, NO_CAP) if c.sets(path) else None


def bucket(c: Parsed, path: str) -> int | None:
    """Returns the bytes of a bucket; of 0 elements, each leaf is alone in its own."""
    found = travel_bytes(c, path)
    return 1 if found == 0 else found


@dataclasses.dataclass(frozen=True)
class Groups:
    """A key that sets the devices of a group.

    Attributes:
      least: The smallest group.
      alone: The note if one group has all devices.
      fields: The arguments that make groups; the first is the mesh axis over them.
    """

    least: int
    alone: str
    fields: Mapping[str, Any]

    def rule(self, c: Parsed, path: str) -> Ruling:
        """The rule for the key."""
        devices, number = c[path], "..."
        if devices < self.least:
            return Ruling("ignored", "off")
        if devices == c.num_devices:
            return Ruling("honoured", f"all devices: {self.alone}")
        if c.num_devices is not None:
            number = str(c.num_devices // devices)
        arguments = ", ".join(f"`{name}={value!r}`" for name, value in self.fields.items())
        mesh = f"jzero.make_mesh({next(iter(self.fields.values()))}={number}, data={devices})"
        return Ruling("honoured", f"{arguments}: needs `mesh={mesh}`")

    def value(self, c: Parsed, path: str) -> Mapping[str, Any]:
        """Returns the arguments."""
        return {} if c[path] == c.num_devices else self.fields


NODES = Groups(2, "there is one node", {"node_axis": NODE_AXIS, "secondary_params": True})
REPLICAS = Groups(1, "nothing is replicated", {"replica_axis": REPLICA_AXIS})


def has_groups(c: Parsed, path: str) -> Ruling | None:
    """The rule for gathers in two levels."""
    devices = c[f"{ZERO}.mics_shard_size"]
    if not c[path]:
        return None
    if devices < REPLICAS.least or devices == c.num_devices:
        return Ruling("ignored", "`mics_shard_size` makes no groups")
    mesh = f"jzero.make_mesh({REPLICA_AXIS}=..., {NODE_AXIS}=..., data=...)"
    needs = f"needs `mesh={mesh}`, with the nodes of a group and {devices} devices"
    return Ruling("honoured", f"`node_axis={NODE_AXIS!r}`: {needs}")


def interval(c: Parsed, path: str = f"{ZERO}.zenflow.update_interval") -> int:
    """Returns ZenFlow's steps between updates on the host."""
    return c[path] or ZenFlow().update_interval


def rounded_steps(c: Parsed, path: str) -> int:
    """Returns steps, rounded up to a multiple of `update_interval`."""
    return -(-_asked_steps(c, path) // interval(c)) * interval(c)


def _asked_steps(c: Parsed, path: str) -> int:
    name = c.keys[path].target.removeprefix("ZenFlow.")
    return getattr(ZenFlow(), name) if c[path] is None else c[path]


def multiple(c: Parsed, path: str) -> Ruling | None:
    """The rule for steps that must be a multiple of `update_interval`."""
    note = f"{in_words(c, path)}, the next multiple of `update_interval`"
    return None if rounded_steps(c, path) == _asked_steps(c, path) else Ruling("honoured", note)


def in_words(c: Parsed, path: str) -> str:
    """Returns the argument that a key becomes."""
    key = c.keys[path]
    return f"`{key.target}={key.value(c, path)}`"


def one_precision(c: Parsed, path: str) -> str | None:
    """Returns why a switch of a precision that is "auto" is off, in words."""
    other = {"fp16.enabled": "bf16.enabled", "bf16.enabled": "fp16.enabled"}[path]
    return f"false, since `{other}` is true" if c[other] else None


def skips_by_default(c: Parsed, path: str) -> Ruling | None:
    """What DeepSpeed does without `check_grad_overflow`."""
    is_on = c["bf16.enabled"] and stage(c) in (1, 2)
    return Ruling("honoured", "DeepSpeed's default, true: `Precision.skip_nonfinite`") if is_on else None


def skips(c: Parsed, path: str) -> bool | None:
    """Returns whether steps with overflows are skipped."""
    return c[path] if c.sets(path) or skips_by_default(c, path) else None


def accumulates(c: Parsed, path: str) -> str | None:
    """Returns the dtype of sums of gradients: jzero would take that in which it reduces."""
    return c[path] or (compute_dtype(c) if c["communication_data_type"] else None)
