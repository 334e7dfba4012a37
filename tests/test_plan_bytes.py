"""Bytes of a plan: of the live buffers, of ZeRO's arithmetic, and by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

import jzero
from jzero.plan.table import format_bytes
from tests.plan_states import OPTIMIZERS, PARAMS, RULES, STAGES, plan_for


def device_bytes(tree):
    """Bytes of the tree's arrays that live on the first device."""
    first = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first]
    return sum(s.data.nbytes for s in shards)


# Bytes.


@pytest.mark.parametrize(
    ("name", "stage", "devices"), [("adamw", 3, 5), ("adafactor", 1, 8), ("masked by function", 3, 8)]
)
def test_bytes_per_device_are_those_of_the_live_buffers(name, stage, devices):
    tx = OPTIMIZERS[name]()
    params = {k: jnp.ones(shape) for k, shape in PARAMS.items()} | {"half": jnp.ones((24, 8), jnp.bfloat16)}
    state = jzero.TrainState.create(params=params, tx=tx)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, rules=RULES)
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    plan = jzero.plan_train_state(state, config=config, mesh=mesh)
    sharded = jzero.shard_train_state(state, config=config, mesh=mesh)
    assert plan.bytes_per_device.params == device_bytes(sharded.params)
    assert plan.bytes_per_device.opt_state == device_bytes(sharded.opt_state)
    assert plan.bytes_per_device.total == sum(plan.bytes_per_device)


@pytest.mark.parametrize(("stage", "num_shards"), [(0, 8), (1, 64), (2, 8), (3, 64)])
def test_bytes_agree_with_the_arithmetic_of_zero(stage, num_shards):
    shapes = {"embed": (50257, 256), "blocks": {"kernel": (6, 256, 768), "bias": (6, 768)}}
    plan = plan_for(shapes, num_shards=num_shards, stage=stage, persistence_threshold=0)
    psi = sum(math.prod(leaf.param.shape) for leaf in plan.leaves)
    assert psi > 10_000_000
    expected = {
        "params": 4 * psi / (num_shards if stage == 3 else 1),
        "grads": 4 * psi / (num_shards if stage >= 2 else 1),
        "opt_state": 8 * psi / (num_shards if stage >= 1 else 1),
    }
    assert plan.bytes_per_device._asdict() == pytest.approx(expected, rel=0.02)
    assert plan.bytes_per_device.total == pytest.approx(sum(expected.values()), rel=0.02)
    assert plan.replicated_bytes._asdict() == pytest.approx(
        {"params": 4 * psi, "grads": 4 * psi, "opt_state": 8 * psi}, rel=1e-6
    )


def test_gathered_bytes_by_hand():
    params = {"w": (512, 256), "v": (256, 64), "b": (512,)}
    w, v, b = (4 * math.prod(shape) for shape in params.values())
    gathered = {
        0: 0,
        1: w + v + b,  # once, after the update
        2: w + v + b,
        3: 2 * (w + v) + b,  # forward and backward; `b` stays whole between updates
    }
    for stage, expected in gathered.items():
        assert plan_for(params, stage=stage, persistence_threshold=512).gathered_bytes == expected, stage
    kept = plan_for(params, stage=3, persistence_threshold=512, reshard_after_forward=False)
    assert kept.gathered_bytes == w + v + b
    assert kept.traffic.bytes_gathered_in(micro_batches=3) == 3 * (w + v) + b
    assert plan_for({"scalar": ()}, stage=3).gathered_bytes == 0, "what is not cut is never gathered"
    assert plan_for({"odd": (129, 3)}, stage=3, persistence_threshold=0).gathered_bytes == 2 * 4 * 136 * 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_plans_of_whole_parameters_tell_what_stage_3_would_hold(stage, precision):
    rules = {"kept": jzero.LeafRule(persistent=True), "shared": jzero.LeafRule(replicated=True)}
    params = {"w": (512, 256), "odd": (129, 3), "b": (512,), "kept": (64, 64), "shared": (64, 64)}
    make = functools.partial(plan_for, params, precision=precision, persistence_threshold=512, rules=rules)
    other = make(stage=3, reshard_after_forward=False)
    held = lambda plan: format_bytes(plan.bytes_per_device.params + plan.bytes_per_device.opt_state)
    plan = make(stage=stage)
    said = f"params and opt_state take {held(other)} then, not {held(plan)}"
    assert (said in str(plan)) == (stage in (1, 2))
    assert ("reshard_after_forward" in str(plan)) == (stage in (1, 2))
    if stage in (1, 2):
        assert plan.gathered_bytes == other.gathered_bytes


# Text.


def test_text_shows_every_section():
    params = {
        "embed": (1000, 64),
        "odd": (37, 129),
        "flat": (11, 9),
        "bias": (64,),
        "stack": {"w": (6, 64, 64), "s": (6, 64)},
    }
    plan = plan_for(params, stage=3, persistence_threshold=64)
    lines = str(plan).splitlines()
    assert lines[0].startswith("ZeRO stage 3 over 'data' (N=8)")
    assert "data=8" in lines[0]
    for heading in ("bytes per device", "parameter", "whole on every device", "gathered per step"):
        assert any(line.startswith(heading) for line in lines), heading
    row = {line.split()[0]: line for line in lines if line}
    assert "cut on dim 0" in row["embed"]
    assert "(1000, 64)" in row["embed"]
    assert "padded 129->136" in row["odd"]
    assert "flattened, padded 99->104" in row["flat"]
    assert "dim 0" in row["stack/w"].split("cut on dim")[-1], "the scanned dimension"
    assert "whole" in row["bias"]
    assert any(line.startswith("params") and "bias" in line and "(persistence_threshold)" in line for line in lines)
    assert any(line.startswith("other") and "step" in line for line in lines)
    assert f"{plan.gathered_bytes / 1024:.2f} KiB" in lines[-1]


def test_text_counts_the_rows_that_it_hides():
    plan = plan_for({f"w{i:02}": (64, 64) for i in range(50)}, stage=3, persistence_threshold=0)
    assert "w49" not in str(plan)
    assert "... 10 more (plan.table(max_rows=None))" in str(plan)
    assert "w49" in plan.table(max_rows=None)
    assert "more" not in plan.table(max_rows=None)
