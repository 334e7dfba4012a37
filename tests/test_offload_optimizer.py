"""Optimizer state on the host: the same numbers, less device memory, nothing left behind."""

import dataclasses
import functools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jzero
from jzero.core.jaxpr.equations import equations_of
from tests import models, shared
from tests.checkpoint_states import arrays, assert_same_bits
from tests.drawn import to_jax
from tests.offload_states import (
    ADAMW,
    HOST,
    ONE_LAYER,
    SMALL,
    config,
    deviation_from_optax,
    kinds,
    small_state,
    step_of,
    train,
    whole,
)

PART = dataclasses.replace(SMALL, ratio=0.97)  # matrices, and no vectors
CPU = dataclasses.replace(HOST, compute="host")
EVERY = [
    ("one_per_layer", "mlp", PART),
    ("adafactor", "two layers", SMALL),
    ("muon", "two layers", SMALL),
    ("lamb", "two layers", SMALL),
    ("multi_steps", "one layer", CPU),
    ("adamw", "one layer", CPU),
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "model", "offload"), EVERY)
def test_every_optimizer_equals_optax_on_one_device(optimizer, model, offload):
    """In float64 nothing but a wrong formula can exceed 1e-9 after 20 steps."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The optimizer needs more than single elements")
        deviation, state = deviation_from_optax(optimizer, offload, model)
        assert deviation < 1e-9
        plan = jzero.plan_of(state)
        found = [x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)]
        assert found == ["pinned_host" if leaf.memory == "host" else "device" for leaf in plan.opt_leaves]
        assert found.count("pinned_host") >= 3
        assert found.count("device") >= (5 if offload is PART else 0)


def test_padding_stays_zero():
    """Whatever the optimizer makes of zeros."""
    tx = optax.chain(optax.stateless(lambda updates, params: jax.tree.map(lambda x: x + 1, updates)), optax.trace(0.9))
    away = dataclasses.replace(SMALL, params="host")
    state, _ = train(small_state(3, "bf16", away, tx=tx, sizes=ONE_LAYER, persistence_threshold=0), steps=2)
    plan = jzero.plan_of(state)
    padded = 0
    leaves = [*(leaf.param for leaf in plan.leaves), *plan.opt_leaves]
    for x, leaf in zip(jax.tree.leaves((state.params, state.opt_state)), leaves, strict=True):
        if leaf.cut is not None and leaf.cut.is_padded:
            beyond = range(leaf.cut.natural_size, leaf.cut.stored_size)
            assert not np.take(np.asarray(x, np.float32), beyond, leaf.cut.dim).any(), leaf.path
            padded += 1
    assert padded >= 4


def of_all_elements(m, g):
    """Numbers of each kind over all elements of state; none may count what padding makes of zeros."""
    waves = jnp.cos(m)  # 1 where m is 0
    extremes = jnp.max(m - 1) + jnp.min(m + 1)
    flags = 1.0 * jnp.all(m != 0) + 2.0 * jnp.any(jnp.cos(m) > 1.5)
    return jnp.tanh(jnp.sum(waves) / m.size + extremes + flags + jnp.vdot(waves, g))


def numbers_of_state(scale):
    def update(updates, state, params=None):
        state = jax.tree.map(lambda m, g: 0.9 * m + g + 0.01, state, updates)
        return jax.tree.map(lambda g, m: -scale * of_all_elements(m, g) * (g + m), updates, state), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.ones_like, params), update)


@pytest.mark.parametrize("compute", ["device", "host"])
def test_numbers_over_state_on_the_host_equal_one_device(compute):
    rng = np.random.default_rng(0)
    shapes = {"odd": (37, 131), "flat": (11,), "stack": (3, 5, 13)}
    params = {name: to_jax(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    tx = numbers_of_state(1e-2)
    offload = jzero.Offload(optimizer="host", params="host", chunk_bytes=1024, compute=compute)
    state = shared.sharded(params, tx, 3, offload=offload)
    loss = lambda params, batch: batch.mean() * sum(jnp.square(x).sum() for x in params.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of state that comes to the devices as a whole
        state, _ = shared.train(jzero.make_train_step(loss), state, [np.ones(8, np.float32)] * 3)
    want, found = shared.by_optax(loss, params, tx, [np.ones(8, np.float32)] * 3), jzero.unshard_train_state(state)
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7)  # sums in another order
    jax.tree.map(same, (found.params, found.opt_state), (want.params, want.opt_state))


class Cleans(TrainState):
    def apply_gradients(self, *, grads):
        return super().apply_gradients(grads=jax.tree.map(jnp.nan_to_num, grads))


def test_a_skipped_step_changes_nothing_on_the_host():
    """Nor where a class of the user's hands finite gradients to the optimizer."""
    state = Cleans.create(apply_fn=None, params=models.mlp_params(sizes=ONE_LAYER), tx=ADAMW)
    state = jzero.shard_train_state(state, config=config(3, "fp16", SMALL))
    step = step_of()
    state, _ = step(state, models.mlp_batch(48))
    before = arrays((state.params, state.opt_state.masters, state.opt_state.inner))
    bad = models.mlp_batch(48)
    bad["x"][5] = np.inf
    state, metrics = step(state, bad)
    assert not metrics["step_applied"]
    assert_same_bits(arrays((state.params, state.opt_state.masters, state.opt_state.inner)), before)
    state, metrics = step(state, models.mlp_batch(48, seed=1))
    assert metrics["step_applied"]


