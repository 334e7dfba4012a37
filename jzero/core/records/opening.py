"""Opens the records of a state: their store, and the schedule of their updates."""

from __future__ import annotations

from jzero.core.disk.files import check_folder
from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.stores import DiskStore, RamStore, Store
from jzero.core.layout.box import field_offsets
from jzero.core.plan.plan import ZeroPlan
from jzero.core.records.records import Records, layout
from jzero.core.records.schedules import AtOnce, Delayed
from jzero.core.records.zenflow import ZenFlowSchedule


def open_records(plan: ZeroPlan) -> Records:
    """Reserves the space for this process's records of a state, before anything is written."""
    offload, index = plan.config.offload, layout(plan)
    ends = [field_offsets([x.dtype for x in plan.record_fields[r.param]], r.place.size)[1:] for r in index]
    sizes = [x[-1] for x in ends]
    heads = [x[0] if r.param in plan.params_on_disk else 0 for x, r in zip(ends, index, strict=True)]
    if offload.path is None:
        store: Store = RamStore(sizes, num_slots=1 if offload.delay else 2)  # beside several steps it must be whole
    else:
        store = DiskStore(check_folder(offload.path), sizes, heads, checksum=offload.disk_checksum)
    records = Records(plan, index, Pipeline(store, threads=offload.disk_threads))
    records.pending = Delayed() if offload.delay else AtOnce() if offload.zenflow is None else ZenFlowSchedule(records)
    return records
