"""Sizes of models for DeepSpeed's estimators: Linen, NNX, plain trees and train states."""

from __future__ import annotations

import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jzero
from tests import models

ZERO2_LIVE = jzero.estimate_zero2_model_states_mem_needs_all_live
ZERO3 = jzero.estimate_zero3_model_states_mem_needs
ZERO3_COLD = jzero.estimate_zero3_model_states_mem_needs_all_cold
ZERO3_LIVE = jzero.estimate_zero3_model_states_mem_needs_all_live

# Models.


def count(model):
    estimate = ZERO3_LIVE(model, verbose=False)
    assert ZERO2_LIVE(model, verbose=False).total_params == estimate.total_params
    return estimate.total_params, estimate.largest_layer_params


def shapes(module, *inputs):
    """Abstract variables of a Linen module."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *(jnp.zeros(shape) for shape in inputs)))


def gpt_shapes(**options):
    model = models.GPT(**options)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, models.SEQ), jnp.int32)))


BLOCK = 12 * 120**2 + 12 * 120  # of width 120: four projections, two of them four times as wide; biases and norms
UP = 120 * 480 + 480


@pytest.mark.smoke
@pytest.mark.parametrize("scan", [True, False])
def test_linen(scan):
    """One layer of six counts as the largest, stacked or not."""
    variables = gpt_shapes(vocab=7, layers=6, scan=scan)
    total = 7 * 120 + models.SEQ * 120 + 6 * BLOCK + 240 + (120 * 7 + 7)
    assert count(variables) == (total, UP)
    assert count(variables["params"]) == (total, UP)
    assert count(flax.core.freeze(variables)) == (total, UP)


class Convolutions(nn.Module):
    """Leaves with a short leading dimension that are no stacks, each alone in its module."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        x = x.reshape(1, -1, 64)
        return nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=64, out_features=256)(x, x)


def test_convolutions_and_attention_are_no_stacks():
    qkv, out, conv = 64 * 64 + 64, 64 * 256 + 256, 3 * 3 * 32 * 64
    assert count(shapes(Convolutions(), (1, 8, 8, 32))) == (conv + 128 + 3 * qkv + out, conv)
    assert conv > out
    alone = {"out": {"kernel": np.zeros((4, 16, 256))}, "norm": {"scale": np.zeros(256)}}
    assert count(alone) == (4 * 16 * 256 + 256, 4 * 16 * 256)
    kernels = {"wide": {"kernel": np.zeros((5, 5, 8, 16))}, "narrow": {"kernel": np.zeros((3, 3, 8, 16))}}
    assert count(kernels) == ((25 + 9) * 8 * 16, 25 * 8 * 16)


def test_batch_statistics_are_no_parameters():
    variables = shapes(Convolutions(), (1, 8, 8, 32))
    assert set(variables) == {"params", "batch_stats"}
    assert count(variables) == count(variables["params"])
    assert count({"params": variables["params"]["BatchNorm_0"], "batch_stats": {"x": np.zeros(99)}}) == (128, 128)
    assert count({"params": np.zeros(3), "head": np.zeros(4)}) == (7, 7), "a leaf of that name is no collection"


def test_plain_trees():
    w, b = jnp.ones((5, 7)), np.ones(7)
    assert count([(w, b), (np.ones((5, 2)), 1.0)]) == (35 + 7 + 10 + 1, 42)
    assert count(w) == (35, 35)
    assert count({"a": None, "b": w}) == (35, 35)
    assert count({"a": np.ones((0, 4)), "b": b}) == (7, 7)
    assert count({"stack": {"w": np.ones((0, 4, 4)), "b": np.ones((0, 4))}, "b": b}) == (7, 7)
    assert count(models.mlp_params()) == (37 * 127 + 127 + 127 * 61 + 61 + 61 * 11 + 11, 127 * 61 + 61)


def test_shared_arrays_count_once():
    w, shape = jnp.ones((5, 7)), jax.ShapeDtypeStruct((5, 7), jnp.float32)
    assert count({"embed": {"table": w}, "head": {"kernel": w, "bias": jnp.ones(7)}}) == (42, 42)
    assert count({"embed": {"table": w}, "head": {"kernel": w + 0}}) == (70, 35)
    assert count({"layer": {"a": w, "b": w}}) == (35, 35)
    assert count({"a": {"x": shape}, "b": {"x": shape}}) == (70, 35), "a shape is nobody's in particular"
    assert count({"a": {"x": 1.0}, "b": {"x": 1.0}}) == (2, 1)


# NNX.


class Tied(nnx.Module):
    """An embedding that the head shares, with statistics and a random stream that are no parameters."""

    def __init__(self, rngs):
        self.embed = nnx.Param(jnp.ones((37, 11)))
        self.norm = nnx.BatchNorm(11, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(11, 11, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(37, 11, rngs=rngs)
        self.head.kernel = self.embed
        self.again = self.layers[0]


TIED = (37 * 11 + 2 * 11 + 3 * (11 * 11 + 11) + 11, 37 * 11 + 11)


@pytest.mark.smoke
def test_nnx():
    """The head owns the shared weight and a bias, as DeepSpeed counts."""
    model = Tied(nnx.Rngs(0))
    assert count(model) == TIED
    assert count(nnx.eval_shape(lambda: Tied(nnx.Rngs(0)))) == TIED
    without = (TIED[0], 37 * 11)  # a state lists the shared weight under one of its owners
    for tree in (nnx.state(model), nnx.state(model, nnx.Param), nnx.as_pure(nnx.state(model, nnx.Param))):
        assert count(tree) == without


@pytest.mark.parametrize("is_pair", [True, False])
def test_nnx_train_states(is_pair):
    def make():
        model = Tied(nnx.Rngs(0))
        if is_pair:
            return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return nnx.ModelAndOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    assert count(make()) == TIED
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    assert count(jzero.shard_train_state(make(), config=config))[0] == TIED[0]


@pytest.mark.parametrize("function", [ZERO3, ZERO3_COLD])
def test_the_largest_layer_is_part_of_the_model(function):
    for value in (-1, math.nan, True, "3"):
        with pytest.raises(ValueError, match=r"^`largest_layer_params` must be"):
            function(9, value)
    with pytest.raises(ValueError, match=r"`total_params`.*: got 10 of 9"):
        function(9, 10)
    function(9, 9)


@pytest.mark.parametrize("live", [ZERO2_LIVE, ZERO3_LIVE])
def test_models_that_are_none(live, capsys):
    with pytest.raises(TypeError, match=r"(?s)model: Dense.*pass the variables"):
        live(nn.Dense(3))
    with pytest.raises(TypeError, match=r"(?s)layer/act: .* layer/name: str\n"):
        live({"layer": {"w": np.ones(3), "name": "x", "act": lambda x: x}})
    with pytest.raises(TypeError, match="layer: ndarray"):
        live({"layer": np.array([None])})
    for nothing in ({}, {"params": {}}, None, [], nnx.Dropout(0.5, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match="`model` must have parameters: got none"):
            live(nothing)
    with pytest.raises(TypeError, match="does not hold its model"):
        live(nnx.Optimizer(Tied(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param))
    with pytest.raises(ValueError, match="`num_nodes` must be"):
        live({"w": np.ones(3)}, 1, 0)
    assert capsys.readouterr().out == "", "nothing is printed before an error"
