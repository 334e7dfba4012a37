"""What the compiler makes of each stage: which collectives, how many, over how much, and where."""

from __future__ import annotations

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest

import jzero
from jzero import _compat
from jzero.analysis.collectives import find_collectives
from tests import light_decoder, models
from tests.stablehlo import in_line
from tests.tiers import slow, stages

N = 8


DEFAULTS = {"scan": True, "remat": None, "tx": "adam", "layers": None, "vocab": 512, "tied": False}
DEFAULTS |= {"recompute": None, "micro": 1}


def _lowered(stage, **options):
    return _lowered_once(stage, **DEFAULTS | options)


def _compiled(stage, **options):
    return _compiled_once(stage, **DEFAULTS | options)


@functools.cache
def _lowered_once(stage, *, scan, remat, tx, layers, vocab, tied, recompute, micro, **options):
    layer = light_decoder.apply_layer if remat is None else jax.checkpoint(light_decoder.apply_layer, **dict(remat))
    sizes = {"layers": layers or (3 if scan else 2), "width": 128, "vocab": vocab, "scan": scan, "tied": tied}
    optimizers = {"adam": optax.adam, "lion": optax.lion, "sgd": optax.sgd}
    tx = optax.sgd(1e-3, momentum=0.9) if tx == "momentum" else optimizers[tx](1e-3)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, **options)
    state = jzero.abstract_train_state(jax.eval_shape(lambda: light_decoder.make_state(tx, **sizes)), config=config)
    step = jzero.make_train_step(light_decoder.loss_with(layer), remat=recompute, accumulate_steps=micro)
    return state, step.lower(state, models.tokens(16, vocab=vocab))


@functools.cache
def _compiled_once(stage, **options):
    state, lowered = _lowered(stage, **options)
    compiled = lowered.compile()
    return jzero.plan_of(state), compiled, find_collectives(compiled.as_text())


def _size(plan):
    return sum(leaf.param.size for leaf in plan.leaves)


def _of(collectives, kind):
    return [c for c in collectives if c.kind == kind]


def assert_all_reduces_are_small(plan, collectives):
    """No more than those of leaves that are whole, and of numbers; nothing else is exchanged."""
    small = sum(leaf.grad.size for leaf in plan.leaves if leaf.grad.cut is None)
    assert small < 100
    assert all(c.full_size <= small + 4 for c in _of(collectives, "all-reduce"))
    assert not [c for c in collectives if c.kind in ("all-to-all", "collective-permute")]


@pytest.mark.parametrize(("stage", "scan"), [(1, True), (2, False), slow(1, False), slow(2, True)])
def test_stages_1_and_2_send_two_psi(stage, scan):
    plan, _, collectives = _compiled(stage, scan=scan)
    psi = _size(plan)
    assert math.isclose(sum(c.elements for c in collectives), 2 * psi, rel_tol=0.02)
    assert math.isclose(sum(c.elements for c in _of(collectives, "reduce-scatter")), psi, rel_tol=0.01)
    assert math.isclose(sum(c.elements for c in _of(collectives, "all-gather")), psi, rel_tol=0.01)
    assert_all_reduces_are_small(plan, collectives)


@pytest.mark.parametrize("remat", [slow(None), (("prevent_cse", False),)], ids=["plain", "remat"])
def test_stage_3_sends_three_psi(remat):
    """A deep model: embedding and biases, whose backward pass needs no parameter, are under 2 % of it."""
    plan, _, collectives = _compiled(3, remat=remat, layers=12, vocab=64)
    psi = _size(plan)
    assert_all_reduces_are_small(plan, collectives)
    assert math.isclose(sum(c.elements for c in collectives), 3 * psi, rel_tol=0.02)
    assert math.isclose(sum(c.elements for c in _of(collectives, "reduce-scatter")), psi, rel_tol=0.01)


