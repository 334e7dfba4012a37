"""What a state takes on a disk: bytes, rates, and the space back."""

import dataclasses
import math
import os
import re
import types

import jax
import numpy as np
import optax
import pytest

import jzero
from jzero.disk.stores import DiskStore
from jzero.records import records
from tests import models
from tests.disk_states import make_params, state_on_disk, step_of, train

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
    step, seen = step_of(), {}
    with jzero.Monitor(sinks=[seen.__setitem__], every=2, progress=False) as monitor:
        for i in range(3):
            state, metrics = step(state, models.mlp_batch(48, seed=i))
            monitor.log(metrics)
    names = {f"perf/disk_{name}" for name in ("read_bytes_per_s", "write_bytes_per_s", "wait_share")}
    assert seen
    for values in seen.values():
        assert names <= values.keys()
        assert values["perf/disk_read_bytes_per_s"] == values["perf/disk_write_bytes_per_s"] > 0
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


@pytest.mark.parametrize("act", [jzero.disk_stats, jzero.release_disk])
@pytest.mark.parametrize("offload", [{}, {"optimizer": "host", "compute": "host", "delay": 1}])
def test_states_in_memory_have_nothing_to_tell_or_to_free(act, offload):
    state = jzero.TrainState.create(params=make_params(), tx=optax.adamw(1e-2))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=2, offload=jzero.Offload(**offload)))
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
