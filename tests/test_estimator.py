"""The memory estimators, against DeepSpeed's documented outputs and sums done by hand."""

from __future__ import annotations

import dataclasses
import inspect
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
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

import jzero
from tests import models

ZERO1 = jzero.estimate_zero1_model_states_mem_needs
ZERO1_COLD = jzero.estimate_zero1_model_states_mem_needs_all_cold
ZERO1_LIVE = jzero.estimate_zero1_model_states_mem_needs_all_live
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
ZERO3_T5_3B_COLD = f"""{HEAD}\
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
ZERO2_T5_3B = f"""{HEAD}\
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.48GB |   5.31GB | offload_optimizer=cpu
  127.48GB |  15.93GB | offload_optimizer=none
"""
ZERO2_T5_3B_COLD = f"""{HEAD}\
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu
  127.45GB |  15.93GB | offload_optimizer=none
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
T5_LARGE = t5(d_ff=4096, d_kv=64, heads=16)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("call", "table"),
    [
        (lambda: ZERO3_LIVE(T5_3B, num_gpus_per_node=8, num_nodes=1), ZERO3_T5_3B),
        (lambda: ZERO3_COLD(total_params=2851e6, largest_layer_params=32e6, num_gpus_per_node=8), ZERO3_T5_3B_COLD),
        (lambda: ZERO2_LIVE(T5_3B, num_gpus_per_node=8, num_nodes=1), ZERO2_T5_3B),
        (lambda: ZERO2_COLD(total_params=2851e6, num_gpus_per_node=8, num_nodes=1), ZERO2_T5_3B_COLD),
    ],
    ids=["zero3-live", "zero3-cold", "zero2-live", "zero2-cold"],
)
def test_deepspeeds_tables_are_printed_and_returned(call, table, capsys):
    estimate = call()
    captured = capsys.readouterr()
    assert captured.out == table
    assert captured.err == ""
    assert f"{estimate}\n" == table


def test_t5_large():
    estimate = ZERO3_LIVE(T5_LARGE, 4, verbose=False)
    assert (estimate.total_params, estimate.largest_layer_params) == (737_668_096, 32_899_072)
    in_mib = {(row.cpu_offload, row.cpu_offload_params): row.gpu_bytes >> 20 for row in estimate.rows}
    assert in_mib == {(False, False): 3291, (True, True): 125, (True, False): 477}
    assert ZERO3(737_668_096, 32_899_072, 4)[2] >> 20 == 125


# Numbers.


@pytest.mark.parametrize(
    ("arguments", "expected"),  # a million parameters on 2 nodes of 4; the host's 4 * 4 bytes tie with 16
    [
        ((ZERO1, OLD, True), (24_000_000, 4_000_000)),
        ((ZERO1, OLD, False), (24_000_000, 5_500_000)),
        ((ZERO1, NEW, True), (48_000_000, 4_000_000)),
        ((ZERO1, NEW, False), (24_000_000, 6_000_000)),
        ((ZERO2, OLD, True), (24_000_000, 2_000_000)),
        ((ZERO2, OLD, False), (24_000_000, 6_000_000)),
        ((ZERO2, NEW, True), (48_000_000, 2_000_000)),
        ((ZERO2, NEW, False), (24_000_000, 4_250_000)),
    ],
)
def test_stages_1_and_2_by_hand(arguments, expected):
    function, formulas, cpu_offload = arguments
    needs = function(1_000_000, 4, 2, cpu_offload, 1.5, formulas=formulas)
    assert needs == expected
    assert all(type(x) is int for x in needs)


@pytest.mark.parametrize("formulas", [OLD, NEW])
@pytest.mark.parametrize(
    ("options", "expected"),  # 1e6 parameters, 50,000 in the largest layer, 2 nodes of 4
    [
        ((True, True, True), (13_500_000, 200_000)),
        ((True, True, False), (24_000_000, 200_000)),
        ((True, False, True), (12_000_000, 450_000)),
        ((True, False, False), (24_000_000, 450_000)),
        ((False, False, True), (1_200_000, 2_450_000)),
        ((False, False, False), (24_000_000, 2_450_000)),
        ((False, True, True), (1_200_000, 2_450_000)),  # parameters cannot go alone: as if they stayed
    ],
)
def test_stage_3_by_hand(options, expected, formulas):
    needs = ZERO3(1_000_000, 50_000, 4, 2, *options, 1.5, formulas=formulas)
    assert needs == (*expected, 200_000)
    assert all(type(x) is int for x in needs)


