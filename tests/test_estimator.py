"""The memory estimators, against DeepSpeed's documented outputs and sums done by hand."""

from __future__ import annotations

import inspect
import itertools
import math
from fractions import Fraction

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jzero
from tests import models, shared

ZERO1 = jzero.estimate_zero1_model_states_mem_needs
ZERO2 = jzero.estimate_zero2_model_states_mem_needs
ZERO2_COLD = jzero.estimate_zero2_model_states_mem_needs_all_cold
ZERO2_LIVE = jzero.estimate_zero2_model_states_mem_needs_all_live
ZERO3 = jzero.estimate_zero3_model_states_mem_needs
ZERO3_COLD = jzero.estimate_zero3_model_states_mem_needs_all_cold
ZERO3_LIVE = jzero.estimate_zero3_model_states_mem_needs_all_live
OLD, NEW = "documented", "deepspeed-0.19"

# What DeepSpeed's documentation prints.
HEAD = (
    "Estimated memory needed for params, optim states and gradients for a:\nHW: Setup with 1 node, 8 GPUs per node.\n"
)
ZERO2_T5_3B_COLD = f"""{HEAD}\
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu
  127.45GB |  15.93GB | offload_optimizer=none
"""
ZERO3_T5_3B = f"""{HEAD}\
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.71GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.48GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.74GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.48GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.47GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.48GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=0
"""


def t5(*, d_ff, d_kv, heads):
    """The shapes of T5's weights at width 1024 with 24 + 24 layers; the embedding is shared."""
    shape = lambda *dims: {"weight": jax.ShapeDtypeStruct(dims, jnp.bfloat16)}
    width, inner = 1024, d_kv * heads

    def attention(has_bias):
        parts = {"q": (inner, width), "k": (inner, width), "v": (inner, width), "o": (width, inner)}
        return {name: shape(*dims) for name, dims in (parts | ({"bias": (32, heads)} if has_bias else {})).items()}

    def layer(first, num_attentions):
        parts = {f"attention_{i}": {**attention(first and i == 0), "norm": shape(width)} for i in range(num_attentions)}
        return parts | {"ff": {"wi": shape(d_ff, width), "wo": shape(width, d_ff), "norm": shape(width)}}

    def stack(num_attentions):
        return {f"block_{i}": layer(i == 0, num_attentions) for i in range(24)} | {"norm": shape(width)}

    return {"shared": shape(32128, width), "encoder": stack(1), "decoder": stack(2)}


T5_3B = t5(d_ff=16384, d_kv=128, heads=32)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("call", "table"),
    [
        (lambda: ZERO3_LIVE(T5_3B, num_gpus_per_node=8, num_nodes=1), ZERO3_T5_3B),
        (lambda: ZERO2_COLD(total_params=2851e6, num_gpus_per_node=8, num_nodes=1), ZERO2_T5_3B_COLD),
    ],
    ids=["zero3-live", "zero2-cold"],
)
def test_deepspeeds_tables_are_printed_and_returned(call, table, capsys):
    estimate = call()
    captured = capsys.readouterr()
    assert captured.out == table
    assert captured.err == ""
    assert f"{estimate}\n" == table


def test_defaults_are_one_device_with_offload():
    assert ZERO1(1_000_000) == (24_000_000, 4_000_000)
    assert ZERO2(1_000_000) == (24_000_000, 2_000_000)
    assert ZERO3(1_000_000, 1_000) == (27_000_000, 4_000, 4_000)
    assert ZERO2(1_000_000, 8, formulas=OLD) == ZERO2(1_000_000, 8)


def close(number, exact):
    """Whether an integer is `exact` with the fraction cut off, but for the rounding of floats."""
    return (
        type(number) is int
        and math.floor(exact) - 1 - exact / 10**15 <= number <= math.floor(exact) + 1 + exact / 10**15
    )


SETUPS = {
    "total": st.integers(0, 10**13),
    "gpus": st.integers(1, 64),
    "nodes": st.integers(1, 2000),
    "quarters": st.integers(1, 16),
}


@settings(max_examples=200)
@given(**SETUPS)
def test_stages_1_and_2_against_rational_arithmetic(total, gpus, nodes, quarters):
    factor, num = Fraction(quarters, 4), gpus * nodes
    call = lambda f, offload, formulas: f(total, gpus, nodes, offload, float(factor), formulas=formulas)
    made, offloaded, newer = (total * x * factor for x in (4 * gpus, max(4 * gpus, 16), max(4 * num, 16)))
    share = Fraction(total, num)
    expected = {
        (ZERO1, True, OLD): (offloaded, 4 * total),
        (ZERO1, False, OLD): (made, 4 * total + 12 * share),
        (ZERO1, True, NEW): (newer, 4 * total),
        (ZERO1, False, NEW): (made, 4 * total + 16 * share),
        (ZERO2, True, OLD): (offloaded, 2 * total),
        (ZERO2, False, OLD): (made, 4 * total + 16 * share),
        (ZERO2, True, NEW): (newer, 2 * total),
        (ZERO2, False, NEW): (made, 2 * total + 18 * share),
    }
    for arguments, exact in expected.items():
        assert all(map(close, call(*arguments), exact)), arguments
    for offload in (True, False):
        assert call(ZERO1, offload, NEW)[1] >= call(ZERO2, offload, NEW)[1], (
            "a stage never costs more than the one below"
        )