def test_stochastic_rounding_draws_the_same_bits_wherever_it_runs(tmp_path):
    """bf16 moments and parameters, padded: on devices, in chunks from the host, on its CPU, in records on a disk."""
    precision = jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16")
    # Every sum and product here is exact in fp32, so only the noise could differ.
    tx = optax.sgd(2.0**-10, momentum=0.5)
    params = {"stack": to_jax(np.ones((3, 37, 131)), jnp.float32)}
    loss = lambda params, batch: sum((x.astype(jnp.float32) * batch[0, 0]).sum() / 8 for x in params.values())

    def run(offload):
        state = jzero.TrainState.create(params=params, tx=tx)
        state = jzero.shard_train_state(state, config=config(3, precision, offload))
        step = jzero.make_train_step(loss)
        for _ in range(4):
            state, _ = step(state, np.ones((8, 1), np.float32))
        if offload.optimizer != "disk":
            assert kinds(state.opt_state) == {"device" if offload.optimizer == "none" else "pinned_host"}
        return jax.tree.map(lambda x: np.asarray(x, np.float32), whole(state))

    want = run(jzero.Offload())
    w = jax.tree.leaves(want)[0]
    assert len(np.unique(w)) > 2
    assert len({row.tobytes() for row in w.reshape(-1, 131)}) == 3 * 37, "devices draw different bits"
    for offload in (
        dataclasses.replace(HOST, chunk_bytes=512, params="host"),
        CPU,
        jzero.Offload(optimizer="disk", path=tmp_path, chunk_bytes=512),
    ):
        jax.tree.map(np.testing.assert_array_equal, run(offload), want)


def test_born_there_laid_out_anew_and_back():
    def make(key):
        params = {"w": jax.random.normal(key, (129, 40)), "b": jnp.zeros(7)}
        return jzero.TrainState.create(params=params, tx=optax.adam(1e-3))

    born = jzero.init_train_state(make, jax.random.key(0), config=config(3, "bf16"))
    placed = jzero.shard_train_state(make(jax.random.key(0)), config=config(3, "bf16"))
    assert kinds(born.opt_state.inner) == kinds(born.opt_state.masters) == {"pinned_host"}
    assert [x.sharding for x in jax.tree.leaves(born)] == [x.sharding for x in jax.tree.leaves(placed)]
    for path, x in arrays(placed).items():  # drawn inside of a program and outside: up to the last bit
        np.testing.assert_allclose(
            np.asarray(arrays(born)[path], np.float32),
            np.asarray(x, np.float32),
            rtol=1e-2 if x.dtype == jnp.bfloat16 else 1e-6,
        )
    away = jzero.shard_train_state(born, config=config(1, "bf16", jzero.Offload()))
    assert kinds(away) == {"device"}
    back = jzero.shard_train_state(away, config=config(3, "bf16"))
    assert_same_bits(arrays(back), arrays(born))
    made = born.tx.init(born.params)
    assert kinds((made.masters, made.inner)) == {"pinned_host"}