def test_defaults_are_one_device_with_offload():
    assert ZERO1(1_000_000) == (24_000_000, 4_000_000)
    assert ZERO2(1_000_000) == (24_000_000, 2_000_000)
    assert ZERO3(1_000_000, 1_000) == (27_000_000, 4_000, 4_000)
    assert ZERO2(1_000_000, 8, formulas=OLD) == ZERO2(1_000_000, 8)


def test_fractions_of_a_byte_are_cut_off():
    assert ZERO2(1, 3, cpu_offload=False) == (18, 9)  # 4 + 5.33
    assert ZERO2(1, 7, cpu_offload=False, formulas=NEW) == (42, 4)  # 2 + 2.57
    assert ZERO3(7, 1, 5, cpu_offload=False, additional_buffer_factor=0.33) == (6, 29, 4)  # 6.6; 4 + 25.2


def close(number, exact):
    """Whether a number is `exact` with the fraction cut off, but for the rounding of floats."""
    return math.floor(exact) - 1 - exact / 10**15 <= number <= math.floor(exact) + 1 + exact / 10**15


SETUPS = {
    "total": st.integers(0, 10**13),
    "gpus": st.integers(1, 64),
    "nodes": st.integers(1, 2000),
    "quarters": st.integers(1, 16),
}


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
    }
    for options, (cpu, gpu) in expected.items():
        cpu_mem, gpu_mem, layer_mem = ZERO3(total, layer, gpus, nodes, *options, float(factor))
        assert layer_mem == 4 * layer
        assert close(cpu_mem, cpu * factor), options
        assert close(gpu_mem, 4 * layer + gpu), options


@pytest.mark.parametrize("kind", [int, float, np.int32, np.int64, np.float64, Fraction])
def test_numbers_of_any_kind(kind):
    """Also where 32 bits, or 64, would not hold the result."""
    assert ZERO3(kind(2 * 10**9), kind(10**9), np.int8(100), np.int8(100), False) == (
        600 * 10**9,
        4_003_600_000,
        4 * 10**9,
    )
    if kind is not np.int32:
        assert ZERO2(kind(10**18), 2, cpu_offload=False)[1] == 12 * 10**18


# What is returned and printed.


def test_rows_are_the_raw_numbers():
    setup = (1_234_567, 3, 5, 1.25)
    for raw, cold, formulas in ((ZERO1, ZERO1_COLD, OLD), (ZERO1, ZERO1_COLD, NEW), (ZERO2, ZERO2_COLD, NEW)):
        estimate = cold(*setup, formulas=formulas, verbose=False)
        assert [row.cpu_offload for row in estimate.rows] == [True, False]
        assert (estimate.total_params, estimate.largest_layer_params, estimate.formulas) == (1_234_567, None, formulas)
        for row in estimate.rows:
            needs = raw(*setup[:3], row.cpu_offload, 1.25, formulas=formulas)
            assert (row.cpu_bytes, row.gpu_bytes) == needs
            assert row.cpu_offload_params is row.zero_init is None
    estimate = ZERO3_COLD(1_234_567, 7_654, *setup[1:], verbose=False)
    assert len({row.options for row in estimate.rows}) == 6
    for row in estimate.rows:
        options = (row.cpu_offload, row.cpu_offload_params, row.zero_init)
        assert (row.cpu_bytes, row.gpu_bytes, 4 * 7_654) == ZERO3(1_234_567, 7_654, 3, 5, *options, 1.25)
    hardware = (estimate.num_gpus_per_node, estimate.num_nodes, estimate.additional_buffer_factor)
    assert (estimate.stage, estimate.largest_layer_params, *hardware) == (3, 7_654, 3, 5, 1.25)


def test_estimates_are_frozen_values():
    estimate = ZERO2_COLD(10, verbose=False)
    assert estimate == ZERO2_COLD(10, verbose=False) != ZERO2_COLD(11, verbose=False)
    assert hash(estimate) == hash(ZERO2_COLD(10, verbose=False))
    for thing, field in ((estimate, "stage"), (estimate.rows[0], "cpu_bytes")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 0)


@pytest.mark.parametrize(
    ("gpus", "nodes", "line"),
    [
        (1, 1, "HW: Setup with 1 node, 1 GPU per node."),
        (2, 1, "HW: Setup with 1 node, 2 GPUs per node."),
        (1, 3, "HW: Setup with 3 nodes, 1 GPU per node."),
        (8, 64, "HW: Setup with 64 nodes, 8 GPUs per node."),
    ],
)
def test_node_and_gpu_take_an_s(gpus, nodes, line):
    assert str(ZERO2_COLD(1e9, gpus, nodes, verbose=False)).splitlines()[1] == line


