"""What a step keeps by itself never ends a run that would go on without, see [Note: Kept by default]."""

import collections
import ctypes
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero.core.step import choice
from jzero.core.step.inputs import bytes_on_device
from jzero.core.step.train_step import TrainStep
from jzero.estimate import keeping
from jzero.machines import limits
from jzero.machines.machine import machine
from tests import shared
from tests.shared import whole
from tests.test_keep import make_batch, make_params
from tests.test_kept_by_default import LAYERS, loss_fn, make_state, on_one_device

EVERYTHING = jzero.Keep(params="all", blocks=LAYERS)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.00GiB."


class Devices:
    """Stands in for what the allocators of devices say: of arrays that are alive, and of bytes beside, by device."""

    def __init__(self):
        self.limit, self.alive, self.beside = 2**30, [], {}

    def figures(self, device):
        arrays = [x for x in jax.tree.leaves(self.alive) if not x.is_deleted()]
        return {"bytes_limit": self.limit, "bytes_in_use": bytes_on_device(arrays) + self.beside.get(device.id, 0)}


@pytest.fixture
def devices(monkeypatch):
    devices = Devices()
    monkeypatch.setattr(limits, "memory_figures", devices.figures)
    monkeypatch.setattr(limits, "this_machine", lambda devices: machine("h200:8"))
    monkeypatch.setattr(limits, "ROUNDED", 1)
    return devices


def needed(batch):
    """The least limit with which a step keeps everything."""
    step, arguments = jzero.make_train_step(loss_fn, remat=EVERYTHING), (make_state(), batch, None)
    return round(keeping.memory_of_step(step, arguments, machine("h200:8")).peak / keeping.KEPT_SHARE) + 1


def assert_trained(new, metrics):
    loss, grads = on_one_device()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    moved = jax.tree.map(np.subtract, make_params(LAYERS), whole(new.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), moved, grads)


def test_a_second_state_takes_its_share(devices):
    """Of a device that has room for everything beside one state: beside two, less stays, whichever trains."""
    batch = make_batch()
    devices.limit = needed(batch)
    first, second = make_state(), make_state()
    devices.alive = [first]
    assert jzero.make_train_step(loss_fn).plan(first, batch).kept.blocks == LAYERS
    for state, other in ((first, second), (second, make_state())):
        devices.alive = [state, other]
        step = jzero.make_train_step(loss_fn)
        kept = step.plan(state, batch).kept
        assert kept is None or (kept.blocks < LAYERS and kept.limit == devices.limit - bytes_on_device(other))
        new, metrics = step(state, batch)
        assert_trained(new, metrics)
        assert step.plan(new, batch).kept == kept, "the plan tells what runs"


