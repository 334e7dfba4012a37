"""`fit`: what it chooses is what exhaustive search by the compiler chooses, and it says why."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.analysis import compiled_step, fit, fit_report, search
from jzero.core.base.text import printed
from jzero.machines.machine import machine
from tests.fit_models import BATCH, make_state, reckoned_once
from tests.step_memory_models import HIDDEN, LAYERS, WIDTH, stack_loss
from tests.tiers import slow


@pytest.fixture(autouse=True)
def _search_quickly(monkeypatch):
    """Lets `fit` trace equal steps once in a process, and spend nothing of the memory that its choice has left."""
    monkeypatch.setattr(search, "memory_of_step", reckoned_once)
    monkeypatch.setattr(fit, "_filled", lambda *args, **options: None)


FILLED = fit._filled
STATE_BYTES = 12 * LAYERS * WIDTH * HIDDEN * 2  # fp32 parameters and adam's moments
CONFIG = jzero.ZeroConfig(stage=0, persistence_threshold=1000)


def fitted(megabytes, **options):
    options = {"remat": ("as_written", True), "config": CONFIG, **options}
    return jzero.fit(make_state, stack_loss, BATCH, hbm_bytes=int(megabytes * 1e6), **options)


@functools.cache
def compiled_peak(stage, steps, remat):
    """By the compiler, without `fit`."""
    state = jzero.shard_train_state(
        make_state(jax.random.key(0)), config=jzero.ZeroConfig(stage=stage, persistence_threshold=1000)
    )
    compiled = jzero.make_train_step(stack_loss, accumulate_steps=steps, remat=remat).lower(state, BATCH).compile()
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


@pytest.mark.parametrize("megabytes", [6, slow(2)])
def test_chosen_fits_and_cheaper_ones_do_not(megabytes, monkeypatch):
    monkeypatch.setattr(fit, "_filled", FILLED)
    choice = fitted(megabytes)
    x = choice.chosen
    peak = compiled_peak(x.config.stage, x.accumulate_steps, x.remat)
    assert x.compiled_peak == peak <= megabytes * 1e6
    before = choice.tried[: choice.tried.index(x)]
    assert all(y.verdict.endswith("too much") for y in before)
    for y in before:  # whatever the estimate may wrongly leave out has been compiled as well
        assert (y.compiled_peak is not None) == (0.9 * y.memory.peak <= megabytes * 1e6)
        if y.compiled_peak is not None:
            assert y.compiled_peak == compiled_peak(y.config.stage, y.accumulate_steps, y.remat) > megabytes * 1e6
    sent = [y.memory.sent_bytes for y in choice.tried]
    assert all(a <= 1.01 * b for a, b in itertools.pairwise(sent)), sent


def test_no_candidate_is_traced_twice(monkeypatch):
    traced = []

    def note(step, arguments, hardware):
        plan = jzero.plan_of(arguments[0])
        traced.append((plan.config, plan.mesh, step.micro, step.remat))
        return reckoned_once(step, arguments, hardware)

    monkeypatch.setattr(search, "memory_of_step", note)
    tried = fitted(6, confirm=False).tried
    assert len(traced) == len(set(traced)) == len(tried) + 1, "and what integers on the links would save"


def test_nothing_fits():
    """Less than an eighth of the states: no layout can do."""
    options = {"max_accumulate_steps": 1, "remat": ("as_written",)}
    choice = fitted(0.9 * STATE_BYTES / 8 / 1e6, stages=(2, 3), **options)
    assert choice.chosen is None
    assert "nothing fits. The least is stage 3" in str(choice)
    assert all(x.peak > choice.limit for x in choice.tried)
    least = min(choice.tried, key=lambda x: x.peak)
    assert (least.compiled_peak is None) == (least.memory.peak > 2 * choice.limit), "estimates are not so far off"
    with pytest.raises(ValueError, match="nothing fits"):
        _ = choice.config
    assert json.loads(choice.to_json())["chosen"] is None


def test_what_the_compiler_refuses_does_not_fit(monkeypatch):
    """As that for TPUs does; its figure is of temporaries alone, so none is given."""
    compiled = compiled_step.step_programs

    def refuse_stage_0(step, args, *rest):
        if not jzero.plan_of(args[0]).config.stage:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")
        return compiled(step, args, *rest)

    monkeypatch.setattr(compiled_step, "step_programs", refuse_stage_0)
    choice = fitted(1000, max_accumulate_steps=1, remat=(None,))
    first, *_ = choice.tried
    assert (first.config.stage, first.refused, first.compiled_peak) == (0, True, None)
    assert first.verdict == "rejected by the compiler: out of memory"
    assert "refused" in str(choice)
    assert choice.config.stage == 1
    nothing = fitted(1000, max_accumulate_steps=1, remat=(None,), stages=(0,))
    assert nothing.chosen is None
    assert "the compiler rejects it: out of memory" in str(nothing)


@pytest.mark.slow
def test_recomputation_without_products_is_tried():
    """Only elementwise operations are recomputed, so the arithmetic that is counted stays the same."""

    def loss(params, x):
        one = lambda y, w: (jnp.tanh(jnp.cos(jnp.tanh(jnp.sin(y)))) @ w, None)
        return jnp.square(jax.lax.scan(one, x, params["w"])[0]).mean()

    params = {"w": np.ones((8, WIDTH, WIDTH), np.float32)}
    state = jax.eval_shape(lambda: jzero.TrainState.create(params=params, tx=optax.sgd(0.1)))
    batch = jax.ShapeDtypeStruct((8 * 512, WIDTH), jnp.float32)
    find = functools.partial(jzero.fit, state, loss, batch, stages=(0,), max_accumulate_steps=1)
    least = min(x.peak for x in find(hbm_bytes=1e9).tried)
    assert find(hbm_bytes=1.2 * least, remat=("as_written", True)).remat is True
    assert find(hbm_bytes=1.2 * least).remat == "cheap"
    plenty = find(hbm_bytes=1e9)
    assert plenty.remat == "as_written"
    assert [x.verdict for x in plenty.tried] == ["chosen", "fits; recomputes for nothing"]


HOST = jzero.Offload(optimizer="host", params="host")
ALLOWED = {
    "parameters on the host": (jzero.ZeroConfig(stage=3, offload=HOST), None, {3}),
    "a delayed update": (
        jzero.ZeroConfig(stage=1, offload=jzero.Offload(optimizer="host", compute="host", delay=1)),
        None,
        {0, 1, 2, 3},
    ),
    "an axis called replica": (jzero.ZeroConfig(stage=0, axis="replica", precision="fp16"), (0, 2), {0, 2}),
}


@pytest.mark.parametrize("name", ["parameters on the host", slow("an axis called replica"), slow("a delayed update")])
def test_what_the_configuration_excludes_is_not_searched(name):
    config, searched, stages = ALLOWED[name]
    state = jax.eval_shape(make_state, jax.random.key(0))
    options = {"topology": "h200:16", "hbm_bytes": 1e9, "confirm": False, "remat": ("as_written",)}
    given = {} if searched is None else {"stages": searched}
    choice = jzero.fit(state, stack_loss, BATCH, config=config, max_accumulate_steps=1, **given, **options)
    assert {x.config.stage for x in choice.tried} == stages
    for x in choice.tried:
        names = (
            "stage", "replica_axis", "node_axis", "secondary_params", "secondary_grads", "reshard_after_forward",
        )  # fmt: skip
        assert dataclasses.replace(x.config, **{name: getattr(config, name) for name in names}) == config
        mesh = jax.sharding.AbstractMesh(tuple(x.mesh_shape.values()), tuple(x.mesh_shape))
        assert jzero.plan_train_state(state, config=x.config, mesh=mesh).config == x.config
    if name == "parameters on the host":
        with pytest.raises(ValueError, match=r"\(0, 2\): `Offload\(params='host'\)`"):
            jzero.fit(state, stack_loss, BATCH, config=config, stages=(0, 2), **options)


def test_fields_that_the_loss_writes():
    def make(key):
        params = {"w": jnp.ones((WIDTH, WIDTH))}
        return jzero.TrainState.create(params=params, tx=optax.sgd(0.1), extra={"mean": jnp.zeros(WIDTH)})

    def loss(params, x, extra):
        return jnp.square(x @ params["w"] - extra["mean"][None]).mean(), {"extra": {"mean": x.mean(0)}}

    choice = jzero.fit(
        make, loss, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32), has_aux=True, mutable=("extra",),
        hbm_bytes=1e9, confirm=False, max_accumulate_steps=1, stages=(0, 3), remat=("as_written",),
    )  # fmt: skip
    assert choice.config.stage == 0
    assert "Nothing was compiled" in choice.notes[0]
    assert f"\n\n{choice.notes[0]}" in str(choice)


def test_errors():
    with pytest.raises(ValueError, match="pass `hbm_bytes=`"):
        jzero.fit(make_state, stack_loss, BATCH)
    bad = [
        ({"hbm_bytes": -1}, "`hbm_bytes` must be None or a number of bytes >= 1: got -1"),
        ({"hbm_bytes": 0.5}, "`hbm_bytes` must be None or a number of bytes >= 1: got 0.5"),
        ({"hbm_bytes": float("nan")}, "`hbm_bytes` must be None or a number of bytes >= 1: got nan"),
        ({"hbm_bytes": "80e9"}, "`hbm_bytes` must be None or a number of bytes >= 1: got '80e9'"),
        ({"stages": ()}, "`stages` must be some of"),
        ({"stages": 3}, "`stages` must be some of"),
        ({"stages": (4,)}, "`stages` must be some of"),
        ({"remat": True}, "`remat` must be some of"),
        ({"max_accumulate_steps": 0}, "`max_accumulate_steps` must be an integer >= 1: got 0"),
    ]
    for options, says in bad:
        with pytest.raises(ValueError, match=says):
            jzero.fit(make_state, stack_loss, BATCH, **options)
    with pytest.raises(TypeError, match="state"):
        jzero.fit(lambda key: {"w": jnp.ones(3)}, stack_loss, BATCH, hbm_bytes=1e9)
    with pytest.raises(ValueError, match="GPUs: h200"):
        jzero.fit(make_state, stack_loss, BATCH, topology="h300:8")
    with pytest.raises(ValueError, match="must be divisible by 64"):
        jzero.fit(make_state, stack_loss, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32), topology="h200:64")


@pytest.mark.slow
def test_hops_between_nodes_are_searched_where_there_are_nodes():
    """On slow networks, with micro-batches, secondary shares communicate least; on one node there is nothing to try."""
    kept = dataclasses.replace(CONFIG, reshard_after_forward=False)  # else each is tried without, too
    options = {"confirm": False, "stages": (3,), "remat": ("as_written",), "config": kept}
    one = fitted(1000, topology="h200:8", max_accumulate_steps=1, **options)
    assert {x.config.node_axis for x in one.tried} == {None}
    two = fitted(2.1, topology="rtx4090:16", max_accumulate_steps=4, **options)
    ways = {(x.config.node_axis, x.config.secondary_params, x.config.secondary_grads) for x in two.tried}
    assert ways == {(None, False, False), ("node", False, False), ("node", True, False), ("node", True, True)}
    assert all(x.config.secondary_grads <= (x.accumulate_steps > 1) for x in two.tried), "of one it changes nothing"
    assert len({(x.config, x.accumulate_steps) for x in two.tried}) == len(two.tried), "none twice"
    assert all(x.mesh_shape == {"node": 2, "data": 8} for x in two.tried if x.config.node_axis)
    least = {x.accumulate_steps: x for x in reversed(two.tried)}  # the cheapest of each number
    assert least[max(least)].config.secondary_grads
    assert least[max(least)].memory.nic_bytes < min(
        x.memory.nic_bytes for x in two.tried if x.accumulate_steps == max(least) and not x.config.secondary_grads
    )
    assert "nodes, secondary shares" in str(two) or two.chosen.config.node_axis is None


# Optimizer state on the host or on a disk: when it is tried, and what each lacks.


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
    enough = below(host_bytes=needed)
    assert enough.config == host.config
    assert not any("pass `host_bytes`" in note for note in enough.notes)
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
    header = next(line for line in printed(choice.parts(max_rows=None)).splitlines() if line.startswith("stage"))
    assert header.split()[1] == "verdict"
    assert "host" in header.split()
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
    rows = [line for line in str(small).splitlines() if re.match("3(, kept)? {2,}", line)]
    assert [line.endswith(" s") for line in rows] == ["for the disk" in line for line in rows], "seconds of the disk"
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


def test_rows_that_are_alike_are_one_and_all_are_there_on_demand():
    choice = fitted(64, topology="h200:16", stages=(1, 3), remat=("as_written", True), confirm=False)
    text, every = str(choice), printed(choice.parts(max_rows=None))
    rows, all_rows = (re.findall(r"^(?:1|3|3, kept) {2,}.*$", x, re.MULTILINE) for x in (text, every))
    assert len(all_rows) == len(choice.tried) > len(rows)
    assert 1 < len(rows) <= 10
    assert "  chosen  " in rows[0]
    assert "  chosen  " in all_rows[0]
    alike = sum(int(n) for row in rows for n in re.findall(r"(\d+) by (?:mesh|remat|micro-batches|whole)", row))
    assert len(rows) + alike == len(choice.tried)
    assert {row.split("  ")[0] for row in rows} == {row.split("  ")[0] for row in all_rows}, "no stage is hidden"
    units = {unit for row in rows for unit in re.findall(r"[\d.]+ ([KMG]?i?B)\b", re.sub(r"\S+ \S+ too much", "", row))}
    assert len(units) == 1, "one unit per table"


@pytest.mark.parametrize("topology", [None, "h200:8"])
def test_layouts_are_drawn_by_time_if_that_is_known(topology, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        fit_report, "draw", lambda path, title, parts: drawn.extend([title, *(x.keywords for x in parts)])
    )
    choice = fitted(64, stages=(1, 3), remat=("as_written",), confirm=False, topology=topology)
    choice.save_figure("fit.svg")
    title, layouts, course = drawn
    assert title == str(choice).splitlines()[0]
    assert course == {"memory": choice.chosen.memory, "limit": choice.limit}
    best, *_ = points = layouts["points"]
    memory = choice.chosen.memory
    assert best == (1e3 * memory.seconds if topology else memory.sent_bytes / 1e6, memory.peak)
    assert len(points) == len(layouts["names"]) == len(choice.tried)
    assert layouts["unit"] == ("ms of a step" if topology else "MB sent in a step")


def test_pictures_show_layouts_and_what_lives_when(tmp_path):
    pytest.importorskip("matplotlib")
    choice = fitted(64, stages=(1, 3), remat=("as_written",), confirm=False)
    choice.save_figure(str(tmp_path / "fit.svg"))
    assert (tmp_path / "fit.svg").stat().st_size > 10_000
    memory = choice.chosen.memory
    totals = [sum(moment.values()) for moment in memory.course]
    assert max(totals) <= memory.temporaries
    assert max(totals) > 0.8 * memory.temporaries
    assert "course" not in memory.to_dict()
