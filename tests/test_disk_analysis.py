"""What is told of a step on records: its memory and its violations before it runs; bytes, rates, and the space back."""

import dataclasses
import gc
import math
import os
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.analysis.step_programs import step_programs
from jzero.core.disk.stores import DiskStore
from jzero.core.records import records
from jzero.core.records.run import RecordPass
from jzero.core.state.record_states import record_update
from tests import models
from tests.disk_states import ADAMW, OPTIMIZERS, loss_fn, make_params, state_on_disk, step_of, train, two_devices
from tests.tiers import slow

FIRST, NUMBERS, REST = "loss and gradients", "numbers of the update", "the rest of the update"
LATE = {"optimizer": "host", "compute": "host", "delay": 1}


def stages(state):
    step = jzero.make_train_step(loss_fn)
    return step_programs(step, (state, models.mlp_batch(48)), {}, "cpu", lambda lowered: lowered.compile())


CASES = [
    ("adamw", 1, "bf16", {}),
    ("momentum", 3, "fp32", {"mesh": jzero.make_mesh(devices=jax.devices()[:1])}),
    ("lamb", 2, "fp32", {"compute": "host"}),
    ("clip", 3, "fp16", LATE),
    slow("momentum", 0, "bf16", {"compute": "host", "delay": 1}),
]


@pytest.mark.filterwarnings("ignore:The mesh has one device")
@pytest.mark.parametrize(("name", "stage", "precision", "offload"), CASES)
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
    taken = [x for x in found[-1].traced.jaxpr.in_avals if x.size > 1]
    assert offload is LATE or len(taken) == 2 * 2, "old and new parameters; gradients went into records"
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


def test_bytes_beside_records_are_those_of_a_running_step(tmp_path, monkeypatch):
    before = on_first_device()
    state, batch = state_on_disk(tmp_path, 1, "bf16"), models.mlp_batch(48)
    expected = next(x for x in stages(state) if x.name == "records").beside
    seen, run = [], RecordPass.run
    monkeypatch.setattr(RecordPass, "run", lambda *args: (seen.append(on_first_device() - before), run(*args))[1])
    step = jzero.make_train_step(loss_fn)
    state, _ = step(state, jax.device_put(batch, jzero.plan_of(state).batch_sharding))
    del batch
    assert [x - expected for x in seen] == [4 + 4 + 1], "and three 0-d metrics"


@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (2, "bf16")])
def test_the_estimate_counts_what_passes_through_a_device(tmp_path, stage, precision):
    """A cut matrix, of one record on each device, with two moments: far more than the loss needs."""
    half, threads = 300 * 64 // 2, 3
    config = jzero.ZeroConfig(
        stage=stage,
        precision=precision,
        persistence_threshold=0,
        offload=jzero.Offload(optimizer="disk", path=tmp_path, chunk_bytes=2**20, disk_threads=threads),
    )
    state = jzero.TrainState.create(params={"w": np.ones((300, 64), np.float32)}, tx=ADAMW)
    state = jzero.shard_train_state(state, config=config, mesh=two_devices())
    step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
    found = jzero.estimate_step_memory(step, state, np.ones((2, 300), np.float32)).at_peak
    # The gradient comes in, moments pass both ways, the new parameter goes out; the old one comes in, or its master
    # passes both ways.
    size, old = {"fp32": (4, 4), "bf16": (2, 2 * 4)}[precision]
    assert found["gradients"] == size * half
    assert found["working"] == size * half + (2 * threads + 1) * (size + 2 * 2 * 4 + size + old) * half
    assert found["activations"] == found["gathered"] == 0


GONE = r"`jzero\.release_disk` freed the space"


