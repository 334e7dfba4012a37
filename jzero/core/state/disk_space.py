"""Reports what a state takes on a disk, and how fast that is; frees the space."""

from __future__ import annotations

from typing import NamedTuple

from jzero.core.base.types import State, TrainStateLike
from jzero.core.disk.stores import DiskStore
from jzero.core.plan.table import format_bytes
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.record_states import records_of


class DiskStats(NamedTuple):
    """What a state has on a disk, in this process alone; `print` it for text.

    Attributes:
      folder: The folder of its files.
      num_bytes: Bytes that they take, both copies of the state together.
      num_records: Number of records, each of which one request reads or writes.
      fallbacks: What the file system cannot do, with its reason; empty where reads and writes go past the page cache.
      read_bytes: Bytes read since the state was made.
      read_seconds: Seconds in which at least one read was in progress.
      written_bytes: Bytes written, those by which the state was laid out among them.
      write_seconds: Likewise.

    Example:
      >>> jzero.DiskStats("/scratch", 2**20, 4, (), 2**29, 0.5, 2**29, 0.25).write_bytes_per_s == 2**31
      True
    """

    folder: str
    num_bytes: int
    num_records: int
    fallbacks: tuple[str, ...]
    read_bytes: int
    read_seconds: float
    written_bytes: int
    write_seconds: float

    @property
    def read_bytes_per_s(self) -> float:
        """The rate of reads while any is in progress; 0 before the first."""
        return self.read_bytes / self.read_seconds if self.read_seconds else 0.0

    @property
    def write_bytes_per_s(self) -> float:
        """The rate of writes, likewise."""
        return self.written_bytes / self.write_seconds if self.write_seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"{format_bytes(self.num_bytes)} in {self.folder}, {self.num_records} records, two copies",
            f"read     {format_bytes(self.read_bytes)}, {format_bytes(self.read_bytes_per_s)} per second",
            f"written  {format_bytes(self.written_bytes)}, {format_bytes(self.write_bytes_per_s)} per second",
        ]
        return "\n".join([*lines, *self.fallbacks])


def disk_stats(state: State) -> DiskStats:
    """Returns what a state with `Offload(optimizer="disk")` takes on the disk, and how fast that was so far.

    Args:
      state: A sharded train state.

    Returns:
      A `DiskStats` about the files of this process.

    Raises:
      TypeError: The state was not sharded by jzero.
      ValueError: Nothing of the state is on a disk.
      RuntimeError: `release_disk` freed the space, or the files are those of a later state.

    Example:
      >>> offload = jzero.Offload(optimizer="disk", path=tmp)
      >>> on_disk = jzero.shard_train_state(plain_state, config=jzero.ZeroConfig(stage=3, offload=offload))
      >>> stats = jzero.disk_stats(on_disk)
      >>> stats.num_bytes == 2 * 2 * 512 * 512 * 4, stats.written_bytes == stats.num_bytes // 2
      (True, True)
    """
    train_state = adapt_sharded(state).state
    store = _store_of(train_state)
    return DiskStats(store.folder, 2 * store.num_bytes, len(store.sizes), store.fallbacks, *store.stats)


def release_disk(state: State) -> None:
    """Frees the space that a state takes on a disk now, rather than with the last reference to it.

    Neither the state nor any that it came from can be trained, saved or read as a whole afterwards. Parameters stay.
    Waits for saves, and for an update that runs beside a step.

    Args:
      state: A sharded train state.

    Raises:
      TypeError: The state was not sharded by jzero.
      ValueError: Nothing of the state is on a disk.
      RuntimeError: The space was freed before, or the files are those of a later state.

    Example:
      >>> offload = jzero.Offload(optimizer="disk", path=tmp)
      >>> on_disk = jzero.shard_train_state(plain_state, config=jzero.ZeroConfig(stage=3, offload=offload))
      >>> jzero.release_disk(on_disk)
    """
    train_state = adapt_sharded(state).state
    _store_of(train_state)
    records_of(train_state).release()


def _store_of(state: TrainStateLike) -> DiskStore:
    """Returns the records of a state on disk."""
    plan = state.tx.plan
    store = records_of(state).pipeline.store if plan.has_records else None
    if not isinstance(store, DiskStore):
        raise ValueError(
            f"Nothing of this state is on a disk: its configuration has `optimizer={plan.config.offload.optimizer!r}`. "
            "State goes there with `Offload(optimizer='disk', path=...)`."
        )
    return store
