"""Reports in notebooks and as JSON: what they print, with tables as tables, and their fields."""

import dataclasses
import html.parser
import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.base.text import Report, Table, few, format_number, printed


@pytest.mark.parametrize(
    ("x", "text"), [(28680.4, "28680"), (9999.7, "10000"), (672.83, "672.8"), (1.5, "1.5"), (0.01234567, "0.01235")]
)
def test_a_number_has_no_exponent(x, text):
    assert format_number(x, 4) == text


def test_of_many_the_first_are_named():
    assert few("abc", 3) == "a, b, c"
    assert few("abcd", 3) == "a, b, c, and 1 more"
    assert few(range(12), 2, between="; ") == "0; 1; and 10 more"
    assert few([], 3) == ""


class Tables(html.parser.HTMLParser):
    """The tables of a text as lists of rows, and the text outside of them."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.outside, self._cell = [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self._cell)
            self._cell = None

    def handle_data(self, data):
        if self._cell is None:
            self.outside += data
        else:
            self._cell += data


def loss_fn(params, batch):
    return jnp.square(jnp.tanh(batch @ params["w"])).mean()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Each kind of report, of a small model."""
    plain = jzero.TrainState.create(params={"w": jnp.ones((36, 61)) / 61}, tx=optax.adam(1e-3))
    state, step, batch = jzero.shard_train_state(plain, stage=3), jzero.make_train_step(loss_fn), jnp.ones((16, 36))
    path = tmp_path_factory.mktemp("html")
    jzero.save_checkpoint(path / "checkpoint", state)
    found = [
        jzero.plan_of(state),
        jzero.analyze(step, state, batch),
        jzero.estimate_step_memory(step, state, batch, topology="h200:8"),
        jzero.fit(plain, loss_fn, batch, topology="h200:8", confirm=False, stages=(3,), remat=("as_written",)),
        jzero.check_equivalence(loss_fn, plain, [batch], stage=3),
        jzero.from_deepspeed({"zero_optimization": {"stage": 3}, "train_batch_size": 8})[1],
        jzero.inspect_checkpoint(path / "checkpoint"),
        jzero.export_params(state, path / "model.safetensors"),
        jzero.estimate_zero3_model_states_mem_needs_all_cold(10**9, 10**7, verbose=False),
    ]
    return {type(x).__name__: x for x in found}


def test_terminals_get_lines_that_fit():
    table = Table([("key", "value"), ("long", "some words " * 8), ("shorter", "one")], left=2)
    parts = ["A title of a report, and more", "", table]
    inside = printed(parts, 50).splitlines()
    assert inside[2:4] == ["key      value", "long     some words some words some words some"]
    assert inside[4] == "         words some words some words some words"
    under = printed(parts, 30).splitlines()
    assert under[:2] == ["A title of a report, and more", ""]
    assert under[2:5] == ["key      value", "long", "    some words some words some"]
    assert printed(["  " + "word " * 8], 20).splitlines() == ["  word word word", "    word word word", "    word word"]
    assert [len(line.rstrip()) for line in printed(parts).splitlines()] == [29, 0, 14, 96, 12]


def test_no_report_loses_a_word(reports):
    assert Tables(reports["ZeroPlan"]._repr_html_()).tables[0][0][:2] == ["bytes per device", "params"]
    (leaves,) = Tables(reports["CheckpointInfo"]._repr_html_()).tables
    assert leaves[0] == ["leaf", "dtype", "shape", "bytes"]
    assert len(leaves) == 1 + len(reports["CheckpointInfo"].leaves), "the line below is no row"
    for name, report in reports.items():
        shown = Tables(report._repr_html_())
        words = [
            *shown.outside.split(),
            *(word for table in shown.tables for row in table for c in row for word in c.split()),
        ]
        assert sorted(words) == sorted(word for word in str(report).split() if word.strip("-")), name


def test_every_report_is_shown_by_notebooks():
    classes = [getattr(jzero, name) for name in jzero.__all__ if isinstance(getattr(jzero, name), type)]
    told = [x for x in classes if {"__str__", "parts"} & {*vars(x)} and dataclasses.is_dataclass(x)]
    assert {"ZeroPlan", "AnalysisReport", "Fit"} <= {x.__name__ for x in told}
    assert [x.__name__ for x in told if not hasattr(x, "_repr_html_")] == []


def test_every_report_is_data(reports):
    for name, report in reports.items():
        data = json.loads(report.to_json())
        assert data == json.loads(json.dumps(report.to_dict(), default=str)), name
        assert data, name
    steps = json.loads(reports["EquivalenceReport"].to_json())["steps"]
    assert steps == [dataclasses.asdict(x) for x in reports["EquivalenceReport"].steps]


def test_json_has_no_infinity_and_no_nan():
    """Whatever a report holds: JSON's own numbers are finite, and other readers than Python's refuse the rest."""

    @dataclasses.dataclass
    class Odd(Report):
        x: object

    numbers = [math.inf, -math.inf, math.nan, np.float32("inf"), np.array(np.nan), jnp.float32(jnp.inf), 0.5]
    text = Odd({"deep": [(x,) for x in numbers], math.inf: Odd(math.inf)}).to_json()
    found = json.loads(text, parse_constant=pytest.fail)["x"]
    assert [x for (x,) in found["deep"]] == ["inf", "-inf", "nan", "inf", "nan", "inf", 0.5]
    assert found["inf"] == {"x": "inf"}
