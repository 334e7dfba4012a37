"""Moves of a state to host memory and back."""

import jax
import numpy as np
import optax
import pytest

import jzero
from jzero.layout import mesh as _mesh
from tests import models
from tests.checkpoint_states import arrays, assert_same_bits

ADAMW = optax.adamw(1e-2)


def make_state(stage, precision="fp32", sizes=models.MLP_SIZES):
    state = jzero.TrainState.create(params=models.mlp_params(sizes=sizes), tx=ADAMW)
    config = jzero.ZeroConfig(stage=stage, precision=precision, persistence_threshold=50)
    return jzero.shard_train_state(state, config=config)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def test_evaluation_needs_the_parameters_alone():
    state = make_state(3)
    evaluate = jzero.make_eval_step(lambda params, batch: {"loss": models.mlp_loss(params, batch)})
    expected = evaluate(state, models.mlp_batch(24))["loss"]
    away = jzero.offload_train_state(state, include=["opt_state"])
    assert kinds(away.params) == {"device"}
    assert float(evaluate(away, models.mlp_batch(24))["loss"]) == float(expected)
    gone = jzero.offload_train_state(away, include=["params"])
    with pytest.raises(RuntimeError, match="in host memory"):
        evaluate(gone, models.mlp_batch(24))
    there = arrays(jzero.gather_params(gone))  # which takes copies
    assert_same_bits(arrays(jzero.gather_params(jzero.reload_train_state(gone))), there)


def test_fields_that_are_not_there():
    with pytest.raises(ValueError, match=r"`include` .*got \['mu'\]"):
        jzero.offload_train_state(make_state(3), include=["mu"])
    with pytest.raises(ValueError, match="got 'params'"):
        jzero.offload_train_state(make_state(3), include="params")


def test_devices_without_host_memory(monkeypatch):
    monkeypatch.setattr(_mesh, "memory_kinds", lambda device: ["device"])
    state = make_state(3)
    with pytest.raises(ValueError, match=r"'pinned_host', only \['device'\]"):
        jzero.offload_train_state(state)
    assert np.isfinite(float(state.params["layer_0"]["bias"][0])), "and nothing was moved"
