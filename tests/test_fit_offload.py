"""`fit` with state on the host or on a disk: when it is tried, and what each lacks."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.machines.machine import machine
from tests.fit_models import BATCH, make_state, search_quickly
from tests.step_memory_models import HIDDEN, LAYERS, WIDTH, stack_loss


@pytest.fixture(autouse=True)
def _search_quickly(monkeypatch):
    search_quickly(monkeypatch)


DISK = {"disk_path": "/local/scratch", "disk_bytes": 1e12, "disk_bytes_per_s": 2e9}
MASTERS = jzero.ZeroConfig(stage=0, persistence_threshold=1000, precision="bf16")


def on_h200(**options):
    options = {"config": MASTERS, "hbm_bytes": 3e6, "remat": ("as_written",), "confirm": False, **options}
    options = {"topology": "h200:8", "max_accumulate_steps": 1, **options}
    return jzero.fit(jax.eval_shape(make_state, jax.random.key(0)), stack_loss, BATCH, **options)


def test_offload_is_tried_last():
    """In host memory first, then on a disk."""
    offload = jzero.Offload(chunk_bytes=2**12)  # buffers for the disk are small, too
    small = dataclasses.replace(MASTERS, offload=offload, persistence_threshold=0)
    find = functools.partial(on_h200, config=small, stages=(3,))
    least = min(x.memory.peak for x in find().tried if x.config.offload.optimizer == "none")
    assert find(hbm_bytes=1.01 * least, **DISK).config.offload.optimizer == "none"
    assert {x.config.offload.optimizer for x in find(hbm_bytes=1.01 * least).tried} == {"none"}
    below = functools.partial(find, hbm_bytes=0.98 * least)
    host = below(**DISK)
    assert host.config.offload == dataclasses.replace(small.offload, optimizer="host")
    assert {x.config.offload.optimizer for x in host.tried} == {"none", "host", "disk"}
    assert "optimizer state on the host" in str(host).splitlines()[0]
    assert any("of each host's memory, pinned: pass `host_bytes`" in note for note in host.notes)
    needed = 8 * host.chosen.memory.host
    assert below(host_bytes=needed).config == host.config
    assert not any("pass `host_bytes`" in note for note in below(host_bytes=needed).notes)
    choice = below(host_bytes=needed / 2, **DISK)
    assert choice.config.offload == jzero.Offload(optimizer="disk", path="/local/scratch", chunk_bytes=2**12)
    assert "optimizer state on disk" in str(choice).splitlines()[0]
    with pytest.raises(ValueError, match="nothing fits"):
        below(host_bytes=needed / 2).config  # noqa: B018


@pytest.mark.slow
def test_the_host_is_compared_from_the_start_if_asked():
    """A master and two moments of each parameter, 12 bytes, each way over the device's own link."""
    choice = on_h200(hbm_bytes=1e9, offload=True, stages=(0, 3))
    assert {x.config.offload.optimizer for x in choice.tried} == {"none", "host"}
    assert choice.config.offload.optimizer == "none"
    hosted = [x for x in choice.tried if x.memory.host]
    for x in hosted:
        parts = 1 if x.config.stage == 0 else 8
        size = 2 * LAYERS * WIDTH * HIDDEN
        assert x.memory.host == 12 * size / parts
        assert x.host_seconds == x.memory.host / machine("h200:8").host_link_bytes_per_s
        assert x.cost() == x.memory.seconds + x.host_seconds
        assert "s for the host" in x.verdict
    header = next(line for line in str(choice).splitlines() if line.startswith("stage"))
    assert header.split()[1] == "verdict"
    assert header.endswith("  host")
    row = next(x for x in json.loads(choice.to_json())["tried"] if x["optimizer_state"] == "host")
    assert row["host_seconds"] > 0 < row["host_bytes"]


def test_a_delayed_update_waits_for_what_a_step_leaves():
    offload = jzero.Offload(optimizer="disk", path="/local/scratch", compute="host", delay=1)
    config = dataclasses.replace(MASTERS, offload=offload)
    slow_disk, fast_disk = (on_h200(config=config, stages=(3,), disk_bytes_per_s=rate) for rate in (1e8, 1e15))
    assert all(x.config.offload == offload for x in slow_disk.tried)
    assert all(x.disk_seconds == 0 for x in fast_disk.tried)
    for x in slow_disk.tried:
        np.testing.assert_allclose(x.disk_seconds, x.memory.disk * 8 / 2 / 1e8 - x.memory.seconds)


def test_what_host_and_disk_lack_is_said():
    small = on_h200(hbm_bytes=1e9, stages=(3,), **{**DISK, "disk_bytes": 1e6})
    assert {x.verdict[-22:] for x in small.tried if x.memory.disk} == {" too much for the disk"}
    host = dataclasses.replace(MASTERS, offload=jzero.Offload(optimizer="host"))
    needed = max(8 * x.memory.host for x in on_h200(config=host, stages=(3,)).tried)
    assert on_h200(config=host, stages=(3,), hbm_bytes=1e9, host_bytes=needed).chosen is not None
    choice = on_h200(config=host, stages=(3,), hbm_bytes=1e9, host_bytes=needed - 1024)
    assert choice.chosen is None
    assert choice.tried[0].verdict == "1.00 KiB too much for the host"
    assert str(choice).splitlines()[0].endswith("1.00 KiB too much for the host.")


def test_optimizers_that_cannot_use_a_disk_are_not_tried_there():
    params = {"w": np.ones((256, 256), np.float32)}
    state = jax.eval_shape(lambda: jzero.TrainState.create(params=params, tx=optax.contrib.muon(1e-3)))
    loss = lambda params, x: jnp.square(x @ params["w"]).mean()
    choice = jzero.fit(
        state, loss, jax.ShapeDtypeStruct((16, 256), jnp.float32), topology="h200:8", hbm_bytes=1e9, confirm=False,
        config=MASTERS, stages=(1,), remat=("as_written",), **DISK,
    )  # fmt: skip
    assert {x.config.offload.optimizer for x in choice.tried} == {"none"}
    assert any(note.startswith("Optimizer state on disk was not tried: ") for note in choice.notes)


def test_a_disk_must_be_known():
    with pytest.raises(ValueError, match="`jzero doctor --disk PATH`"):
        on_h200(disk_path="/local/scratch")
    with pytest.raises(ValueError, match="`host_bytes` must be"):
        on_h200(host_bytes=-1)
