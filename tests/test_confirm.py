"""What `fit` compiles, and that the compiler's figures decide; the compiler is a table of figures."""

import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.analysis import confirm, fit
from jzero.analysis.candidates import Candidate, choose, judge
from jzero.analysis.compiled_step import compile_step
from jzero.analysis.fit_report import Fit
from jzero.estimate.step_memory import StepMemory
from jzero.estimate.step_time import StepTime
from jzero.machines.machine import machine

LIMIT = 1000
OF = {"params": 0, "grads": 0, "opt_state": 0, "other": 0, "activations": (), "at_peak": {}}
NONE = {
    "sent_by_axes": {},
    "nic_bytes": 0,
    "gathered_bytes": 0,
    "planned_bytes": 0,
    "flops": 0.0,
    "communication_seconds": 0.0,
}


def candidate(seconds, peak, *, steps=1, **fields):
    memory = StepMemory(temporaries=peak, time=StepTime(0.0, 0.0, 0.0, 0.0, seconds), **OF, **NONE)
    return Candidate(jzero.ZeroConfig(stage=3), {"data": 8}, steps, "cheap", memory, **fields)


@dataclasses.dataclass
class Compiler:
    """Peak and seconds of a candidate, by its reckoned peak; `None`: it is refused."""

    figures: dict
    asked: list = dataclasses.field(default_factory=list)

    def __call__(self, search, x):
        self.asked.append(x.memory.peak)
        figures = self.figures.get(x.memory.peak, (x.memory.peak, x.memory.seconds))
        if figures is None:
            return dataclasses.replace(x, refused=True)
        return dataclasses.replace(x, compiled_peak=figures[0], compiled_seconds=figures[1])


def confirmed(monkeypatch, tried, figures, *, more=(), next_steps=()):
    """Returns the choice, all candidates, and the reckoned peaks of those that were compiled."""
    compiler, left = Compiler(figures), list(more)
    monkeypatch.setattr(confirm, "compiled", compiler)

    def add(tried):
        fits = any(x.fits(LIMIT) for x in tried)
        found, left[:] = ([], left) if fits else (left[:], [])
        return found

    search = types.SimpleNamespace(limit=LIMIT, more=add, next_steps=lambda x: list(next_steps))
    found = confirm.confirm(search, tried)
    return choose(found, LIMIT, confirmed=True), found, compiler.asked


def test_the_compiled_schedules_of_three_decide(monkeypatch):
    tried = [candidate(1.0 + i / 10, 500 + i) for i in range(5)]
    chosen, found, asked = confirmed(monkeypatch, tried, {500: (500, 1.3), 501: (501, 1.25), 502: (502, 1.2)})
    assert asked == [500, 501, 502]
    assert (chosen.memory.peak, chosen.compiled_seconds) == (502, 1.2)
    verdicts = [x.verdict for x in judge(found, chosen, LIMIT)]
    assert verdicts == [
        "fits; 1.08x the time",
        "fits; 1.04x the time",
        "chosen",
        "fits; 1.08x the time",
        "fits; 1.17x the time",
    ]


def test_a_usual_step_decides_and_the_longest_is_told(monkeypatch):
    """The other has shorter rare branches."""
    fast = {"compiled_peak": 500, "compiled_seconds": 1.3, "most_seconds": 3.1}
    tried = [candidate(1.0, 500, **fast), candidate(1.1, 501, **{**fast, "compiled_seconds": 1.5, "most_seconds": 1.6})]
    chosen = choose(tried, LIMIT, confirmed=True)
    assert chosen is tried[0]
    found = tuple(judge(tried, chosen, LIMIT))
    text = str(Fit("h200:8", LIMIT, found, found[0], ()))
    assert "; a step takes 1300 ms, at most 3100 ms\n" in text
    assert [line.split()[-1] for line in text.splitlines()[-2:]] == ["3100", "1600"]
    same = dataclasses.replace(found[0], most_seconds=1.3)
    assert "at most" not in str(Fit("h200:8", LIMIT, (same,), same, ()))


