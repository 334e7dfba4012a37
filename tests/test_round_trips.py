"""Whatever a state holds survives every road that it can take, to the bit."""

import jax
import numpy as np
import optax
import pytest

import jzero
from tests import models, shared
from tests.checkpoint_states import arrays, assert_same_bits

SCALE = jzero.DynamicLossScale(initial=2.0**9, window=3, hysteresis=2)
PRECISIONS = {
    "fp16": jzero.Precision(compute_dtype="float16", loss_scale=SCALE),
    "bf16": jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16"),
}
ROWS = 24
MESH = {num: jzero.make_mesh(devices=jax.devices()[:num]) for num in (3, 8)}
TX = optax.adamw(1e-2)


def loss_fn(params, batch):
    """Overflows where a row's poison is infinite."""
    return models.mlp_loss(params, batch) + 0 * params["layer_0"]["bias"].sum() * batch["poison"].sum()


STEP = jzero.make_train_step(loss_fn)


@pytest.fixture(scope="module")
def trained():
    """Two good steps, an overflow, a good step: every counter has a number of its own."""
    states = {}
    for name, precision in PRECISIONS.items():
        state = shared.sharded(models.mlp_params(sizes=models.TWO_LAYERS), TX, 3, mesh=MESH[8], precision=precision)
        for seed in range(4):
            poison = np.full(ROWS, np.inf if name == "fp16" and seed == 2 else 0.0, np.float32)
            state, _ = STEP(state, {**models.mlp_batch(ROWS, seed), "poison": poison})
        states[name] = state
    scale = states["fp16"].opt_state.loss_scale
    assert (int(scale.good_steps), int(scale.hysteresis), int(states["fp16"].step)) == (1, 1, 3)
    assert int(states["bf16"].opt_state.num_updates) == 4
    return states


def saved(state, tmp_path, **layout):
    jzero.save_checkpoint(tmp_path / "c", state)
    return jzero.restore_checkpoint(tmp_path / "c", jzero.abstract_train_state(state, **layout))


def moved(state, tmp_path, **layout):
    return jzero.shard_train_state(state, **layout, donate=False)


def held(state):
    """All that a state holds, whatever its layout."""
    opt = state.opt_state
    counters = (opt.loss_scale, opt.num_updates, state.step)
    return {**arrays(jzero.gather_params(state, masters=True)), **arrays((counters, shared.whole(opt.inner)))}


@pytest.mark.parametrize("road", [saved, moved])
@pytest.mark.parametrize(("stage", "num"), [(3, 8), (1, 3)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_of_a_state_arrives(road, stage, num, precision, trained, tmp_path):
    config = shared.config(stage, precision=PRECISIONS[precision])
    state = trained[precision]
    assert_same_bits(held(road(state, tmp_path, config=config, mesh=MESH[num])), held(state))
