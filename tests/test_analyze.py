"""`analyze`: figures against hand arithmetic, and every planted fault is found."""

import dataclasses
import functools
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.analysis.analyze import _transfers
from jzero.analysis.violations import _Amounts
from jzero.estimate.traced_collectives import traced_collectives
from tests import light_decoder, models
from tests.compiled import analyze
from tests.light_decoder import loss_fn
from tests.tiers import slow

LAYERS, WIDTH, VOCAB = 3, 64, 256
TOKENS = models.tokens(16, vocab=VOCAB)
SGD = optax.sgd(0.1, momentum=0.9)


def plain_state():
    return light_decoder.make_state(SGD, layers=LAYERS, width=WIDTH, vocab=VOCAB)


SMALL_LAYERS, SMALL_VOCAB = 8, 32


def small_loss(params, batch):
    """A scan over layers and a head: few equations, for faults that show in any model."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"]["kernel"])
    return jnp.square(x @ params["head"]["kernel"]).mean()


def small_state(config=None):
    shapes = {"layers": (SMALL_LAYERS, WIDTH, WIDTH), "head": (WIDTH, SMALL_VOCAB)}
    params = {name: {"kernel": np.ones(shape, np.float32)} for name, shape in shapes.items()}
    plain = jzero.TrainState.create(params=params, tx=SGD)
    return plain if config is None else jzero.shard_train_state(plain, config=config)


ROWS = np.ones((16, WIDTH), np.float32)


@functools.cache
def report_of(stage, precision="fp32"):
    """Stage 3 of a whole decoder, the others of the small model."""
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, precision=precision)
    if stage < 3:
        return analyze(jzero.make_train_step(small_loss), small_state(config), ROWS)
    return analyze(jzero.make_train_step(loss_fn), jzero.shard_train_state(plain_state(), config=config), TOKENS)


def size(plan, wanted=lambda leaf: True):
    return sum(leaf.param.size for leaf in plan.leaves if wanted(leaf))


SCALARS = 2 * 2  # loss and norm of the gradient are summed


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), slow(1, "bf16")])
def test_stages_1_and_2_are_clean_and_move_two_psi(stage, precision):
    report = report_of(stage, precision=precision)
    report.verify()
    assert report.communication_elements == 2 * size(report.plan) + SCALARS
    assert {row.axis for row in report.collectives} == {"data"}


def test_stage_3_is_clean_and_moves_three_psi():
    """Inside the loop exactly: every leaf once forward and once reduced, and again those that its gradient needs, or
    what is recomputed for that: all but the bias of its last product.
    """
    report = report_of(3)
    report.verify()
    rows = {(row.kind, row.in_loop): row for row in report.collectives}
    stack = size(report.plan, lambda leaf: leaf.scan_dim == 0)
    again = size(report.plan, lambda leaf: leaf.scan_dim == 0 and not leaf.path.endswith("down/bias"))
    assert rows["reduce-scatter", True].elements == stack
    assert rows["all-gather", True].elements == stack + again
    embed = next(leaf.param for leaf in report.plan.leaves if leaf.path == "embed")
    looked_up = TOKENS[:, :-1].size * embed.shape[1]  # in the parts of all devices, which a reduce-scatter adds up
    reduced = size(report.plan) - embed.size + looked_up
    assert sum(row.elements for key, row in rows.items() if key[0] == "reduce-scatter") == reduced
    assert report.communication_elements <= 3 * size(report.plan) + SCALARS
    assert report.communication_elements == sum(row.elements for row in report.collectives)
    moved = rows["all-gather", True].sent_bytes
    assert moved == pytest.approx((stack + again) * 4 * 7 / 8, abs=100)


def test_memory_is_that_of_the_plan():
    report = report_of(3)
    state = report.plan.bytes_per_device
    batch = TOKENS.nbytes // 8
    counters = 4  # `step`
    assert 0 <= report.memory.arguments - (state.params + state.opt_state + batch) <= counters
    assert report.memory.aliased >= state.params + state.opt_state
    assert report.memory.peak >= report.memory.arguments + report.memory.temporaries
    assert report.memory.host == 0


def test_plain_jitted_function():
    mesh = jzero.make_mesh()
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    x, w = put(np.ones((16, 64), np.float32), None, "data"), put(np.ones((64, 32), np.float32), "data")
    report = analyze(jax.jit(lambda x, w: (x @ w).sum(0)), x, w)
    assert report.communication_elements > 0
    assert report.plan is None
    with pytest.raises(ValueError, match="plan"):
        report.verify()
    with pytest.raises(TypeError, match=r"jax\.jit"):
        analyze(lambda x: x, x)


def test_a_plain_function_is_analysed_for_the_machine_that_is_named(monkeypatch):
    """Its arguments move there, those with names, too; the devices of one host are near each other."""
    monkeypatch.setattr("jzero.analysis.analyze.topology_devices", lambda name: jax.devices()[4:])
    mesh = jzero.make_mesh(devices=jax.devices()[:4])
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    x, w = put(np.ones((16, 64), np.float32), None, "data"), put(np.ones((64, 32), np.float32), "data")
    report = analyze(jax.jit(lambda x, *, w: x @ w), x, w=w, topology="h200:8")
    (row,) = report.collectives
    assert (report.machine, report.num_devices, row.kind, row.level) == ("h200:8", 4, "all-reduce", "within")


def violations(report):
    with pytest.raises(jzero.PlanViolation) as caught:
        report.verify()
    assert caught.value.violations == report.violations
    assert all(text in str(caught.value) for text in report.violations)
    return "\n".join(report.violations)


def test_all_reduce_of_gradients_is_found():
    """GSPMD on the CPU backend sums whole gradients and slices."""
    state = small_state(jzero.ZeroConfig(stage=3, persistence_threshold=0))
    batch = jax.device_put(ROWS, NamedSharding(jzero.plan_of(state).mesh, PartitionSpec("data")))
    step = lambda s, b: s.apply_gradients(grads=jax.grad(small_loss)(jzero.natural_params(s), b))
    found = violations(analyze(jax.jit(step, donate_argnums=0), state, batch))
    assert "all-reduce" in found
    assert "kernel" in found
    assert "donated" not in found


def test_lost_donation_is_found():
    step = jzero.make_train_step(small_loss)
    found = violations(analyze(jax.jit(step), small_state(jzero.ZeroConfig(stage=1, persistence_threshold=0)), ROWS))
    assert "donated" in found
    assert found.count("\n") == 0, "and nothing else"


def test_wide_gathers_and_weights_kept_for_the_backward_pass_are_found():
    """The plan says bf16 and gathered twice, the program is of fp32 and once. The dtype is read from the trace."""
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    kept = small_state(dataclasses.replace(config, reshard_after_forward=False))
    planned = jzero.plan_of(small_state(dataclasses.replace(config, precision="bf16")))
    found = violations(analyze(jzero.make_train_step(small_loss), kept, ROWS, plan=planned))
    assert "wider than the bfloat16" in found
    assert "stored in a stack" in found
    assert f"f32[{WIDTH},{WIDTH}]" in found


@pytest.mark.slow
def test_stack_cut_where_it_is_scanned_is_found():
    rules = {"layers/.*kernel": jzero.LeafRule(dim=0)}
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, rules=rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine says so too
        found = violations(analyze(jzero.make_train_step(small_loss), small_state(), ROWS, config=config))
    assert f"whole stack f32[{SMALL_LAYERS},{WIDTH},{WIDTH}]" in found


@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_amounts_are_those_of_the_trace_by_hand(accumulate_steps):
    """A stack and a head, in a loop or not: gathered for both passes, reduced after the second."""
    state, size = small_state(jzero.ZeroConfig(stage=3, persistence_threshold=0)), (SMALL_LAYERS * WIDTH + 32) * WIDTH
    step = jzero.make_train_step(small_loss, accumulate_steps=accumulate_steps)
    jaxpr = step.trace(state, np.ones((48, WIDTH), np.float32)).jaxpr
    facts = types.SimpleNamespace(collectives=(), platform="gpu", micro_batches=accumulate_steps)
    facts.sent, facts.transfers = tuple(traced_collectives(jaxpr)), _transfers(jaxpr)
    found = _Amounts(facts, jzero.plan_of(state))
    of_params = {("all-gather", False): 2 * 4 * size * accumulate_steps}
    of_params["reduce-scatter", False] = 4 * size * accumulate_steps
    assert found.placed == found.needed == of_params
    assert {key: found.traced[key] for key in of_params} == of_params


def test_figure(tmp_path):
    report_of(2).save_figure(str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_figure_names_the_extra_that_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"jzero\[examples\]"):
        report_of(2).save_figure(str(tmp_path / "report.png"))
