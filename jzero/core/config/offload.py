"""What lives in host memory or on a disk, and how it is updated; validated on construction."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from jzero.core.config.settings import Setting, check_fields, integer, number, optional


def byte_count(least: int) -> Setting[int]:
    """A number of bytes of at least `least`."""
    return integer(least, says=f"a number of bytes, an integer >= {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZenFlow:
    """Stall-free updates: columns with the largest gradients are updated at once, the others later, on the host.

    Every `select_interval` steps each device takes the columns of its shards whose gradients are largest. Their masters
    and optimizer state move to the devices, which update them in each step. Gradients of all other columns add up on
    the host. Every `update_interval` steps their mean goes through the optimizer there, beside the steps of the next
    interval, at whose end the new values count. The devices also update the leaves that each of them holds whole.

    **This changes the numbers.** Use it only where the update takes longer than a step, after more micro-batches and
    `delay=1`; the guide to offload shows what each costs.

    Attributes:
      topk_ratio: Share of the columns that the devices update, from 0 to 1.
      update_interval: Steps whose gradients are added up for the other columns.
      select_interval: Steps between choices of columns, a multiple of `update_interval`.
      overlap: Whether the update of the other columns runs beside the next interval. Otherwise the last step of each
        interval waits for it.
      warm_up_steps: Steps at the start in which everything is updated at once, a multiple of `update_interval`.

    Raises:
      ValueError: A field has an impossible value, or two contradict each other.

    Example:
      >>> flow = jzero.ZenFlow(topk_ratio=0.05)
      >>> jzero.Offload(optimizer="host", compute="host", zenflow=flow).zenflow.update_interval
      4

    References:
      Lan et al., ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates, 2025.
      DeepSpeed's `zenflow`.
    """

    topk_ratio: float = 0.1
    update_interval: int = 4
    select_interval: int = 64
    overlap: bool = True
    warm_up_steps: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "topk_ratio": number("a number from 0 to 1", lambda x: 0 <= x <= 1),
            "update_interval": integer(1),
            "select_interval": integer(1),
            "warm_up_steps": integer(0),
        }
        check_fields(self, allowed, prefix="ZenFlow.")
        for name in ("select_interval", "warm_up_steps"):
            if getattr(self, name) % self.update_interval:
                raise ValueError(
                    f"`ZenFlow.{name}={getattr(self, name)}` must be a multiple of `update_interval`, since gradients "
                    f"that have been added up must count first: got update_interval={self.update_interval}."
                )


def _zenflow(value: object) -> ZenFlow:
    if not isinstance(value, ZenFlow):
        raise TypeError
    return value


def _path(value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError
    return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """The parts of a train state that live in host memory or on a disk, and how they are updated.

    With `optimizer="host"`, master copies and the optimizer state of a parameter's shape (moments) live in pinned
    memory of each device's host, cut as before. The update moves them in chunks: to the device, update, back to the
    host. At stage 3 of a 16-bit precision, the devices then hold 16-bit parameters, and masters are on the host.

    With `params="host"`, at stage 3, the shards of parameters are on the host, too. Each moves to its device just
    before its gather, inside the loop for scanned layers, and again for the backward pass; the update writes it back.
    Gradients move to the host as they are reduced, if all optimizer state is there and there are no micro-batches to
    sum. Only `make_train_step` trains such a state.

    With `compute="host"`, the update runs on the host's CPU: gradients and parameters move to the host, and new
    parameters come back (for fp32 parameters, their updates). That is for slow links, and for elementwise optimizers
    (sums over a leaf, such as LAMB's norms, are fine); others raise an error when a step is traced. It saves traffic (6
    bytes instead of 24 per 16-bit parameter with AdamW) and costs CPU time.

    With `optimizer="disk"`, masters and moments live in files on a fast local disk, and take no memory. A step of
    `make_train_step`, not inside another `jit`, computes loss and gradients, then reads, updates and writes one record
    after another, several at a time. Until all are written, the state is as before: after an error repeat the step, or
    save the state. A model with Adam in 16 bits takes 24 bytes of disk per parameter; 12 are read, and 12 written, per
    step. Give a step more micro-batches (`accumulate_steps`) to make the disk's share of its time small.

    With `params="disk"` beside it, the rows of stacks that a scan runs over (`LeafRule(scan_dim=0)`) are on disk, too.
    A program reads each as it gathers it, forward and backward, in each micro-batch; the update writes it. Evaluation
    reads rows likewise. This is experimental: no GPU or TPU has run it.

    With `delay=1`, a train step applies the gradients of the step before: the update runs in a thread on the host's
    CPU, beside loss and gradients, on records on the disk or, with `optimizer="host"`, in the host's memory. As with a
    disk, only `make_train_step` trains such a state, not inside another `jit`. The numbers differ from training
    without delay: each gradient is taken at parameters that lack the latest update. See `apply_pending`.

    Attributes:
      optimizer: "host", "disk" or "none".
      params: "host", "disk" or "none". Vectors, and parameters that stage 3 keeps whole, stay on the device; with
        "disk", so do all that no scan runs over.
      ratio: Minimum share of the trained parameters, in elements, whose optimizer state goes to the host, the largest
        leaves first, as far as rules allow (DeepSpeed's `ratio`). `LeafRule(offload=...)` decides for single leaves.
      chunk_bytes: Most bytes of masters and optimizer state in one transfer, and in one record on disk; the largest
        leaves are split. Each device holds up to about four chunks at a time.
      device_budget_bytes: Most bytes of parameters and optimizer state on one device between steps; the largest leaves'
        optimizer state goes to the host until the rest fits. Replaces `ratio`.
      compute: "device" or "host": where the update of offloaded state runs.
      delay: 0, or 1 to update with the gradients of the step before; needs `compute="host"`. They wait on the devices
        until the next step begins, then in the host's memory, in the dtype in which they were reduced. Saving a
        checkpoint applies them to a second copy of the state.
      zenflow: Whether columns with small gradients are updated later, see `ZenFlow`; needs `compute="host"`, and takes
        the host's memory for masters and optimizer state twice.
      path: With "disk", a folder on a fast local disk, which must exist. Each process keeps unnamed files there, which
        vanish however it ends; jobs may share a folder.
      disk_threads: Records that are read at a time, and as many that are written: `2 * disk_threads + 1` of
        `chunk_bytes` are in memory. With `params="disk"`, also rows that are read at a time; in memory are two of each
        stack and device.
      disk_checksum: Whether each record that is read is compared with the checksum of what was written.

    Raises:
      ValueError: A field has an impossible value, or two contradict each other.

    Example:
      >>> config = jzero.ZeroConfig(stage=3, offload=jzero.Offload(optimizer="host"))
      >>> jzero.shard_train_state(plain_state, config=config).opt_state[0].mu["w"].sharding.memory_kind
      'pinned_host'

    References:
      Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021 (the delay in section 5.2).
      Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning, 2021.
      DeepSpeed's `offload_optimizer` and `DeepSpeedCPUAdam`.
    """

    optimizer: Literal["none", "host", "disk"] = "none"
    params: Literal["none", "host", "disk"] = "none"
    ratio: float = 1.0
    chunk_bytes: int = 16 * 2**20
    device_budget_bytes: int | None = None
    compute: Literal["device", "host"] = "device"
    delay: Literal[0, 1] = 0
    zenflow: ZenFlow | None = None
    path: str | os.PathLike[str] | None = None
    disk_threads: int = 2
    disk_checksum: bool = True

    def __post_init__(self) -> None:
        allowed = {
            "ratio": number("a number from 0 to 1", lambda x: 0 <= x <= 1),
            "chunk_bytes": byte_count(1),
            "device_budget_bytes": optional(byte_count(0)),
            "zenflow": optional(Setting("a `jzero.ZenFlow`", _zenflow)),
            "path": optional(Setting("a folder, as text or as a `pathlib.Path`", _path)),
            "disk_threads": integer(1),
        }
        check_fields(self, allowed, prefix="Offload.")
        self._check_places()
        self._check_updates()

    def _check_places(self) -> None:
        """Raises if fields contradict each other about where the state lives."""
        if (self.optimizer == "disk") != (self.path is not None):
            raise ValueError(
                "`Offload.path` is the folder for `optimizer='disk'`: got "
                f"optimizer={self.optimizer!r}, path={self.path!r}. Set both, or neither."
            )
        if self.params == "disk" and self.optimizer != "disk":
            raise ValueError(
                "`Offload.params='disk'` keeps parameters beside their masters and optimizer state, but `optimizer` is "
                f"{self.optimizer!r}: set `optimizer='disk'` too, or `params='host'`."
            )
        if self.optimizer == "none" and (self.ratio != 1 or self.device_budget_bytes is not None):
            raise ValueError(
                "`Offload.ratio` and `Offload.device_budget_bytes` say how much of the optimizer state goes to the "
                f"host, but `optimizer` is 'none': got {self.ratio!r} and {self.device_budget_bytes!r}."
            )
        if self.ratio != 1 and self.device_budget_bytes is not None:
            raise ValueError(
                f"`Offload.ratio={self.ratio!r}` and `Offload.device_budget_bytes={self.device_budget_bytes}` "
                "both say how much goes to the host: set one of them."
            )

    def _check_updates(self) -> None:
        """Raises if fields contradict each other about where and when updates run."""
        if self.compute == "host" and self.optimizer == "none":
            raise ValueError(
                "`Offload.compute='host'` updates optimizer state where it is, but `optimizer` is 'none': set "
                "`optimizer='host'` too."
            )
        if self.params == "disk" and self.delay:
            raise ValueError(
                "`Offload.delay=1` writes new parameters while a step still reads the old ones, which `params='disk'` "
                "does not do: set `delay=0`, or `params='host'`."
            )
        if self.delay and self.compute == "device":
            raise ValueError(
                "`Offload.delay=1` lets the host's CPU update beside the devices, but `compute` is 'device': set "
                "`compute='host'` too, or `delay=0`."
            )
        if self.zenflow is not None and (self.compute == "device" or self.delay or self.params != "none"):
            raise ValueError(
                "`Offload.zenflow` lets the host's CPU update beside the devices, which keep the parameters, and has "
                f"delays of its own: got compute={self.compute!r}, delay={self.delay}, params={self.params!r}. Set "
                "`compute='host'`, `delay=0` and `params='none'`, or `zenflow=None`."
            )

    @property
    def uses_records(self) -> bool:
        """Whether offloaded optimizer state is in records, which programs do not see."""
        return self.optimizer == "disk" or self.delays_updates

    @property
    def records_in(self) -> Literal["host", "disk"]:
        """Where records are: in the host's memory, or on a disk."""
        return "host" if self.path is None else "disk"

    @property
    def made_records(self) -> str:
        """The option that put state into records, as in the user's program."""
        delayed = "delay=1" if self.delay else "zenflow=..."
        return delayed if self.delays_updates else f"optimizer={self.optimizer!r}"

    @property
    def delays_updates(self) -> bool:
        """Whether updates count later than the step that they belong to."""
        return bool(self.delay) or self.zenflow is not None