@pytest.mark.parametrize("remat", [None, slow((("prevent_cse", False),))], ids=["plain", "remat"])
def test_stage_3_gathers_a_scanned_layer_inside_the_loop(remat):
    plan, _, collectives = _compiled(3, remat=remat)
    stacked = [leaf for leaf in plan.leaves if leaf.scan_dim == 0]
    largest_layer = max(leaf.param.size // leaf.param.shape[0] for leaf in stacked)
    outside = [leaf for leaf in plan.leaves if leaf.scan_dim is None]
    limit = max(largest_layer, *(leaf.param.size for leaf in outside))
    gathers = _of(collectives, "all-gather")
    assert all(c.full_size <= limit for c in gathers)
    inside = [c for c in gathers if c.in_loop]
    assert {c.times for c in inside} == {3}
    layer = sum(leaf.param.size // leaf.param.shape[0] for leaf in stacked)
    assert layer * 3 <= sum(c.elements for c in inside) <= 2 * layer * 3
    assert any(c.in_loop for c in _of(collectives, "reduce-scatter"))


@pytest.mark.parametrize(("recompute", "again"), [("as_written", "kernel|scale"), (None, "kernel|scale|layer_.*bias")])
def test_what_is_recomputed_gathers_no_parameter_a_third_time(recompute, again):
    """As lowered, before any combiner: forward, backward of those whose value the gradient needs, one scatter a leaf.

    By default the biases of the layers are wanted again as well, but for that of their last product.
    """
    state, lowered = _lowered(3, scan=False, layers=3, recompute=recompute)
    cut = [leaf.path for leaf in jzero.plan_of(state).leaves if leaf.param.cut is not None]
    needed_again = [x for x in cut if re.search(again, x) and not x.endswith("down/bias")]
    text = in_line(lowered.as_text())
    assert text.count("stablehlo.reduce_scatter") == len(cut)
    assert text.count("stablehlo.all_gather") == len(cut) + len(needed_again)


def test_stage_2_gathers_no_parameter_in_forward_and_backward():
    """Its explicit part holds no gather at all; those of the compiled program are the update's, one per leaf."""
    state, lowered = _lowered(2, scan=False)
    plan = jzero.plan_of(state)
    assert lowered.as_text().count("stablehlo.all_gather") == 0
    _, _, collectives = _compiled(2, scan=False)
    gathered = sum(len(c.shapes) for c in _of(collectives, "all-gather"))
    assert gathered == sum(leaf.grad.cut is not None for leaf in plan.leaves)


@stages(1, of=(1, 2))
def test_one_micro_batch_is_reduced_inside_the_scan(stage):
    """Stage 1 as well: it has nothing to keep whole gradients for."""
    _, _, collectives = _compiled(stage)
    assert {c.times for c in _of(collectives, "reduce-scatter") if c.in_loop} == {3}


@pytest.mark.parametrize("scan", [True, slow(False)])
def test_the_gradient_of_a_tied_parameter_is_reduced_once(scan):
    """The embedding is the head here. Its whole gradient is summed first; from stage 2 on not across a loop."""
    for stage, more in ((1, 0), (2, int(scan))):
        state, lowered = _lowered(stage, scan=scan, tied=True)
        cut = [leaf for leaf in jzero.plan_of(state).leaves if leaf.grad.cut is not None]
        assert lowered.as_text().count("stablehlo.reduce_scatter") == len(cut) + more


def test_all_reduce_and_slice_on_request():
    _, lowered = _lowered(2, reduce_scatter=False)
    assert lowered.as_text().count("stablehlo.reduce_scatter") == 0


@pytest.mark.parametrize("scan", [True, slow(False)])
def test_gathered_weights_do_not_survive_to_the_backward_pass(scan):
    """Counted on the lowered program: with regathering, each kernel is gathered behind a barrier or in its own loop."""
    _, kept = _lowered(3, scan=scan, reshard_after_forward=False)
    _, dropped = _lowered(3, scan=scan)
    few, many = (in_line(lowered.as_text()).count("stablehlo.all_gather") for lowered in (kept, dropped))
    assert many > few


def test_scan_keeps_no_stack_of_gathered_weights():
    """Temporaries with and without regathering differ by the stack of gathered layers, less one layer's worth."""
    plan, dropped, _ = _compiled(3)
    _, kept, _ = _compiled(3, reshard_after_forward=False)
    kernels = [leaf.param for leaf in plan.leaves if leaf.scan_dim == 0 and leaf.path.endswith("kernel")]
    stack = 4 * sum(leaf.size for leaf in kernels)
    saved = kept.memory_analysis().temp_size_in_bytes - dropped.memory_analysis().temp_size_in_bytes
    assert saved >= 0.6 * stack  # 2 of 3 layers: at least one is whole at any time


@pytest.mark.slow  # by default, all programs of this file are those of Adam
@pytest.mark.parametrize("tx", ["momentum", "lion"])
def test_elementwise_optimizers_add_no_collective(tx):
    _, _, adam = _compiled(3)
    _, _, other = _compiled(3, tx=tx)
    count = lambda collectives: sorted((c.kind, c.shapes, c.times) for c in collectives if c.kind != "all-reduce")
    assert count(other) == count(adam)
    _, lowered = _lowered(3)
    explicit = lowered.as_text().count("stablehlo.all_gather")
    assert sum(len(c.shapes) for c in _of(adam, "all-gather")) <= explicit


def test_muon_multiplies_whole_matrices():
    """Every product of a step is in a `shard_map`, those of the update over whole operands."""

    def outside(jaxpr):
        for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
            yield eqn.primitive.name
            if eqn.primitive.name != "shard_map":
                for inner in _compat.contained_jaxprs(eqn):
                    yield from outside(inner)

    state = mlp_state(2, optax.contrib.muon(1e-3))
    found = set(outside(jzero.make_train_step(models.mlp_loss).trace(state, models.mlp_batch(8)).jaxpr))
    assert "shard_map" in found
    assert "dot_general" not in found


@stages(1, 2, 3)
def test_donated_state_is_reused(stage):
    """Every buffer of the state is aliased to an output: no second copy of the state exists during a step."""
    plan, compiled, _ = _compiled(stage, scan=stage != 2)  # programs that other tests compile
    memory = compiled.memory_analysis()
    state_bytes = plan.bytes_per_device.params + plan.bytes_per_device.opt_state
    assert memory.alias_size_in_bytes >= state_bytes


def mlp_state(stage, tx, threshold=0, devices=N):
    plain = jzero.TrainState.create(params=models.mlp_params(sizes=models.TWO_LAYERS), tx=tx)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=threshold)
    return jzero.shard_train_state(plain, config=config, mesh=jzero.make_mesh(devices=jax.devices()[:devices]))


class NoCompilation:
    """Fails if anything is compiled inside."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event, duration, **kwargs):
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *exc):
        jax.monitoring.clear_event_listeners()
        assert self.count == 0 or exc[0], f"{self.count} programs were compiled"


def test_nothing_is_compiled_after_the_first_step_and_all_copies_of_replicated_values_are_equal():
    tx, step = optax.adamw(1e-3), jzero.make_train_step(models.mlp_loss)
    state, _ = step(mlp_state(3, tx, threshold=100), models.mlp_batch(8))
    with jax.log_compiles(False), NoCompilation():
        for seed in range(2):
            state, metrics = step(state, models.mlp_batch(8, seed))
    # The same optax object wrapped again, over a state made anew: still the same program.
    again = mlp_state(3, tx, threshold=100)
    with NoCompilation():
        again, _ = step(again, models.mlp_batch(8, 5))
    jax.tree.map(lambda a, b: None, again, state)  # equal static fields: one tree.map over both
    replicated = [x for x in jax.tree.leaves((state, metrics)) if x.sharding.is_fully_replicated]
    assert len(replicated) > 3
    for x in replicated:
        first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(others) == N - 1
        assert all((first == other).all() for other in others)


@stages(3, of=(1, 2, 3))
def test_padding_stays_zero(stage):
    state, step = mlp_state(stage, optax.adamw(1e-2), devices=7), jzero.make_train_step(models.mlp_loss)
    for seed in range(3):
        state, _ = step(state, models.mlp_batch(7, seed))
    plan = jzero.plan_of(state)
    leaves = [
        *zip(jax.tree.leaves(state.params), (leaf.param for leaf in plan.leaves), strict=True),
        *zip(jax.tree.leaves(state.opt_state), plan.opt_leaves, strict=True),
    ]
    padded = [(np.asarray(x), leaf.cut) for x, leaf in leaves if leaf.cut is not None and leaf.cut.is_padded]
    assert len(padded) == (12 if stage == 3 else 8)  # parameters and two moments, or these alone
    for x, cut in padded:
        assert not np.take(x, range(cut.natural_size, cut.stored_size), axis=cut.dim).any()