def test_stats_and_rates_count_what_moves_until_the_space_is_released(tmp_path):
    state = state_on_disk(tmp_path)
    plan = jzero.plan_of(state)
    num_devices = plan.mesh.size  # of one process; no axis replicates
    first = jzero.disk_stats(state)
    assert first.num_bytes == num_devices * plan.disk_bytes_per_device == 2 * first.written_bytes
    assert first.num_records == num_devices * sum(len(plan.record_boxes(i)) for i in plan.record_fields)
    assert (first.folder, first.read_bytes, first.read_bytes_per_s) == (str(tmp_path), 0, 0.0)

    # A monitor writes the rates.
    step, seen, began = step_of(), {}, time.perf_counter()
    with jzero.Monitor(sinks=[seen.__setitem__], every=2, progress=False) as monitor:
        for i in range(3):
            state, metrics = step(state, models.mlp_batch(48, seed=i))
            monitor.log(metrics)
    least = first.written_bytes / (time.perf_counter() - began)
    names = {f"perf/disk_{name}" for name in ("read_bytes_per_s", "write_bytes_per_s", "wait_share")}
    assert seen
    for values in seen.values():
        assert names <= values.keys()
        assert values["perf/disk_read_bytes_per_s"] == values["perf/disk_write_bytes_per_s"] > least
        assert 0 <= values["perf/disk_wait_share"] <= 1
    stats = jzero.disk_stats(state)
    assert (stats.read_bytes, stats.written_bytes) == (3 * first.written_bytes, 4 * first.written_bytes)
    assert math.isclose(stats.write_bytes_per_s * stats.write_seconds, stats.written_bytes)
    assert str(stats).startswith(f"64.00 KiB in {tmp_path}, {stats.num_records} records")

    assert taken(tmp_path) == first.num_bytes
    path = plan.leaves[min(plan.record_fields)].path
    before = np.asarray(jzero.get_full_param(state, path))
    jzero.release_disk(state)
    assert taken(tmp_path) == 0
    np.testing.assert_array_equal(jzero.get_full_param(state, path), before)
    for act in (
        train,
        jzero.disk_stats,
        jzero.release_disk,
        jzero.unshard_train_state,
        lambda x: jzero.get_full_opt_state(x, path, name="mu"),
        lambda x: jzero.shard_train_state(x, config=dataclasses.replace(plan.config, stage=1)),
    ):
        with pytest.raises(RuntimeError, match=GONE):
            act(state)


def test_stats_name_what_the_file_system_cannot_do(tmp_path, monkeypatch):
    monkeypatch.setattr(DiskStore, "fallbacks", ("no O_DIRECT (why)",))
    assert str(jzero.disk_stats(state_on_disk(tmp_path))).endswith("\nno O_DIRECT (why)")


@pytest.mark.parametrize("offload", [{}, LATE])
def test_states_in_memory_have_nothing_to_tell_or_to_free(offload):
    state = jzero.TrainState.create(params=make_params(), tx=optax.adamw(1e-2))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=2, offload=jzero.Offload(**offload)))
    for act in (jzero.disk_stats, jzero.release_disk):
        with pytest.raises(ValueError, match="Nothing of this state is on a disk"):
            act(state)


def taken(folder):
    """Returns the bytes that unnamed files of this process take in a folder."""
    sizes = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                sizes += os.fstat(int(name)).st_size
        except OSError:  # the listing's own
            continue
    return sizes


@pytest.mark.slow
def test_release_waits_for_an_update_beside_the_step(tmp_path):
    state, _ = train(state_on_disk(tmp_path, compute="host", delay=1), steps=3)
    jzero.release_disk(state)
    assert taken(tmp_path) == 0
    with pytest.raises(RuntimeError, match=GONE):
        jzero.apply_pending(state)
    assert jax.block_until_ready(jzero.gather_params(state)) is not None


def test_laying_out_is_told_only_if_it_takes_long(tmp_path, monkeypatch, caplog):
    state_on_disk(tmp_path)
    assert not caplog.messages
    now = iter(range(0, 1000, 20))
    monkeypatch.setattr(records, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    state = state_on_disk(tmp_path, layers=2)
    num_params = len(jzero.plan_of(state).record_fields)
    # The first line is due 30 s after the first parameter, 20 s apart; the last parameter is the end.
    assert len(caplog.messages) == (num_params - 2) // 2 == 1, num_params
    whole = f"{jzero.disk_stats(state).num_bytes / 2**11:.2f} KiB"
    assert re.fullmatch(rf"Laying out records of optimizer state: .* of {whole} are written\.", caplog.messages[0])
