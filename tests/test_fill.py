"""`fill_memory`: what is kept first, how much of it fits, and what is left as it is."""

from __future__ import annotations

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.analysis import compiled_step, fill
from jzero.analysis.compiled_step import CompiledStep
from jzero.analysis.fill import Filling, _gathered_again
from jzero.analysis.memory import Memory, compiled_memory
from jzero.analysis.step_programs import StepProgram
from jzero.estimate.traced_collectives import traced_collectives
from jzero.machines.machine import machine
from tests import shared
from tests.fit_models import reckoned_once
from tests.test_keep import loss_fn, make_params, scan_loss, stacked_params

ROWS, LAYERS = 1024, 3
PATHS = 1 + 2 * LAYERS  # an embedding, and two of each layer


@pytest.fixture(autouse=True)
def _each_step_is_reckoned_once(monkeypatch):
    monkeypatch.setattr(fill, "memory_of_step", reckoned_once)


def make_state(params=None, **fields):
    return shared.sharded(make_params(LAYERS) if params is None else params, shared.sgd(1.0), **fields)


@functools.cache
def default_state():
    """A state for tracing, which consumes none."""
    return make_state()


def make_batch(rows=ROWS):
    return np.random.default_rng(1).normal(size=(rows, 23)).astype(np.float32)


def filled(hbm_bytes, *, loss=loss_fn, state=None, confirm=False, topology="h200:8", batch=None, **options):
    state, batch = default_state() if state is None else state, make_batch() if batch is None else batch
    step = shared.make_train_step(loss, **options)
    return step, jzero.fill_memory(step, state, batch, hbm_bytes=hbm_bytes, topology=topology, confirm=confirm)


def reckoned(step, batch=None):
    return jzero.estimate_step_memory(
        step, default_state(), make_batch() if batch is None else batch, topology="h200:8"
    ).peak


def peak_with(blocks):
    """The peak on this mesh, of which the tests of the compiler's word fill the memory."""
    step = jzero.make_train_step(loss_fn, remat=jzero.Keep(params="all", blocks=blocks))
    return reckoned_once(step, (default_state(), make_batch(), None), machine("h200:8")).peak


@pytest.mark.parametrize("given", [{}, {"remat": "as_written"}])
def test_everything_is_kept_where_memory_is_free(given):
    """A given `remat` stays, and a step can be filled again."""
    step, full = filled(None, **given)
    assert full.remat == jzero.Keep(params="all", **given or {"blocks": LAYERS})
    assert step.remat == given.get("remat")
    again = jzero.fill_memory(full, default_state(), make_batch(), topology="h200:8", confirm=False)
    assert again.remat.params == "all"