def test_millions_are_cut_off_and_columns_widen():
    lines = str(ZERO3_COLD(2_999_999, 999_999, 4096, 4096, verbose=False)).splitlines()
    assert lines[2] == "SW: Model with 2M total params, 0M largest layer params."
    assert lines[5] == "   68.66GB |   0.00GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0"
    wide = str(ZERO2_COLD(10**13, 64, verbose=False)).splitlines()
    assert wide[-1] == " 3576278.69GB | 39581.21GB | offload_optimizer=none"


@pytest.mark.parametrize("live", [ZERO1_LIVE, ZERO2_LIVE, ZERO3_LIVE])
def test_printing_can_be_switched_off(live, capsys):
    params = models.mlp_params()
    silent = live(params, 2, 3, 1.25, formulas=NEW, verbose=False)
    assert capsys.readouterr().out == ""
    assert live(params, 2, 3, 1.25, formulas=NEW) == silent
    assert capsys.readouterr().out == f"{silent}\n"


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
    expected |= {ZERO1: expected[ZERO2], ZERO1_LIVE: expected[ZERO2_LIVE], ZERO1_COLD: expected[ZERO2_COLD]}
    for function, arguments in expected.items():
        parameters = inspect.signature(function).parameters.values()
        ours = {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}
        assert list(ours.items()) == list(arguments.items()), function.__name__
        extra = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert extra in ({"formulas": OLD}, {"formulas": OLD, "verbose": True})


# Models.


def count(model):
    estimate = ZERO3_LIVE(model, verbose=False)
    for live in (ZERO1_LIVE, ZERO2_LIVE):
        assert live(model, verbose=False).total_params == estimate.total_params
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


def test_a_large_embedding_is_the_largest_layer():
    head = 120 * 509 + 509
    assert count(gpt_shapes())[1] == head
    assert count(gpt_shapes(tied=True))[1] == 120 * 509


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


def test_leaves_with_axis_names_are_siblings_too():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    assert count(shapes(nn.Dense(8, kernel_init=init), (1, 4))) == (4 * 8 + 8, 4 * 8 + 8)
    boxed = nn.Dense(8, kernel_init=init).init(jax.random.key(0), jnp.zeros((1, 4)))
    assert count(boxed) == (40, 40)


def test_a_model_of_a_billion_parameters_allocates_nothing():
    before = {id(x) for x in jax.live_arrays()}
    variables = gpt_shapes(vocab=50257, d_model=2048, heads=16, layers=20, scan=True)
    estimate = ZERO3_LIVE(variables, 8, 4, verbose=False)
    assert {id(x) for x in jax.live_arrays()} <= before
    total = 2 * 50257 * 2048 + 50257 + models.SEQ * 2048 + 20 * (12 * 2048**2 + 12 * 2048) + 2 * 2048
    assert total > 10**9
    assert (estimate.total_params, estimate.largest_layer_params) == (total, 50257 * 2048 + 50257)
    assert estimate.rows[4].gpu_bytes == 4 * 50257 * 2049 + 18 * total // 32


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_train_states_count_their_parameters(precision):
    """Natural shapes, though what is stored is padded; of a stack one layer."""
    stack = {
        "dense": {"kernel": jnp.ones((3, 13, 17)), "bias": jnp.ones((3, 17))},
        "norm": {"scale": jnp.ones((3, 13))},
    }
    params = {"layers": stack, "head": {"kernel": jnp.ones((13, 11))}}
    expected = (3 * (13 * 17 + 17 + 13) + 13 * 11, 13 * 17 + 17)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, precision=precision)
    for cls, options in ((TrainState, {"apply_fn": None}), (jzero.TrainState, {})):
        state = cls.create(params=params, tx=optax.adam(1e-3), **options)
        sharded = jzero.shard_train_state(state, config=config)
        assert jax.tree.map(jnp.shape, sharded.params) != jax.tree.map(jnp.shape, params)
        assert count(sharded) == count(state) == count(params) == expected


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


def test_nnx_frozen_parameters_count():
    make = lambda: nnx.ModelAndOptimizer(
        nnx.LoRALinear(13, 17, lora_rank=2, rngs=nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.LoRAParam
    )
    expected = (13 * 17 + 17 + 2 * 13 + 2 * 17, 13 * 17 + 17)
    assert count(make()) == count(make().model) == expected
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    assert count(jzero.shard_train_state(make(), config=config)) == expected


def test_nnx_stacks():
    @nnx.vmap(in_axes=0)
    def make(rngs):
        return nnx.Linear(16, 24, rngs=rngs)

    stack = nnx.eval_shape(lambda: make(nnx.Rngs(0).split(5)))
    assert count(stack) == (5 * (16 * 24 + 24), 16 * 24 + 24)


class Cyclic(nnx.Module, pytree=False):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(3))
        self.me = self