def test_branches_that_a_usual_step_leaves_out():
    """A chain of products that few numbers need takes the time of a step at most, not that of a usual one."""
    often = lambda w, x: jnp.tanh(x @ w)
    chain = jax.checkpoint(lambda w, x: functools.reduce(lambda x, _: often(w, x), range(8), x))
    rarely = lambda w, x: jax.lax.cond(w[0, 0] > 9, chain, lambda w, x: x, w, x)

    def compiled(fn):
        loss = lambda params, x: jnp.square(fn(params["w"], often(params["w"], x))).mean()
        state = jax.eval_shape(lambda: jzero.TrainState.create(params={"w": jnp.zeros((256, 256))}, tx=optax.sgd(0.1)))
        state = jzero.abstract_train_state(state, config=jzero.ZeroConfig(stage=2), mesh=jzero.make_mesh(data=-1))
        return compile_step(jzero.make_train_step(loss), (state, jnp.zeros((512, 256)), None), None, machine("h200:8"))

    without, usual, whole = map(compiled, (lambda w, x: x, rarely, chain))
    assert without.seconds == without.most_seconds
    assert without.seconds <= usual.seconds < 1.5 * without.seconds  # the kernel is no part of a larger fusion
    assert usual.most_seconds > 0.8 * whole.seconds > 2 * usual.seconds


@pytest.mark.parametrize("misfit", [(1001, 0.5), None])
def test_what_does_not_fit_is_never_chosen(monkeypatch, misfit):
    """It falls through to the next, and to more micro-batches."""
    tried = [candidate(1.0 + i / 10, 500 + i) for i in range(3)]
    halves = candidate(1.05, 250, steps=2)
    chosen, _, asked = confirmed(monkeypatch, tried, {500: misfit}, next_steps=[halves])
    assert asked == [500, 250, 501, 502]
    assert chosen.accumulate_steps == 2
    chosen, found, asked = confirmed(monkeypatch, tried, {500 + i: misfit for i in range(3)})
    assert asked == [500, 501, 502]
    assert chosen is None
    assert not any(x.verdict.startswith("fits") for x in judge(found, chosen, LIMIT))


def test_more_is_tried_if_nothing_fits(monkeypatch):
    last = candidate(5.0, 100, host_seconds=4.0)
    chosen, found, asked = confirmed(monkeypatch, [candidate(1.0, 950)], {950: (1050, 1.0)}, more=[last])
    assert asked == [950, 100]
    assert chosen == dataclasses.replace(last, compiled_peak=100, compiled_seconds=5.0)
    assert chosen.compiled_cost() == 9.0
    assert len(found) == 2
    asked = confirmed(monkeypatch, [candidate(1.0, 2000)], {}, more=[])[2]
    assert asked == [2000], "is the least really too much?"


def test_options_without_a_name_say_themselves_what_they_are():
    """As an object that says what a step keeps may; it need not be hashable."""

    class Keep:
        __hash__ = None

        def __str__(self):
            return "Keep(blocks=5)"

    kept = dataclasses.replace(candidate(1.0, 500), remat=Keep())
    cheap = candidate(1.0, 500)
    found = tuple(judge([kept, cheap], kept, LIMIT))
    assert [x.verdict for x in found] == ["chosen", "fits; no faster"]
    result = Fit("h200:8", LIMIT, found, found[0], ())
    assert "stage 3, Keep(blocks=5) fits: 500 B" in str(result)
    assert '"remat": "Keep(blocks=5)"' in result.to_json()
    assert result.remat is kept.remat


@pytest.mark.parametrize(("other", "is_same"), [({}, True), ({"remat": True}, False), ({"peak": 501}, False)])
def test_figures_are_those_of_one_program(other, is_same):
    """With one micro-batch, stages 1 and 2 are the same program; nothing else is."""
    found = candidate(1.0, 500, compiled_peak=400, compiled_seconds=1.3)
    x = dataclasses.replace(candidate(1.0, other.get("peak", 500)), config=jzero.ZeroConfig(stage=2))
    x = dataclasses.replace(x, remat=other.get("remat", x.remat))
    assert confirm._if_equal(x, found).compiled_peak == (400 if is_same else None)


@pytest.mark.parametrize(("seconds", "is_kept"), [(0.9, True), (1.0, True), (1.1, False)])
def test_what_still_fits_is_kept_unless_that_is_slower(seconds, is_kept, monkeypatch):
    filling = mock.MagicMock(confirmed=lambda limit: 2, compiled={}, estimated=lambda n: candidate(seconds, 600).memory)
    monkeypatch.setattr(fit, "Filling", lambda **_: filling)
    monkeypatch.setattr(fit, "plan_of_argument", lambda x: x)
    found = fit._filled(mock.MagicMock(limit=LIMIT), candidate(1.0, 500), compiles=True)
    assert (found is not None) == is_kept
    assert not is_kept or (found.memory.peak, found.remat) == (600, filling.step_keeping(2).remat)