mlp_state = functools.partial(small_state, sizes=models.MLP_SIZES)


def test_part_of_it():
    by_size = ["layer_1/kernel", "layer_0/kernel", "layer_2/kernel", "layer_0/bias", "layer_1/bias", "layer_2/bias"]

    def offloaded(offload, **options):
        plan = jzero.plan_of(mlp_state(3, offload=offload, **options))
        return {plan.leaves[i].path for i in plan.offloaded}

    sizes = {x.path: x.param.size for x in jzero.plan_of(mlp_state(3)).leaves}
    assert sorted(sizes, key=lambda path: -sizes[path]) == by_size
    assert offloaded(jzero.Offload(optimizer="host", ratio=0.0)) == set()
    assert offloaded(jzero.Offload(optimizer="host", ratio=0.5)) == set(by_size[:1])
    assert offloaded(jzero.Offload(optimizer="host", ratio=0.7)) == set(by_size[:2])
    rules = {".*bias": jzero.LeafRule(offload=False), "layer_2/kernel": jzero.LeafRule(offload=True)}
    assert offloaded(HOST, rules=rules) == set(by_size[:3])
    assert offloaded(jzero.Offload(optimizer="host", ratio=0.0), rules=rules) == {"layer_2/kernel"}


def test_frozen_parameters_do_not_count():
    params = {"frozen": jnp.ones((256, 512)), "a": jnp.ones((128, 64)), "b": jnp.ones((64, 32))}
    labels = {"frozen": "f", "a": "t", "b": "t"}
    tx = optax.multi_transform({"f": optax.set_to_zero(), "t": optax.adam(1e-3)}, labels)
    state = jzero.TrainState.create(params=params, tx=tx)
    for ratio, expected in ((0.5, {"a"}), (0.9, {"a", "b"}), (0.0, set())):
        plan = jzero.plan_train_state(state, config=config(3, offload=jzero.Offload(optimizer="host", ratio=ratio)))
        assert {plan.leaves[i].path for i in plan.offloaded} == expected


def test_a_budget_moves_no_more_than_it_must():
    def plan(budget, **options):
        return jzero.plan_of(mlp_state(3, offload=jzero.Offload(optimizer="host", device_budget_bytes=budget)))

    everything = jzero.plan_of(mlp_state(3, offload=jzero.Offload())).bytes_per_device
    full = everything.params + everything.opt_state
    assert not plan(full).offloaded
    one = plan(full - 1)
    assert [one.leaves[i].path for i in one.offloaded] == ["layer_1/kernel"]
    kernel = 61 * 128 // 8 * 4  # 127 rows padded to 128
    assert one.bytes_per_device.opt_state == everything.opt_state - 2 * kernel
    assert one.host_bytes_per_device == (0, 0, 2 * kernel)
    least = jzero.plan_of(mlp_state(3)).bytes_per_device
    assert len(plan(least.params + least.opt_state).offloaded) == 6
    with pytest.raises(ValueError, match="device_budget_bytes=100` cannot"):
        plan(100)


def test_what_needs_more_than_elements_says_so():
    state = small_state(3, tx=optax.contrib.muon(1e-3), sizes=ONE_LAYER)
    with pytest.warns(UserWarning, match=r"as a whole: \['layer_0/kernel'"):
        step_of().eval_shape(state, models.mlp_batch(48))
    away = dataclasses.replace(SMALL, params="host")
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tx in (clipped, optax.lamb(1e-3)):  # norms are summed chunk by chunk
            step_of().eval_shape(small_state(3, tx=tx, offload=away, sizes=ONE_LAYER), models.mlp_batch(48))


