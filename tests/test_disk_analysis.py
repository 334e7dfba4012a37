"""What is told of a step on records before it runs: its memory, its violations, its time, the layout that fits."""

import gc

import jax
import numpy as np
import pytest

import jzero
from jzero.analysis.step_programs import step_programs
from jzero.records.run import RecordPass
from jzero.state.record_states import record_update
from tests import models
from tests.disk_states import OPTIMIZERS, loss_fn, state_on_disk
from tests.tiers import default_for, slow

FIRST, NUMBERS, REST = "loss and gradients", "numbers of the update", "the rest of the update"
LATE = {"optimizer": "host", "compute": "host", "delay": 1}


def stages(state):
    step = jzero.make_train_step(loss_fn)
    return step_programs(step, (state, models.mlp_batch(48)), {}, "cpu", lambda lowered: lowered.compile())


KINDS = [("adamw", 1, "bf16"), ("lamb", 2, "fp32"), ("clip", 3, "fp16"), ("momentum", 0, "bf16")]
OFFLOADS = [{}, {"compute": "host"}, {"compute": "host", "delay": 1}, LATE]
CASES = [(*kind, offload) for kind in KINDS for offload in OFFLOADS]


@pytest.mark.parametrize(("name", "stage", "precision", "offload"), default_for([CASES[0], CASES[5], CASES[11]], CASES))
def test_no_program_departs_from_the_plan(tmp_path, monkeypatch, name, stage, precision, offload):
    found = []
    monkeypatch.setattr(
        "jzero.analysis.analyze.step_programs", lambda *args: found.extend(step_programs(*args)) or found
    )
    folder = None if offload is LATE else tmp_path
    state = state_on_disk(folder, stage, precision, OPTIMIZERS[name](), **offload)
    report = jzero.analyze(jzero.make_train_step(loss_fn), state, models.mlp_batch(48))
    report.verify()
    sizes = report.plan.bytes_per_device
    assert report.memory.aliased >= sizes.params + sizes.opt_state
    assert report.memory.host == report.plan.host_bytes_per_device.total
    assert report.estimated.disk == report.plan.disk_bytes_per_device
    assert any(f"The step is {len(found)} programs" in note for note in report.notes)
    if offload == {"compute": "host"}:
        assert (found[0].name, found[-1].name) == (FIRST, REST)
        assert {x.name for x in found[1:-1]} == {NUMBERS}, "records take nothing of a device"


def test_a_state_that_is_not_donated_is_found(tmp_path, monkeypatch):
    state = state_on_disk(tmp_path, 1, "bf16")
    update = record_update(state.tx)
    monkeypatch.setattr(update, "finish", jax.jit(update._finish))
    report = jzero.analyze(jzero.make_train_step(loss_fn), state, models.mlp_batch(48))
    with pytest.raises(jzero.PlanViolation, match="it is not donated"):
        report.verify()


def on_first_device():
    """Returns the bytes of all arrays on the first device; several arrays may share a buffer."""
    first = jax.devices()[0]
    gc.collect()
    shards = [s.data for x in jax.live_arrays() for s in x.addressable_shards if s.device == first]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards if x.nbytes}.values())


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), slow(3, "fp32")])
def test_bytes_beside_records_are_those_of_a_running_step(tmp_path, monkeypatch, stage, precision):
    before = on_first_device()
    state, batch = state_on_disk(tmp_path, stage, precision), models.mlp_batch(48)
    expected = next(x for x in stages(state) if x.name == "records").beside
    seen, run = [], RecordPass.run
    monkeypatch.setattr(RecordPass, "run", lambda *args: (seen.append(on_first_device() - before), run(*args))[1])
    step = jzero.make_train_step(loss_fn)
    state, _ = step(state, jax.device_put(batch, jzero.plan_of(state).batch_sharding))
    del batch
    np.testing.assert_allclose(seen, expected, atol=16, rtol=0)  # and three 0-d metrics
