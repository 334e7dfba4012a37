"""What a step is lowered to, how often it is compiled, and what lies in padding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest

import jzero
from jzero.core.base import compat
from tests import light_decoder, models, shared
from tests.stablehlo import in_line

N = 8


@functools.cache
def _lowered(stage, *, scan=True, recompute=None, **options):
    sizes = {"layers": 2, "width": 128, "vocab": 512, "scan": scan}
    plain = jax.eval_shape(lambda: light_decoder.make_state(optax.adam(1e-3), **sizes))
    state = jzero.abstract_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0, **options))
    step = jzero.make_train_step(light_decoder.loss_fn, remat=recompute)
    return state, step.lower(state, models.tokens(16, vocab=512))


@pytest.mark.parametrize(("recompute", "again"), [("as_written", "kernel|scale"), (None, "kernel|scale|layer_.*bias")])
def test_what_is_recomputed_gathers_no_parameter_a_third_time(recompute, again):
    """As lowered, before any combiner: forward, backward of those whose value the gradient needs, one scatter a leaf.

    By default the biases of the layers are wanted again as well, but for that of their last product.
    """
    state, lowered = _lowered(3, scan=False, recompute=recompute)
    cut = [leaf.path for leaf in jzero.plan_of(state).leaves if leaf.param.cut is not None]
    needed_again = [x for x in cut if re.search(again, x) and not x.endswith("down/bias")]
    text = in_line(lowered.as_text())
    assert text.count("stablehlo.reduce_scatter") == len(cut)
    # The embedding's rows are summed over devices, not gathered: indices are, and in the backward pass the gradients.
    assert text.count("stablehlo.all_gather") == len(cut) - 1 + len(needed_again) + 3


def test_all_reduce_and_slice_on_request():
    state = mlp_state(2, optax.sgd(0.1), reduce_scatter=False)
    lowered = jzero.make_train_step(models.mlp_loss).lower(state, models.mlp_batch(8))
    assert lowered.as_text().count("stablehlo.reduce_scatter") == 0


def test_gathered_weights_do_not_survive_to_the_backward_pass():
    """Counted on the lowered program: with regathering, each kernel is gathered in its own loop."""
    _, kept = _lowered(3, reshard_after_forward=False)
    _, dropped = _lowered(3)
    few, many = (in_line(lowered.as_text()).count("stablehlo.all_gather") for lowered in (kept, dropped))
    assert many > few


def test_muon_multiplies_whole_matrices():
    """Every product of a step is in a `shard_map`, those of the update over whole operands."""

    def outside(jaxpr):
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
            yield eqn.primitive.name
            if eqn.primitive.name != "shard_map":
                for inner in compat.contained_jaxprs(eqn):
                    yield from outside(inner)

    state = mlp_state(2, optax.contrib.muon(1e-3))
    found = set(outside(jzero.make_train_step(models.mlp_loss).trace(state, models.mlp_batch(8)).jaxpr))
    assert "shard_map" in found
    assert "dot_general" not in found


def mlp_state(stage, tx, threshold=0, devices=N, **options):
    params, options = models.mlp_params(sizes=models.TWO_LAYERS), {"persistence_threshold": threshold, **options}
    return shared.sharded(params, tx, stage, mesh=devices, **options)


@contextlib.contextmanager
def no_compilation():
    """Fails if anything is compiled inside."""
    heard = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: heard.append(event))
    yield
    jax.monitoring.clear_event_listeners()
    assert heard.count("/jax/core/compile/backend_compile_duration") == 0


def test_nothing_is_compiled_after_the_first_step_and_all_copies_of_replicated_values_are_equal():
    tx, step = optax.adamw(1e-3), jzero.make_train_step(models.mlp_loss)
    state, _ = step(mlp_state(3, tx, threshold=100), models.mlp_batch(8))
    with jax.log_compiles(False), no_compilation():
        for seed in range(2):
            state, metrics = step(state, models.mlp_batch(8, seed))
    # The same optax object wrapped again, over a state made anew: still the same program.
    again = mlp_state(3, tx, threshold=100)
    with no_compilation():
        again, _ = step(again, models.mlp_batch(8, 5))
    jax.tree.map(lambda a, b: None, again, state)  # equal static fields: one tree.map over both
    of_a_step = dict.fromkeys(("applied", "value"), np.ones(2))
    assert dataclasses.replace(again.tx, **of_a_step) == state.tx, "what one step hands to `apply_gradients` is none"
    replicated = [x for x in jax.tree.leaves((state, metrics)) if x.sharding.is_fully_replicated]
    assert len(replicated) > 3
    for x in replicated:
        first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(others) == N - 1
        assert all((first == other).all() for other in others)


def test_padding_stays_zero():
    state, step = mlp_state(3, optax.adamw(1e-2), devices=7), jzero.make_train_step(models.mlp_loss)
    for seed in range(3):
        state, _ = step(state, models.mlp_batch(7, seed))
    plan = jzero.plan_of(state)
    leaves = [
        *zip(jax.tree.leaves(state.params), (leaf.param for leaf in plan.leaves), strict=True),
        *zip(jax.tree.leaves(state.opt_state), plan.opt_leaves, strict=True),
    ]
    padded = [(np.asarray(x), leaf.cut) for x, leaf in leaves if leaf.cut is not None and leaf.cut.is_padded]
    assert len(padded) == 12  # parameters and two moments
    for x, cut in padded:
        assert not np.take(x, range(cut.natural_size, cut.stored_size), axis=cut.dim).any()
