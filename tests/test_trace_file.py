"""`AnalysisReport.save_trace`: a file as Chrome's trace format wants it, whose times are those of the model."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.analysis import schedule
from jzero.analysis.hlo import parse_hlo
from jzero.machines.machine import machine
from tests import shared

LAYERS, WIDTH = 3, 40


def loss_fn(params, batch):
    with jax.named_scope("head"):
        x = batch @ params["head"]

    def layer(x, w):
        with jax.named_scope("layers/up"):
            return jnp.tanh(x @ w), None

    return jnp.square(jax.lax.scan(layer, x, params["layers"])[0]).mean()


@pytest.fixture(scope="module")
def compiled():
    """A step, its report, and its program as text."""
    params = {"head": jnp.ones((WIDTH, WIDTH)), "layers": jnp.ones((LAYERS, WIDTH, WIDTH))}
    state, batch = shared.sharded(params, optax.sgd(0.1)), np.ones((16, WIDTH), np.float32)
    step = jzero.make_train_step(loss_fn)
    return jzero.analyze(step, state, batch), parse_hlo(step.lower(state, batch).compile().as_text())


ONE_NODE = machine("h200:8")
TWO_NODES = dataclasses.replace(machine("h200:16"), devices_per_node=4)


def saved(compiled, path, hardware=ONE_NODE):
    """The trace that a report writes; devices of CPUs have no rates, so those of GPUs stand in."""
    report, program = compiled
    timeline, _ = schedule.simulate(program, hardware)
    dataclasses.replace(report, timeline=timeline).save_trace(path)
    return json.loads(path.read_text()), timeline


def tracks(trace):
    """Checks the format, and returns the complete events of each track by its name, in order."""
    assert set(trace) >= {"traceEvents", "displayTimeUnit"}
    names = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
    found = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert event["name"]
            assert event["cat"]
            found[names[event["tid"]]].append(event)
    for events in found.values():
        events.sort(key=lambda event: event["ts"])
        for one, next_one in itertools.pairwise(events):
            assert one["ts"] + one["dur"] <= next_one["ts"] * (1 + 1e-9) + 1e-9, "a track does one thing at a time"
    return found


def total(events, *categories):
    return sum(event["dur"] for event in events if not categories or event["cat"] in categories) / 1e6


@pytest.mark.smoke
@pytest.mark.parametrize("hardware", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_durations_are_those_of_the_model(compiled, tmp_path, hardware):
    """The computation and its waits fill the step; collectives take their time, on the links that they use."""
    trace, timeline = saved(compiled, tmp_path / "trace.json", hardware)
    found = tracks(trace)
    assert list(found) == ["computation", "links within a node", "network between nodes"]
    assert total(found["computation"]) == pytest.approx(timeline.seconds)
    assert total(found["computation"], "compute") == pytest.approx(timeline.compute)
    assert total(found["computation"], "wait") >= timeline.exposed * (1 - 1e-9)
    links = [found["links within a node"], found["network between nodes"]]
    busy, idle = links if hardware is ONE_NODE else reversed(links)
    assert total(busy) == pytest.approx(timeline.communication)
    assert not idle


def test_collectives_have_the_names_of_what_they_are_for(compiled, tmp_path):
    trace, _ = saved(compiled, tmp_path / "trace.json")
    events = tracks(trace)["links within a node"]
    names = [event["name"] for event in events]
    assert names.count("all-gather layers/up") == 2 * LAYERS, "forward and backward"
    assert names.count("reduce-scatter layers/up") == LAYERS
    assert names.count("reduce-scatter head") == 1
    gather = next(event for event in events if event["name"] == "all-gather layers/up")
    assert gather["args"]["sent_bytes"] == WIDTH * WIDTH * 4 * 7 / 8
    assert (gather["args"]["dtype"], gather["args"]["devices"], gather["args"]["part"]) == ("f32", 8, "forward")
    parts = {event["name"] for event in tracks(trace)["computation"]}
    assert {"forward", "backward", "update"} <= parts


def test_what_is_left_out_is_told(compiled, tmp_path, monkeypatch):
    for module in (schedule, schedule):
        monkeypatch.setattr(module, "MAX_SPANS", 5)
    trace, timeline = saved(compiled, tmp_path / "trace.json")
    own = tracks(trace)["computation"]
    assert own[-1]["name"].startswith("not shown")
    assert total(own) == pytest.approx(timeline.seconds)


def test_without_rates_there_is_no_trace(compiled, tmp_path):
    with pytest.raises(ValueError, match=r"this machine \(cpu\) are unknown"):
        compiled[0].save_trace(tmp_path / "trace.json")