@pytest.mark.parametrize("far", [0, 5])  # the first device, and another of this process
def test_the_fullest_device_counts(devices, far):
    state, batch = make_state(), make_batch()
    devices.limit = needed(batch)
    devices.alive, devices.beside = [state], {jax.devices()[far].id: devices.limit // 2}
    kept = jzero.make_train_step(loss_fn).plan(state, batch).kept
    assert kept is None or kept.blocks < LAYERS


def test_the_limit_is_taken_once_for_shapes(devices):
    """What lives there later changes no program that runs already; other shapes ask anew."""
    state, batch, calls = make_state(), make_batch(), []
    devices.alive = [state]
    step = jzero.make_train_step(lambda *args: calls.append(1) or loss_fn(*args))
    state, _ = step(state, batch)
    num_calls = len(calls)
    devices.beside = dict.fromkeys((x.id for x in jax.devices()), devices.limit)
    for _ in range(2):
        state, _ = step(state, batch.astype(np.float64))  # which jax takes for fp32
    assert len(calls) == num_calls
    assert step.recomputation(state, batch) == EVERYTHING
    assert step.recomputation(state, np.tile(batch, (2, 1))) == "cheap"
    step.clear_cache()
    assert step.recomputation(state, batch) == "cheap"


def test_a_machine_that_is_asked_for_is_empty(devices):
    """Estimates for it do not hang on what else is there today."""
    state, batch, h200s = make_state(), make_batch(), machine("h200:8")
    devices.beside = dict.fromkeys((x.id for x in jax.devices()), devices.limit)
    assert jzero.make_train_step(loss_fn).resolved(state, batch, hardware=h200s).remat == EVERYTHING
    assert jzero.make_train_step(loss_fn).resolved(state, batch).remat is None


@pytest.mark.parametrize(
    ("stats", "free", "limit"),
    [
        ({"bytes_limit": 100, "pool_bytes": 100}, 40, 100),  # taken at the start, as by default
        ({"bytes_limit": 100, "pool_bytes": 10}, 130, 100),  # taken as it is needed, with nobody else there
        ({"bytes_limit": 100, "pool_bytes": 10}, 30, 40),  # beside others
        ({"bytes_limit": 100, "pool_bytes": 60}, 0, 60),
        ({"bytes_limit": 100, "pool_bytes": 60}, None, 100),  # no driver that says so
        ({"bytes_limit": 100}, 30, 100),  # an allocator that does not say what it has
        (None, 30, None),
    ],
)
def test_what_other_processes_hold_is_not_left(monkeypatch, stats, free, limit):
    monkeypatch.setattr(limits, "free_bytes", lambda device: free)
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats and dict(stats))
    assert limits.memory_figures(device).get("bytes_limit") == limit


def make_driver(fails, held):
    """Stands in for CUDA's limits, one of whose functions fails; counts what it is not given back."""

    def fill(name, place, value):
        place._obj.value = value
        return name == fails

    return types.SimpleNamespace(
        cuDeviceGet=lambda gpu, number: fill("get", gpu, number + 7),
        cuDevicePrimaryCtxRetain=lambda context, gpu: (
            fill("retain", context, 2**40 + gpu.value) or held.update(contexts=1)
        ),
        cuCtxPushCurrent_v2=lambda context: fails == "push" or held.update({context.value: 1}),
        cuMemGetInfo_v2=lambda free, total: fill("info", free, 5 * 2**30) or fill("info", total, 9 * 2**30),
        cuCtxPopCurrent_v2=lambda context: held.update({2**40 + 9: -1}),
        cuDevicePrimaryCtxRelease_v2=lambda gpu: held.update(contexts=-1),
    )


@pytest.mark.parametrize("fails", ["", "get", "retain", "push", "info"])
def test_the_driver_is_asked_for_the_memory_that_nobody_holds(monkeypatch, fails):
    held, device = collections.Counter(), types.SimpleNamespace(local_hardware_id=2)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: make_driver(fails, held))
    assert limits.free_bytes(device) == (None if fails else 5 * 2**30)
    assert not any(held.values())


def test_figures_that_cannot_be_read_keep_nothing(devices, checks_may_fail, monkeypatch):
    monkeypatch.setattr(limits, "memory_figures", shared.raising(RuntimeError("UNIMPLEMENTED")))
    step, state, batch = jzero.make_train_step(loss_fn), make_state(), make_batch()
    assert step.plan(state, batch).kept is None
    assert_trained(*step(state, batch))


def test_a_program_that_needs_more_than_estimated_does_not_run(devices, monkeypatch, caplog):
    """By the compiler's figure, for which nothing is compiled twice."""
    state, batch, ran = make_state(), make_batch(), []
    run, allocated = TrainStep._run, choice._allocated_bytes
    monkeypatch.setattr(TrainStep, "_run", lambda step, jitted, *args: ran.append(jitted) or run(step, jitted, *args))
    monkeypatch.setattr(choice, "_allocated_bytes", lambda compiled: allocated(compiled) + devices.limit)
    step = jzero.make_train_step(loss_fn)
    assert step.recomputation(state, batch) == EVERYTHING
    with jax.log_compiles():
        new, metrics = step(state, batch)
    assert_trained(new, metrics)
    assert ran == [step._jit(jzero.plan_of(new), new)]
    assert step.plan(new, batch).kept is None
    assert len(re.findall(r"Finished XLA compilation of jit\(_compute\)", caplog.text)) == 2, "the kept one, and this"
    assert "takes more than the 1.00 GiB of a device that are left to it" in caplog.text
    assert "remat='cheap'" in caplog.text