@settings(max_examples=200)
@given(part=st.floats(0, 1), **SETUPS)
def test_stage_3_against_rational_arithmetic(total, part, gpus, nodes, quarters):
    layer, factor = int(total * part), Fraction(quarters, 4)
    share = Fraction(total, gpus * nodes)
    expected = {
        (True, True, True): (total * Fraction(18, nodes), 0),
        (True, True, False): (total * max(4 * gpus, Fraction(18, nodes)), 0),
        (True, False, True): (total * Fraction(16, nodes), 2 * share),
        (True, False, False): (total * max(4 * gpus, Fraction(16, nodes)), 2 * share),
        (False, False, True): (layer * 4 * gpus, 18 * share),
        (False, False, False): (total * 4 * gpus, 18 * share),
        (False, True, True): (layer * 4 * gpus, 18 * share),  # parameters cannot go alone: as if they stayed
    }
    for (options, (cpu, gpu)), formulas in itertools.product(expected.items(), (OLD, NEW)):
        cpu_mem, gpu_mem, layer_mem = ZERO3(total, layer, gpus, nodes, *options, float(factor), formulas=formulas)
        assert layer_mem == 4 * layer
        assert close(cpu_mem, cpu * factor), options
        assert close(gpu_mem, 4 * layer + gpu), options


@pytest.mark.smoke
def test_arguments_are_deepspeeds():
    setup = {"num_gpus_per_node": 1, "num_nodes": 1}
    factor = {"additional_buffer_factor": 1.5}
    no = inspect.Parameter.empty
    offload = {"cpu_offload": True}
    expected = {
        ZERO2: {"total_params": no, **setup, **offload, **factor},
        ZERO2_LIVE: {"model": no, **setup, **factor},
        ZERO2_COLD: {"total_params": no, **setup, **factor},
        ZERO3: {"total_params": no, "largest_layer_params": no, **setup, **offload}
        | {"cpu_offload_params": True, "zero_init": True, **factor},
        ZERO3_LIVE: {"model": no, **setup, **factor},
        ZERO3_COLD: {"total_params": no, "largest_layer_params": no, **setup, **factor},
    }
    expected[ZERO1] = expected[ZERO2]
    for function, arguments in expected.items():
        parameters = inspect.signature(function).parameters.values()
        ours = {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}
        assert list(ours.items()) == list(arguments.items()), function.__name__
        extra = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert extra in ({"formulas": OLD}, {"formulas": OLD, "verbose": True})


SILENT = {"verbose": False}


@pytest.mark.parametrize(
    "call",
    [
        lambda **kw: ZERO1(**{"total_params": 9, **kw}),
        lambda **kw: ZERO2(**{"total_params": 9, **kw}),
        lambda **kw: ZERO3(**{"total_params": 9, "largest_layer_params": 3, **kw}),
        lambda **kw: ZERO2_COLD(**{"total_params": 9, **SILENT, **kw}),
        lambda **kw: ZERO3_COLD(**{"total_params": 9, "largest_layer_params": 3, **SILENT, **kw}),
    ],
    ids=["zero1", "zero2", "zero3", "zero2-cold", "zero3-cold"],
)
def test_errors_name_the_argument_its_value_and_the_rule(call):
    call()
    bad = {
        "total_params": [-1, -0.5, math.nan, math.inf, True, "9", None, 2**63, 10**400, 1j, np.ones(1), np.bool_(True)],
        "num_gpus_per_node": [0, -1, 1.0, 8.5, math.nan, True, "8", None, 10**400, np.float32(1)],
        "num_nodes": [0, -1, 1.0, 8.5, math.nan, False, "8", None, 10**400],
        "additional_buffer_factor": [0, -1.5, math.nan, math.inf, True, "1.5", None, 1e300],
        "formulas": ["deepspeed", "Documented", None, 0, ["documented"]],
    }
    rules = {
        "total_params": "must be a number of parameters",
        "num_gpus_per_node": "must be an integer >= 1",
        "num_nodes": "must be an integer >= 1",
        "additional_buffer_factor": "must be a number > 0",
        "formulas": "must be one of ('documented', 'deepspeed-0.19')",
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^`{name}` ") as caught:
                call(**{name: value})
            assert str(caught.value).startswith(f"`{name}` {rules[name]}")
            assert str(caught.value).endswith(f": got {value!r:.200}.")


# Sizes of models: Linen, NNX, plain trees and train states.


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
    assert count(jzero.shard_train_state(make(), config=shared.config(3)))[0] == TIED[0]


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
