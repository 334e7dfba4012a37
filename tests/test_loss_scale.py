"""fp16 loss scaling: DeepSpeed's rules by hand, one decision for all devices, skipped steps change nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.plan.opt_state import initial_loss_scale, next_loss_scale
from tests import models, shared

ROWS = 16
PARAMS = models.mlp_params(sizes=models.ONE_LAYER)
ADAMW = optax.adamw(1e-3)
gradient_of_loss = jax.jit(jax.grad(models.mlp_loss))


def make_state(stage, *, tx=ADAMW, precision="fp16", mesh=None, params=PARAMS, **config):
    return shared.sharded(params, tx, stage, mesh=mesh, precision=precision, **config)


def loss_fn(params, batch):
    """The factor of one row overflows fp16 in the gradient, whatever the scale, if it is infinite; else 2^16 fits."""
    return models.mlp_loss(params, batch) / 8 + 0 * params["layer_0"]["bias"].sum() * batch["poison"].sum()


STEP = jzero.make_train_step(loss_fn)
"""One step for all tests: of states with equal plans and one optimizer it compiles one program."""


def batch(seed, poisoned=None):
    poison = np.zeros(ROWS, np.float32)
    if poisoned is not None:
        poison[poisoned] = np.inf  # 0 * inf is NaN, on the device that holds this row
    return {**models.mlp_batch(ROWS, seed), "poison": poison}


def host(tree):
    return jax.tree.map(np.array, tree)  # a copy: the step reuses the buffers


def parts(tree):
    """Each device's part of each array."""
    return jax.tree.map(lambda x: [np.array(s.data) for s in x.addressable_shards], tree)


def norm_of(tree):
    return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))


def assert_same_bits(a, b):
    a, b = host(a), host(b)
    assert jax.tree.map(lambda x: x.tobytes(), a) == jax.tree.map(lambda x: x.tobytes(), b)


def expected_scales(overflows, num_steps, *, initial, window, hysteresis, minimum, consecutive):
    """DeepSpeed's rules in plain Python, with its own iteration counters."""
    scale, left, last_overflow, scales = initial, hysteresis, -1, []
    for i in range(num_steps):
        scales.append(scale)
        if i in overflows:
            last_overflow = i
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            continue
        stable = i - last_overflow - 1
        grows = stable > 0 and stable % window == 0
        if consecutive or grows:
            left = hysteresis
        if grows:
            scale *= 2
    return scales


@pytest.mark.parametrize(
    ("rules", "overflows", "expected"),
    [
        ((2, 1, 1.0, False), {7}, [8, 8, 8, 16, 16, 32, 32, 64, 32, 32, 32, 64]),
        ((3, 1, 1.0, False), set(), [8, 8, 8, 8, 16, 16, 16, 32]),
        # An overflow uses hysteresis, the next one halves; growth restores it, so that the last one halves nothing.
        ((4, 2, 1.0, False), {1, 2, 8}, [8, 8, 8, 4, 4, 4, 4, 4, 8, 8, 8, 8]),
        # The step between two overflows restores it, or does not; the scale does not fall below 4.
        ((9, 2, 4.0, True), {1, 3, 5, 6, 7, 8}, [8, 8, 8, 8, 8, 8, 8, 4, 4, 4]),
        ((9, 2, 4.0, False), {1, 3, 5, 6, 7, 8}, [8, 8, 8, 8, 4, 4, 4, 4, 4, 4]),
    ],
)
def test_the_first_scales_by_hand(rules, overflows, expected):
    """The values are written out, not computed; they hold the model above as well."""
    window, hysteresis, minimum, consecutive = rules
    options = {"initial": 8.0, "window": window, "hysteresis": hysteresis, "minimum": minimum}
    rules = jzero.DynamicLossScale(**options, consecutive_hysteresis=consecutive)
    scale, scales = initial_loss_scale(rules, 1), []
    for i in range(len(expected)):
        scales.append(int(scale.scale))
        scale = next_loss_scale(scale, rules, jnp.array([i in overflows]))
    assert scales == expected
    assert expected_scales(overflows, len(expected), **options, consecutive=consecutive) == expected