def test_parameters_come_before_blocks_and_the_last_used_first():
    batch = make_batch(64)  # parameters are larger than activations here
    default, all_params = (
        reckoned(jzero.make_train_step(loss_fn, remat=x), batch) for x in ("cheap", jzero.Keep(params="all"))
    )
    _, found = filled((default + (all_params - default) // 2) / 0.9, batch=batch)
    kept = found.remat
    assert kept.blocks == 0
    assert kept.keeps(f"blocks/{LAYERS - 1}/down")
    assert not kept.keeps("blocks/0/up")
    held = [kept.keeps(f"blocks/{i}/{name}") for i in range(LAYERS) for name in ("up", "down")]
    assert held == sorted(held)  # a suffix of the order of use


def test_weights_that_are_used_many_times_come_first():
    """The middle layer runs three times in each pass."""

    def loss(params, batch):
        x = jnp.tanh(batch @ params["first"])
        for _ in range(3):
            x = jnp.tanh(x @ params["shared"])
        return jnp.square(jnp.tanh(x @ params["last"])).mean()

    draw = lambda *shape: np.random.default_rng(0).normal(size=shape).astype(np.float32)
    params = {"first": draw(23, 256), "shared": draw(256, 256), "last": draw(256, 248)}
    state, batch, step = make_state(params), make_batch(8), jzero.make_train_step(loss)
    order = _gathered_again(traced_collectives(step.trace(state, batch).jaxpr), jzero.plan_of(state), 1)
    assert [path for path, _ in order] == ["shared", "last"]  # the first is not needed again


def test_gathers_ahead_are_not_uses():
    """A loop over two rows that gathers ahead makes five gathers of rows where one that does not makes four."""
    gathers = [("shared", (8,), 3), ("once", (8,), 1), ("stack", (8,), 5)]
    moved = [
        types.SimpleNamespace(gathers=True, path=path, cut=types.SimpleNamespace(shape=shape), times=2 * times)
        for path, shape, times in gathers
    ]
    params = [types.SimpleNamespace(path=path, shape=(8,), is_param=True) for path in ("shared", "once")]
    stack = types.SimpleNamespace(param=types.SimpleNamespace(path="stack", shape=(2, 8)))
    plan = types.SimpleNamespace(leaves=[stack], other_leaves=params)
    assert _gathered_again(moved, plan, micro_batches=2) == [("shared", False), ("stack", True)]


@pytest.mark.parametrize("error", [1.3, None])
def test_the_compiler_has_the_last_word(monkeypatch, error):
    """Whatever the compiler says of a program in place of what is reckoned, the choice is the longest that fits.

    A refusal does not say by how much, so there the choice only fits.
    """
    asked = []

    def compiled(filling, number):
        asked.append(number)
        if error is None and number > len(filling.paths) + 2:
            return None  # a compiler for TPUs refuses what does not fit
        return CompiledStep(round((error or 1) * filling.estimated(number).peak), seconds=1 / (1 + number))

    monkeypatch.setattr(Filling, "_compile", compiled)
    limit = (error or 1.2) * peak_with(2) + 100
    monkeypatch.setattr(fill, "hardware_of", lambda *args, **kwargs: (machine("h200:8"), jax.devices(), []))
    _, found = filled(limit, confirm=True)
    assert len(asked) <= 4 + 2  # the step as it is, and parameters alone
    assert found.remat.params == "all"
    assert found.remat.blocks == 2 or (error is None and found.remat.blocks == 1)


def test_one_more_is_tried_while_the_last_fits(monkeypatch):
    """What the third block takes may be less than estimated, though the estimate with two was right."""
    block = peak_with(3) - peak_with(2)

    def compiled(filling, number):
        less = block if number > len(filling.paths) + 2 else 0
        return CompiledStep(filling.estimated(number).peak - less, seconds=1 / (1 + number))

    monkeypatch.setattr(Filling, "_compile", compiled)
    monkeypatch.setattr(fill, "hardware_of", lambda *args, **kwargs: (machine("h200:8"), jax.devices(), []))
    _, found = filled(peak_with(2), confirm=True)  # both programs take all of it
    assert found.remat == jzero.Keep(params="all", blocks=3)


def test_what_a_program_allocates_counts_if_it_is_more_than_its_peak(monkeypatch):
    memory = Memory(arguments=60, outputs=50, aliased=40, temporaries=20, peak=70, host=0)
    program = StepProgram("step", traced=None, lowered=None, compiled=None, memory=memory, beside=5)
    monkeypatch.setattr(compiled_step, "step_programs", lambda *args: [program])
    arguments = (default_state(), make_batch(), None)
    assert compiled_step.compile_step(shared.make_train_step(loss_fn), arguments, None, None).peak == 5 + 90


@pytest.mark.parametrize("fastest", [0, PATHS, PATHS + LAYERS])  # nothing, all parameters, blocks as well
def test_what_takes_longer_is_not_kept(monkeypatch, fastest):
    compiled = lambda filling, number: CompiledStep(filling.estimated(number).peak, seconds=abs(number - fastest))
    monkeypatch.setattr(Filling, "_compile", compiled)
    monkeypatch.setattr(fill, "hardware_of", lambda *args, **kwargs: (machine("h200:8"), jax.devices(), []))
    _, found = filled(None, confirm=True)
    kept = {0: "cheap", PATHS: jzero.Keep(params="all"), PATHS + LAYERS: jzero.Keep(params="all", blocks=LAYERS)}
    assert found.remat == kept[fastest]


@pytest.mark.compilers  # jax cannot read what it compiled for devices that are not there, and says so
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
def test_the_choice_fits_by_the_compiler_for_h200():
    layers = 5
    state, batch = make_state(make_params(layers)), jax.ShapeDtypeStruct((1 << 16, 23), jnp.float32)
    peak = lambda step: jzero.analyze(step, state, batch, topology="h200:8").memory.peak
    step = jzero.make_train_step(loss_fn, remat="cheap")
    low, high = peak(step), peak(step.with_remat(jzero.Keep(params="all", blocks=layers)))
    found = jzero.fill_memory(step, state, batch, hbm_bytes=(low + high) / 2, topology="h200:8")
    assert low < peak(found) <= (low + high) / 2
    assert found.remat == jzero.Keep(params="all")


def test_a_step_that_takes_too_much_keeps_nothing():
    """Not what a step keeps by itself either, which knows the devices and not the limit."""
    with pytest.warns(UserWarning, match=r"(?s)Nothing is kept.*jzero.fit"):
        _, found = filled(1000)
    assert found.remat == "cheap"


def test_rows_of_stacks_stay_partitioned_where_links_have_time():
    """In a large batch each layer computes for longer than it communicates; in a small one it does not."""
    state = make_state(stacked_params())
    step, found = filled(None, loss=scan_loss, state=state, batch=jax.ShapeDtypeStruct((1 << 22, 23), jnp.float32))
    assert found.remat == jzero.Keep(params=("embed",), blocks=1)
    assert step.remat is None
    _, found = filled(None, loss=scan_loss, state=state, batch=make_batch(8))
    assert found.remat == jzero.Keep(params="all", blocks=1)
    _, found = filled(None, loss=scan_loss, state=state, batch=make_batch(8), topology="v5p:2x2x2")
    assert found.remat.blocks == 0, "to write stacks takes longer on TPUs"


@pytest.mark.parametrize("fields", [{"stage": 2}, {"reshard_after_forward": False}])
def test_there_is_nothing_to_keep_where_nothing_is_made_again(fields):
    step, found = filled(None, state=make_state(**fields))
    assert found is step


def test_impossible_arguments_are_refused():
    state, batch, step = default_state(), make_batch(), shared.make_train_step(loss_fn)
    with pytest.raises(ValueError, match="pass `hbm_bytes=`"):
        jzero.fill_memory(step, state, batch)
    with pytest.raises(ValueError, match=r"`hbm_bytes` must be .*: got 0"):
        jzero.fill_memory(step, state, batch, hbm_bytes=0)
    with pytest.raises(TypeError, match="got function"):
        jzero.fill_memory(loss_fn, state, batch)
    with pytest.raises(TypeError, match="not sharded by jzero"):
        jzero.fill_memory(step, jzero.unshard_train_state(state), batch, hbm_bytes=1e9, confirm=False)
    with pytest.raises(ValueError, match="With `remat='offload'`"):
        filled(None, remat="offload")
    with pytest.raises(ValueError, match=r"Offload\(params='host'\)"):
        filled(None, state=make_state(offload=jzero.Offload(params="host")))


def test_fit_fills_what_it_chooses():
    plain = jzero.TrainState.create(params=make_params(LAYERS), tx=optax.sgd(1.0))
    options = {"topology": "h200:8", "stages": (3,), "remat": ("cheap",), "confirm": False}
    choice = jzero.fit(plain, loss_fn, make_batch(), config=jzero.ZeroConfig(persistence_threshold=0), **options)
    assert choice.remat.blocks == LAYERS
    assert "stage 3, parameters kept between passes, keeps 3 blocks fits" in str(choice)
    assert choice.chosen.memory.peak <= choice.limit
    assert choice.chosen.memory.seconds < choice.tried[1].memory.seconds
    json.loads(choice.to_json())


@pytest.mark.parametrize(
    ("platform", "stats", "host_state", "expected"),
    [  # by hand: arguments, outputs, aliased, temporaries, peak, host
        ("cpu", {"argument": 50, "output": 40, "alias": 30, "temp": 7}, 0, (50, 40, 30, 7, 67, 0)),
        ("cpu", {"argument": 50, "output": 40, "alias": 30, "temp": 7}, 20, (30, 20, 10, 7, 47, 20)),
        ("gpu", {"argument": 50, "output": 40, "alias": 30, "temp": 7, "peak": 80}, 20, (30, 20, 10, 7, 60, 20)),
        ("gpu", {"argument": 50, "output": 10, "alias": 8, "temp": 7, "peak": 80}, 20, (30, 10, 8, 7, 60, 20)),
        ("tpu", {"argument": 50, "temp": 7, "peak": 80, "host_argument": 5, "host_temp": 1}, 20, (50, 0, 0, 7, 74, 6)),
    ],
)
def test_memory_of_compiled_programs_by_hand(platform, stats, host_state, expected):
    """State on the host is no memory of devices, whether the compiler says so or not."""
    fields = {("peak_memory" if k == "peak" else f"{k}_size") + "_in_bytes": n for k, n in stats.items()}
    compiled = types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**fields))
    assert compiled_memory(compiled, platform, host_state) == Memory(*expected)
