"""`fit`: what it chooses is what exhaustive search by the compiler chooses, and it says why."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import models
from tests.test_step_memory import HIDDEN, LAYERS, WIDTH, stack_loss

ROWS = 8 * 256
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
STATE_BYTES = 12 * LAYERS * WIDTH * HIDDEN * 2  # fp32 parameters and adam's moments
CONFIG = jzero.ZeroConfig(stage=0, persistence_threshold=1000)


def make_state(key):
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    return jzero.TrainState.create(params=params, tx=optax.adam(1e-3))


def fitted(megabytes, **options):
    return jzero.fit(make_state, stack_loss, BATCH, hbm_bytes=int(megabytes * 1e6), config=CONFIG, **options)


@functools.cache
def compiled_peak(stage, steps, remat):
    """By the compiler, without `fit`."""
    state = jzero.shard_train_state(
        make_state(jax.random.key(0)), config=jzero.ZeroConfig(stage=stage, persistence_threshold=1000)
    )
    compiled = jzero.make_train_step(stack_loss, accumulate_steps=steps, remat=remat).lower(state, BATCH).compile()
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


@pytest.mark.parametrize("megabytes", [40, 9, 6, 4, 2])
def test_chosen_fits_and_cheaper_ones_do_not(megabytes):
    choice = fitted(megabytes)
    x = choice.chosen
    peak = compiled_peak(x.config.stage, x.accumulate_steps, x.remat)
    assert x.compiled_peak == peak <= megabytes * 1e6
    before = choice.tried[: choice.tried.index(x)]
    assert all(y.verdict.endswith("too much") for y in before)
    if before:
        last = before[-1]  # the last loser has been compiled as well
        assert last.compiled_peak == compiled_peak(last.config.stage, last.accumulate_steps, last.remat)
        assert last.compiled_peak > megabytes * 1e6
    assert [y.memory.sent_bytes for y in choice.tried] == sorted(
        [y.memory.sent_bytes for y in choice.tried], key=lambda sent: float(f"{sent:.1e}")
    )


def test_the_less_memory_the_more_is_given_up():
    choices = [fitted(megabytes, confirm=False) for megabytes in (40, 9, 6, 4, 2)]
    costs = [(x.chosen.memory.sent_bytes, x.chosen.memory.flops, x.accumulate_steps) for x in choices]
    assert choices[0].config.stage == 0
    assert choices[0].accumulate_steps == 1
    assert choices[0].remat is None
    assert choices[-1].config.stage == 3
    assert all(a[0] <= 1.01 * b[0] for a, b in itertools.pairwise(costs)), costs


def test_nothing_fits():
    """Less than an eighth of the states: no layout can do."""
    choice = fitted(0.9 * STATE_BYTES / 8 / 1e6)
    assert choice.chosen is None
    assert "nothing fits. The least is stage 3" in str(choice)
    assert all(x.peak > choice.limit for x in choice.tried)
    least = min(choice.tried, key=lambda x: x.peak)
    assert least.compiled_peak is not None
    with pytest.raises(ValueError, match="nothing fits"):
        choice.config  # noqa: B018
    assert json.loads(choice.to_json())["chosen"] is None


def test_the_choice_trains():
    choice = fitted(4)
    mesh = jzero.make_mesh(**choice.mesh_shape)
    state = jzero.shard_train_state(make_state(jax.random.key(0)), config=choice.config, mesh=mesh)
    step = jzero.make_train_step(stack_loss, accumulate_steps=choice.accumulate_steps, remat=choice.remat)
    batch = np.random.default_rng(0).normal(size=BATCH.shape).astype(np.float32)
    _, metrics = step(state, batch)
    assert bool(metrics["step_applied"])


def test_a_machine_that_is_not_there():
    """A GPT with 16 bytes of state per parameter in bf16: over 8 devices what arithmetic allows, not less."""
    model = models.GPT(vocab=4096, d_model=512, heads=8, layers=4, remat={"prevent_cse": False})
    plain = jax.eval_shape(lambda: models.gpt_state(model, optax.adamw(1e-3)))
    size = sum(x.size for x in jax.tree.leaves(plain.params))
    config = jzero.ZeroConfig(stage=0, precision="bf16", persistence_threshold=0)
    batch = jax.ShapeDtypeStruct((16, models.SEQ + 1), jnp.int32)
    find = functools.partial(
        jzero.fit, plain, models.gpt_loss(model), batch, topology="h200:16", config=config, confirm=False
    )
    assert find(hbm_bytes=40 * size).config.stage == 0
    sharded = find(hbm_bytes=9 * size)  # 2 bytes of parameters, 12/16 of masters and moments, 2 + 2 of gradients ...
    assert sharded.config.stage in (1, 2)
    whole = find(hbm_bytes=int(2.5 * size))
    assert whole.config.stage == 3
    assert {x.mesh_shape.get("replica", 1) for x in whole.tried} == {1, 2}
    assert "Nothing was compiled" in str(whole)
    assert find(stages=(3,), hbm_bytes=40 * size).config.stage == 3
    limit = find().limit
    assert limit == int(0.9 * jzero.analysis.machines.machine("h200:16").hbm_bytes)


def test_json_and_table():
    choice = fitted(9, confirm=False)
    data = json.loads(choice.to_json())
    assert data["chosen"]["stage"] == choice.config.stage
    assert len(data["tried"]) == len(choice.tried)
    assert "chosen" in str(choice)


def test_errors():
    with pytest.raises(ValueError, match="memory of these devices is not known: pass `hbm_bytes=`"):
        jzero.fit(make_state, stack_loss, BATCH)
    with pytest.raises(ValueError, match="`hbm_bytes` must be a number of bytes > 0: got -1"):
        jzero.fit(make_state, stack_loss, BATCH, hbm_bytes=-1)
    with pytest.raises(ValueError, match="GPUs: h200"):
        jzero.fit(make_state, stack_loss, BATCH, topology="h300:8")
    with pytest.raises(ValueError, match="must be divisible by 64"):
        jzero.fit(make_state, stack_loss, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32), topology="h200:64")