def test_plan_and_analysis_tell_host_bytes_apart():
    state = small_state(3, "bf16")
    plan = jzero.plan_of(state)
    held = lambda kind: sum(
        x.addressable_shards[0].data.nbytes
        for x in jax.tree.leaves((state.params, state.opt_state))
        if x.sharding.memory_kind == kind
    )
    assert plan.host_bytes_per_device.total == held("pinned_host")
    assert plan.bytes_per_device.params + plan.bytes_per_device.opt_state == held("device")
    assert "on the host" in str(plan)
    report = jzero.analyze(step_of(), state, models.mlp_batch(48))
    assert report.memory.host == report.estimated.host == held("pinned_host")
    assert report.estimated.params + report.estimated.opt_state == held("device")
    batch = sum(x.nbytes for x in models.mlp_batch(48).values()) // 8
    assert report.memory.arguments == report.estimated.arguments == held("device") + batch + 4  # the step's number
    report.verify()


def test_devices_that_do_not_say_what_memories_they_have(monkeypatch):
    """As compile-only GPUs: a plan is fine, but nothing may be placed where the devices would have to hold it."""
    monkeypatch.setattr("jzero.core.layout.mesh.memory_kinds", lambda device: [])
    for room in ("core.layout.leaves", "core.plan.plan"):  # the function itself keeps what it knows of a mesh
        monkeypatch.setattr(f"jzero.{room}.names_host_memory", lambda mesh: False)
    monkeypatch.setattr(
        "jzero.core.plan.planner._PLANS", weakref.WeakKeyDictionary()
    )  # an equal one knows other memories
    state = jzero.TrainState.create(params=models.mlp_params(), tx=optax.adamw(1e-2))
    assert jzero.plan_train_state(state, config=config(3)).host_bytes_per_device.opt_state > 0
    for place in (
        lambda: jzero.shard_train_state(state, config=config(3)),
        lambda: jzero.init_train_state(lambda key: state, jax.random.key(0), config=config(3)),
    ):
        with pytest.raises(ValueError, match="do not say what memories"):
            place()


def moved_state():
    return small_state(3, offload=jzero.Offload())


def test_evaluation_needs_the_parameters_alone():
    state = moved_state()
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
        jzero.offload_train_state(moved_state(), include=["mu"])
    with pytest.raises(ValueError, match="got 'params'"):
        jzero.offload_train_state(moved_state(), include="params")


def test_devices_without_host_memory(monkeypatch):
    monkeypatch.setattr("jzero.core.layout.mesh.memory_kinds", lambda device: ["device"])
    state = moved_state()
    with pytest.raises(ValueError, match=r"'pinned_host', only \['device'\]"):
        jzero.offload_train_state(state)
    assert np.isfinite(float(state.params["layer_0"]["bias"][0])), "and nothing was moved"


@pytest.mark.parametrize(("precision", "element_bytes"), [("fp32", 2 * 4), ("bf16", 3 * 4)])
def test_a_transfer_has_as_many_rows_as_it_may(precision, element_bytes):
    """Of moments, and a master; what is on the device does not count."""
    state = TrainState.create(apply_fn=None, params={"w": np.ones((512, 24), np.float32)}, tx=optax.adamw(1e-2))
    state = jzero.shard_train_state(state, config=config(3, precision=precision, offload=SMALL))
    step = jzero.make_train_step(lambda params, batch: jnp.square(batch.astype(params["w"].dtype) @ params["w"]).mean())
    equations = equations_of(step.trace(state, np.ones((8, 512), np.float32)).jaxpr)
    rows = {x.outvars[0].aval.shape[0] for x in equations if x.primitive.name == "dynamic_slice"}
    assert max(rows) == SMALL.chunk_bytes // (24 * element_bytes)