def test_a_skipped_step_changes_nothing_but_the_scale():
    """The overflow is on one device only; all devices skip, and every copy of every leaf stays as it was."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 9)))
    state, step = make_state(1, tx=tx), jzero.make_train_step(loss_fn, clip_norm=1.0)
    state, metrics = step(state, batch(0))
    assert bool(metrics["step_applied"])
    before = parts(state)
    after, metrics = step(state, batch(1, poisoned=0))
    assert not bool(metrics["step_applied"])
    after_parts = parts(after)
    assert_same_bits(before.params, after_parts.params)
    assert_same_bits(before.opt_state.inner, after_parts.opt_state.inner)
    assert_same_bits(before.opt_state.masters, after_parts.opt_state.masters)
    assert_same_bits(before.step, after_parts.step)
    assert int(after.opt_state.loss_scale.hysteresis) == 1


def test_without_skipping_the_numbers_show_it():
    _, metrics = STEP(make_state(3, precision="bf16"), batch(0, poisoned=5))
    assert bool(metrics["step_applied"])
    assert np.isnan(float(metrics["grad_norm"]))


def test_static_scale_skips_and_stays():
    precision = jzero.Precision(compute_dtype="float16", loss_scale=256.0)
    state, step = make_state(2, precision=precision), STEP
    for i in range(3):
        state, metrics = step(state, batch(i, poisoned=3 if i == 1 else None))
        assert float(metrics["loss_scale"]) == 256.0
        assert bool(metrics["step_applied"]) == (i != 1)


def test_overflow_at_the_minimum_raises_with_step_and_leaves():
    """A healthy run through the same step, between two steps of the sick one, does not hide it."""
    rules = jzero.DynamicLossScale(initial=2.0, hysteresis=1)
    state = make_state(3, precision=jzero.Precision(compute_dtype="float16", loss_scale=rules))
    step = STEP
    for i in range(3):
        state, _ = step(state, batch(i))
    before = host(jzero.gather_params(state))
    state, metrics = step(state, batch(3, poisoned=9))  # 2 -> 1
    assert float(metrics["loss_scale"]) == 2.0
    well = make_state(3, precision=jzero.Precision(compute_dtype="float16", loss_scale=rules))
    scale = well.opt_state.loss_scale
    scale = dataclasses.replace(scale, scale=jax.device_put(np.float32(2.0**15), scale.scale.sharding))
    well = well.replace(opt_state=dataclasses.replace(well.opt_state, loss_scale=scale))
    _, metrics = step(well, batch(0))
    assert float(metrics["loss_scale"]) == 2.0**15
    with pytest.raises(jzero.LossScaleError, match=r"Step 3: .*\(1.0\)[\s\S]*r_0/bias") as caught:
        step(state, batch(4, poisoned=9))
    assert caught.value.step == 3
    assert "layer_0/bias" in caught.value.leaves
    assert_same_bits(before, jzero.gather_params(caught.value.state))  # nothing is lost: the error holds the state
    state, metrics = step(caught.value.state, batch(5))
    assert bool(metrics["step_applied"])


def test_hysteresis_counts_at_the_minimum_and_only_leaves_that_overflowed_are_named():
    def one_leaf(params, batch):
        overflow = 0 * params["layer_0"]["bias"].sum() * batch["poison"].sum()
        return models.mlp_loss(jax.lax.stop_gradient(params), batch) + overflow

    rules = jzero.DynamicLossScale(initial=1.0, hysteresis=3)
    state = make_state(1, precision=jzero.Precision(compute_dtype="float16", loss_scale=rules))
    step = jzero.make_train_step(one_leaf)
    for i in range(2):
        state, _ = step(state, batch(i, poisoned=0))
    with pytest.raises(jzero.LossScaleError) as caught:
        step(state, batch(2, poisoned=0))
    assert caught.value.leaves == ["layer_0/bias"]


def test_own_loop_with_value_and_grad_skips_too():
    """`apply_gradients` decides by itself; gradients come back unscaled, in fp32."""
    state, loss_and_grads = make_state(3), jzero.value_and_grad(loss_fn)
    apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    _, grads = loss_and_grads(state, batch(0))
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    half = jax.tree.map(lambda x: np.asarray(x, np.float16), PARAMS)
    reference = norm_of(gradient_of_loss(half, batch(0)))
    assert 8 * norm_of(grads) == pytest.approx(reference, rel=2e-2)  # fp16 without a scale underflows a little
    state = apply(state, grads)
    before = parts((state.params, state.opt_state.inner, state.opt_state.masters))
    _, grads = loss_and_grads(state, batch(1, poisoned=4))
    state = apply(state, grads)
    assert_same_bits(before, parts((state.params, state.opt_state.inner, state.opt_state.masters)))
    assert int(state.opt_state.loss_scale.hysteresis) == 1
    assert int(state.opt_state.loss_scale.overflowed.sum()) > 0


def test_scaling_saves_small_gradients():
    """Gradients of 1e-6 vanish in fp16; with the scale they come out as in fp32."""
    small = lambda params, batch: 1e-7 * models.mlp_loss(params, batch).astype(jnp.float32)
    norms = {}
    for name, scale in (("with", "dynamic"), ("without", 1.0)):
        precision = jzero.Precision(compute_dtype="float16", loss_scale=scale)
        _, metrics = jzero.make_train_step(small)(make_state(3, precision=precision), models.mlp_batch(ROWS))
        norms[name] = float(metrics["grad_norm"])
    plain = gradient_of_loss(PARAMS, models.mlp_batch(ROWS))
    want = 1e-7 * norm_of(plain)
    assert norms["with"] == pytest.approx(want, rel=1e-2)
    assert abs(norms["without"] / want - 1) > 0.05


def test_weighted_sums_are_scaled_as_means():
    """The gradient of a sum over 10^5 weights would overflow fp16 at any useful scale; that of the mean does not."""

    def weighted(params, batch):
        mean = models.mlp_loss(params, batch)
        return jzero.Weighted(mean * batch["weight"].sum(), batch["weight"].sum())

    weight = np.full(ROWS, 1e5, np.float32)
    step = jzero.make_train_step(weighted, accumulate_steps=2, check_rows=False)
    _, metrics = step(make_state(2), {**models.mlp_batch(ROWS), "weight": weight})
    assert bool(metrics["step_applied"])
    want = gradient_of_loss(PARAMS, models.mlp_batch(ROWS))
    assert float(metrics["grad_norm"]) == pytest.approx(norm_of(want), rel=5e-3)


def test_sums_over_devices_do_not_overflow():
    """Each device's gradient fits fp16 (30,000), their sum over eight would not: it is divided before."""
    loss = lambda params, batch: (params["w"].astype(jnp.float32) * batch.mean()).sum()
    plain = jzero.TrainState.create(params={"w": np.ones((64, 64), np.float32)}, tx=optax.sgd(1.0))
    for stage in (1, 3):
        config = jzero.ZeroConfig(
            stage=stage, precision=jzero.Precision(compute_dtype="float16", loss_scale=1.0), persistence_threshold=0
        )
        state = jzero.shard_train_state(plain, config=config)
        _, metrics = jzero.make_train_step(loss)(state, np.full(8, 30_000, np.float32))
        assert bool(metrics["step_applied"])
        assert float(metrics["grad_norm"]) == pytest.approx(64 * 30_000, rel=1e-3)


def test_the_scale_stops_growing():
    rules = jzero.DynamicLossScale(initial=2.0**99, window=1)
    state = make_state(2, precision=jzero.Precision(compute_dtype="bfloat16", loss_scale=rules))
    step, scales = STEP, []
    for i in range(4):
        state, metrics = step(state, batch(i))
        scales.append(float(metrics["loss_scale"]))
        assert bool(metrics["step_applied"])
        assert float(metrics["grad_norm"]) > 0.1
    assert scales == [2.0**99, 2.0**99, 2.0**100, 2.0**100]
