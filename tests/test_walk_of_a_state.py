"""The way of a state through `shard_train_state` is that of docs/design.md, from higher rooms to lower ones alone."""

import pathlib
import re
import sys
import tomllib

import jax.numpy as jnp
import optax
import pytest

import jzero

ROOT = pathlib.Path(jzero.__file__).parents[1]
CORE = f"{ROOT / 'jzero' / 'core'}/"


def floors():
    """Returns the height of each room of the core."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(x["layers"] for x in contracts if x["id"] == "core")
    return {room: -i for i, layer in enumerate(layers) for room in layer.split(" | ")}


def calls_of(run):
    """Returns the calls between functions of the core, as pairs of code objects, seen through other libraries."""
    calls = []

    def note(frame, event, _):
        caller = frame.f_back
        if event == "call" and frame.f_code.co_filename.startswith(CORE):
            while caller is not None and not caller.f_code.co_filename.startswith(CORE):
                caller = caller.f_back
            calls.append((caller and caller.f_code, frame.f_code))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_goes_straight_down(precision):
    params = {"w": jnp.ones((512, 24)), "odd": jnp.ones((37, 401)), "b": jnp.ones(13)}
    state = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=3, precision=precision)
    calls = calls_of(lambda: jzero.shard_train_state(state, config=config))
    place = lambda code: code.co_filename.removeprefix(CORE)
    text = (ROOT / "docs" / "design.md").read_text()
    stops = re.findall(r"^\d+\. `(?:\w+\.)?(\w+)`, `([\w/.]+)`", text, re.M)
    assert stops[0] == ("shard_train_state", "state/shard.py")
    assert len(stops) <= 10
    passed = dict.fromkeys((code.co_name, place(code)) for _, code in calls)
    assert [stop for stop in passed if stop in stops] == stops

    height, room = floors(), lambda code: place(code).partition("/")[0]
    climbs = {
        (place(above), place(code), code.co_name)
        for above, code in calls
        # Decorators of public calls and rules of settings are `config`'s; a state's own methods are its class's.
        if above is not None and room(above) != "config" and code.co_name != "replace"
        if height[room(code)] > height[room(above)]
    }
    assert not climbs