def test_nnx_modules_that_are_no_trees():
    assert count(Cyclic()) == (3, 3)


# Errors.


SILENT = {"verbose": False}


@pytest.mark.parametrize(
    "call",
    [
        lambda **kw: ZERO1(**{"total_params": 9, **kw}),
        lambda **kw: ZERO2(**{"total_params": 9, **kw}),
        lambda **kw: ZERO3(**{"total_params": 9, "largest_layer_params": 3, **kw}),
        lambda **kw: ZERO1_COLD(**{"total_params": 9, **SILENT, **kw}),
        lambda **kw: ZERO2_COLD(**{"total_params": 9, **SILENT, **kw}),
        lambda **kw: ZERO3_COLD(**{"total_params": 9, "largest_layer_params": 3, **SILENT, **kw}),
    ],
    ids=["zero1", "zero2", "zero3", "zero1-cold", "zero2-cold", "zero3-cold"],
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
            assert str(caught.value).endswith(f": got {value!r}.")


@pytest.mark.parametrize("function", [ZERO3, ZERO3_COLD])
def test_the_largest_layer_is_part_of_the_model(function):
    for value in (-1, math.nan, True, "3"):
        with pytest.raises(ValueError, match=r"^`largest_layer_params` must be a number of parameters"):
            function(9, value)
    with pytest.raises(ValueError, match=r"^`largest_layer_params` must not exceed `total_params`.*: got 10 of 9\.$"):
        function(9, 10)
    function(9, 9)


@pytest.mark.parametrize("name", ["cpu_offload", "cpu_offload_params", "zero_init"])
def test_switches_are_booleans(name):
    functions = [(ZERO3, (9, 3))] + ([(ZERO1, (9,)), (ZERO2, (9,))] if name == "cpu_offload" else [])
    for function, arguments in functions:
        for value in ("none", "cpu", None, 2, 1.0, np.ones(2)):
            with pytest.raises(ValueError, match=f"^`{name}` must be True or False: got "):
                function(*arguments, **{name: value})
        assert function(*arguments, **{name: 0}) == function(*arguments, **{name: np.bool_(False)})


@pytest.mark.parametrize("live", [ZERO1_LIVE, ZERO2_LIVE, ZERO3_LIVE])
def test_models_that_are_none(live, capsys):
    with pytest.raises(TypeError, match=r"(?s)model: Dense.*pass the variables"):
        live(nn.Dense(3))
    with pytest.raises(TypeError, match=r"(?s)these are not:\n  layer/act: function\n  layer/name: str\n"):
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rows_for_offload_agree_with_the_plan(stage):
    """What DeepSpeed and a plan both count: 16-bit parameters on the device, masters and moments on the host.

    The formulas count more on the host: an fp32 gradient (4 bytes). On the device stage 1 has whole 16-bit gradients
    until the step (2 bytes), as `plan.bytes_per_device.grads` has; stage 3 has the largest layer, twice in 16 bits.
    """
    size, devices, layer = 64 * 128 + 128 * 64, 8, 64 * 128
    params = {"a": jnp.zeros((64, 128)), "b": jnp.zeros((128, 64))}
    state = jzero.TrainState.create(params=params, tx=optax.adamw(1e-3))
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))

    def plan(**offload):
        config = jzero.ZeroConfig(
            stage=stage, precision="bf16", persistence_threshold=0, offload=jzero.Offload(**offload)
        )
        return jzero.plan_train_state(state, config=config, mesh=mesh)

    def needs(*offload):
        if stage == 3:
            return jzero.estimate_zero3_model_states_mem_needs(size, layer, devices, 1, *offload, True, 1.0)[:2]
        needed = {1: jzero.estimate_zero1_model_states_mem_needs, 2: jzero.estimate_zero2_model_states_mem_needs}
        return needed[stage](size, devices, 1, offload[0], 1.0)

    count = 4  # of steps, an int32
    cpu, gpu = needs(True, False)
    found = plan(optimizer="host")
    assert found.bytes_per_device.opt_state == count
    assert found.host_bytes_per_device == (0, 0, 12 * size // devices)
    extra = {1: 2 * size, 2: 0, 3: 4 * layer}[stage]
    assert found.bytes_per_device.params == gpu - extra
    # Below stage 3 each process of the formulas has made the whole model in fp32 before, which is more.
    assert max(devices * found.host_bytes_per_device.opt_state + 4 * size, (4 * devices * size) * (stage < 3)) == cpu
    if stage == 3:
        cpu, gpu = needs(True, True)
        found = plan(optimizer="host", params="host")
        assert (found.bytes_per_device.params, gpu) == (0, 4 * layer)
        assert devices * found.host_bytes_per_device.total + 4 * size == cpu