def test_a_program_that_fits_is_compiled_once(devices, caplog):
    state, batch = make_state(), make_batch()
    step = jzero.make_train_step(loss_fn)
    with jax.log_compiles():
        for _ in range(2):
            state, _ = step(state, batch)
    assert step.plan(state, batch).kept.blocks == LAYERS
    assert len(re.findall(r"Finished XLA compilation of jit\(_compute\)", caplog.text)) == 1


def test_the_compiled_figure_counts_arguments_and_temporaries():
    compiled = jax.jit(lambda x, y: x + jnp.sin(y).sum(), donate_argnums=0).lower(jnp.ones(64), jnp.ones(256)).compile()
    assert 4 * (64 + 256) <= choice._allocated_bytes(compiled) < 4 * (64 + 256 + 256 + 64)


def test_a_compiler_that_refuses_is_heeded(devices, monkeypatch):
    """As that for TPUs does."""
    state, batch, compile_ = make_state(), make_batch(), jax.stages.Lowered.compile

    def refuse(lowered, *args):
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    step = jzero.make_train_step(loss_fn)
    new, metrics = step(state, batch)
    assert_trained(new, metrics)
    assert step.plan(new, batch).kept is None


def run_out(monkeypatch, times, *, consumes=False):
    """Has the first programs that run end as they do where memory is missing."""
    run, left = TrainStep._run, [None] * times

    def fail(step, jitted, state, *args):
        if not left:
            return run(step, jitted, state, *args)
        left.pop()
        if consumes:
            jax.tree.leaves(state)[-1].delete()
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(TrainStep, "_run", fail)


@pytest.mark.parametrize("first", [True, False])  # or a later run, beside something new
def test_a_run_that_finds_too_little_memory_goes_on(devices, monkeypatch, first):
    state, batch = make_state(), make_batch()
    step = jzero.make_train_step(loss_fn)
    if not first:
        step(make_state(), batch)
    run_out(monkeypatch, 1)
    with pytest.warns(UserWarning, match=r"ran out of memory.* keeps Keep\(params='all', .*`remat='cheap'`"):
        new, metrics = step(state, batch)
    assert_trained(new, metrics)
    assert step.plan(new, batch).kept is None
    step(new, batch)


def test_a_run_that_has_consumed_its_state_says_what_to_pass(devices, monkeypatch):
    step, state = jzero.make_train_step(loss_fn), make_state()
    run_out(monkeypatch, 1, consumes=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        step(state, make_batch())
    assert "remat='cheap'" in raised.value.__notes__[0]


@pytest.mark.parametrize("remat", [None, EVERYTHING, "cheap"])
def test_what_cannot_do_with_less_ends(devices, monkeypatch, remat):
    """What its user said is kept, and "cheap" is the last resort."""
    run_out(monkeypatch, 2)
    if remat is None:
        devices.limit = 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jzero.make_train_step(loss_fn, remat=remat)(make_state(), make_batch())


def test_other_errors_of_a_run_are_the_users(devices, monkeypatch):
    error = jax.errors.JaxRuntimeError("INTERNAL: a fault of another kind")
    monkeypatch.setattr(TrainStep, "_run", shared.raising(error))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another kind"):
        jzero.make_train_step(loss_fn)(make_state(), make_batch())


def test_inside_another_program_what_is_left_counts_too(devices):
    """There it is all that can be done."""
    state, batch = make_state(), make_batch()
    devices.alive, devices.limit = [state], needed(batch)
    step = jzero.make_train_step(loss_fn)
    assert_trained(*jax.jit(step)(state, batch))
    (limit,) = step._choices.limits.values()
    assert limit == devices.limit, "the step's own state is no other's"
