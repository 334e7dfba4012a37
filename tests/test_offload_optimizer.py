"""Optimizer state on the host: the same numbers, less device memory, nothing left behind."""

import dataclasses
import itertools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jzero
from tests import models, optimizers
from tests.checkpoint_states import arrays, assert_same_bits, linen_state, nnx_state
from tests.compiled import DEFAULT_FUSIONS
from tests.tiers import default_for, slow

HOST = jzero.Offload(optimizer="host")
SMALL = jzero.Offload(optimizer="host", chunk_bytes=2048)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def config(stage, precision="fp32", offload=HOST, **options):
    return jzero.ZeroConfig(stage=stage, precision=precision, persistence_threshold=50, offload=offload, **options)


def mlp_state(stage, precision="fp32", offload=HOST, tx=None, **options):
    state = jzero.TrainState.create(params=models.mlp_params(), tx=tx or optax.adamw(1e-2))
    return jzero.shard_train_state(state, config=config(stage, precision, offload, **options))


def train(state, steps=3, **options):
    # Results are compared to the last bits, of which fusions decide.
    step = jzero.make_train_step(models.mlp_loss, compiler_options=DEFAULT_FUSIONS, **options)
    losses = []
    for i in range(steps):
        state, metrics = step(state, models.mlp_batch(48, seed=i))
        losses.append(float(metrics["loss"]))
    return state, losses


def whole(state):
    """Masters and moments, whole and natural."""
    plain = jzero.unshard_train_state(state)
    return {**arrays(plain.params), **arrays(plain.opt_state)}


def assert_close(found, expected, ulps):
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_max_ulp(found[path] + np.float32(1), x + np.float32(1), maxulp=ulps)


# A master's last bit may decide how it rounds to fp16: the next step makes up to 16 ulp of that, in single elements.
STEPS_AND_ULPS = {"fp32": (3, 2), "bf16": (3, 2), "fp16": (2, 16)}


def deviation_from_optax(optimizer, offload):
    """Trains 20 steps in float64 at stage 3; returns the largest deviation from optax on one device, and the state."""
    params, loss_fn, batches = optimizers.problem("mlp", "float64")
    state = TrainState.create(apply_fn=None, params=params, tx=optimizers.OPTIMIZERS[optimizer]())
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0, offload=offload))
    step, losses = jzero.make_train_step(loss_fn), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    run = optimizers.Run(np.array(losses), jax.tree.map(np.asarray, jzero.gather_params(state)))
    return max(optimizers.deviation(run, optimizers.run_plain("mlp", optimizer, "float64"))), state


QUICK = ("adafactor", "lamb", "muon")


@pytest.mark.parametrize("optimizer", default_for(QUICK, optimizers.OPTIMIZERS))
def test_every_optimizer_equals_optax_on_one_device(optimizer):
    """In float64 nothing but a wrong formula can exceed 1e-9 after 20 steps."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The optimizer needs more than single elements")
        deviation, state = deviation_from_optax(optimizer, SMALL)
        assert deviation < 1e-9
        plan = jzero.plan_of(state)
        found = [x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)]
        assert found == ["pinned_host" if leaf.memory == "host" else "device" for leaf in plan.opt_leaves]
        assert found.count("pinned_host") >= 3


@pytest.mark.parametrize(
    ("stage", "precision"),
    default_for([(1, "fp32"), (2, "fp16"), (3, "bf16")], itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16"))),
)
def test_the_numbers_are_those_without_offload(stage, precision):
    """Up to the last bit: compilers contract multiplications and additions in a loop's body otherwise than outside."""
    steps, ulps = STEPS_AND_ULPS[precision]
    expected, losses = train(mlp_state(stage, precision, jzero.Offload()), steps, clip_norm=0.05)
    state, found = train(mlp_state(stage, precision, SMALL), steps, clip_norm=0.05)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert_close(whole(state), whole(expected), ulps)
    assert kinds((state.opt_state.masters, state.opt_state.inner) if precision != "fp32" else state.opt_state) == {
        "pinned_host"
    }
    assert kinds(state.params) == {"device"}


def test_padding_stays_zero():
    """Whatever the optimizer makes of zeros."""
    tx = optax.chain(optax.stateless(lambda updates, params: jax.tree.map(lambda x: x + 1, updates)), optax.trace(0.9))
    for stage, offload in ((2, SMALL), (3, dataclasses.replace(SMALL, params="host"))):
        state, _ = train(mlp_state(stage, "bf16", offload, tx=tx))
        plan = jzero.plan_of(state)
        padded = 0
        leaves = [*(leaf.param for leaf in plan.leaves), *plan.opt_leaves]
        for x, leaf in zip(jax.tree.leaves((state.params, state.opt_state)), leaves, strict=True):
            if leaf.cut is not None and leaf.cut.is_padded:
                beyond = range(leaf.cut.natural_size, leaf.cut.stored_size)
                assert not np.take(np.asarray(x, np.float32), beyond, leaf.cut.dim).any(), leaf.path
                padded += 1
        assert padded >= 8


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
    shapes = {"odd": (37, 131), "flat": (11,), "stack": (3, 5, 13)}
    keys = {name: jax.random.fold_in(jax.random.key(0), i) for i, name in enumerate(shapes)}
    params = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    tx = numbers_of_state(1e-2)
    offload = jzero.Offload(optimizer="host", params="host", chunk_bytes=1024, compute=compute)
    state = jzero.TrainState.create(params=params, tx=tx)
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0, offload=offload))
    loss = lambda params, batch: batch.mean() * sum(jnp.square(x).sum() for x in params.values())
    step = jzero.make_train_step(loss)
    opt_state = tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of state that comes to the devices as a whole
        for _ in range(3):
            state, _ = step(state, jnp.ones((8,)))
            updates, opt_state = tx.update(jax.grad(loss)(params, jnp.ones((8,))), opt_state, params)
            params = optax.apply_updates(params, updates)
    # Sums in another order.
    found = jzero.unshard_train_state(state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), found.params, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), found.opt_state, opt_state)


def test_chunks_of_any_size_give_the_same():
    reference, _ = train(mlp_state(2, "bf16"))
    for chunk_bytes in (1, 700):
        state, _ = train(mlp_state(2, "bf16", dataclasses.replace(HOST, chunk_bytes=chunk_bytes)))
        assert_close(whole(state), whole(reference), ulps=1)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_accumulation_and_weights(precision):
    def loss(params, batch):
        return jzero.Weighted(models.mlp_loss(params, batch) * batch["x"].shape[0], batch["w"].sum())

    def run(offload):
        state = mlp_state(2, precision, offload)
        step = jzero.make_train_step(loss, accumulate_steps=2, clip_norm=0.5, compiler_options=DEFAULT_FUSIONS)
        applied = []
        for i, weight in enumerate((1.0, 0.0, 1.0)):  # a batch without weight is skipped
            batch = {**models.mlp_batch(48, seed=i), "w": np.full(48, weight, np.float32)}
            state, metrics = step(state, batch)
            applied.append(bool(metrics["step_applied"]))
        return state, applied

    expected, applied = run(jzero.Offload())
    found, also = run(SMALL)
    assert applied == also == [True, False, True]
    assert_close(whole(found), whole(expected), ulps=1)


class Cleans(TrainState):
    def apply_gradients(self, *, grads):
        return super().apply_gradients(grads=jax.tree.map(jnp.nan_to_num, grads))


@pytest.mark.parametrize("cls", [TrainState, Cleans])
def test_a_skipped_step_changes_nothing_on_the_host(cls):
    """Nor where a class of the user's hands finite gradients to the optimizer."""
    state = cls.create(apply_fn=None, params=models.mlp_params(), tx=optax.adamw(1e-2))
    state = jzero.shard_train_state(state, config=config(3, "fp16", SMALL))
    step = jzero.make_train_step(models.mlp_loss)
    state, _ = step(state, models.mlp_batch(48))
    before = arrays((state.params, state.opt_state.masters, state.opt_state.inner))
    bad = models.mlp_batch(48)
    bad["x"][5] = np.inf
    state, metrics = step(state, bad)
    assert not metrics["step_applied"]
    assert_same_bits(arrays((state.params, state.opt_state.masters, state.opt_state.inner)), before)
    state, metrics = step(state, models.mlp_batch(48, seed=1))
    assert metrics["step_applied"]


@pytest.mark.parametrize(("precision", "jit"), [slow("fp32", True), ("fp16", False)])
def test_an_own_loop(precision, jit):
    """`value_and_grad` and `apply_gradients`, which decides by itself whether to skip."""

    def run(offload):
        state = mlp_state(3, precision, offload)
        apply = lambda state, grads: state.apply_gradients(grads=grads)
        apply = jax.jit(apply, donate_argnums=0) if jit else apply
        for i in range(3):
            batch = models.mlp_batch(48, seed=i)
            if i == 1 and precision == "fp16":
                batch["x"][0] = np.inf
            _, grads = jzero.value_and_grad(models.mlp_loss)(state, batch)
            state = apply(state, grads)
        return state

    found = run(SMALL)
    assert "pinned_host" in kinds(found.opt_state)
    assert kinds(found.params) == {"device"}
    assert_close(whole(found), whole(run(jzero.Offload())), ulps=2)


def test_stochastic_rounding_draws_the_same_bits_wherever_it_runs():
    """bf16 moments and parameters, padded: on devices, in chunks of any size and on the host's CPU."""
    precision = jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16")
    # Every sum and product here is exact in fp32, so only the noise could differ.
    tx = optax.sgd(2.0**-10, momentum=0.5)
    params = {"w": jnp.ones((37, 131)), "stack": jnp.ones((3, 5, 131))}
    loss = lambda params, batch: sum((x.astype(jnp.float32) * batch[0, 0]).sum() / 8 for x in params.values())

    def run(offload):
        state = jzero.TrainState.create(params=params, tx=tx)
        state = jzero.shard_train_state(state, config=config(3, precision, offload))
        step = jzero.make_train_step(loss)
        for _ in range(4):
            state, _ = step(state, jnp.ones((8, 1)))
        assert kinds(state.opt_state) == {"device" if offload.optimizer == "none" else "pinned_host"}
        return jax.tree.map(lambda x: np.asarray(x, np.float32), whole(state))

    want = run(jzero.Offload())
    w = jax.tree.leaves(want)[0]
    assert len(np.unique(w)) > 2
    for offload in (
        HOST,
        dataclasses.replace(HOST, chunk_bytes=512),
        dataclasses.replace(HOST, compute="host"),
        dataclasses.replace(HOST, params="host", chunk_bytes=512),
    ):
        jax.tree.map(np.testing.assert_array_equal, run(offload), want)


def test_nnx():
    def run(offload):
        state = jzero.shard_train_state(nnx_state(), config=config(3, "fp32", offload))
        # Each device normalizes its own rows.
        step = jzero.make_train_step(lambda model, batch: jnp.square(model(batch)).mean(), check_rows=False)
        for i in range(2):
            state, _ = step(state, np.arange(16, dtype=np.int32) + i)
        return state

    found, expected = run(SMALL), run(jzero.Offload())
    assert "pinned_host" in kinds(found[1].opt_state)
    for name in ("first.kernel", "embed.embedding"):
        path = name.replace(".", "/")
        a, b = (np.asarray(jzero.get_full_param(state, path)) for state in (found, expected))
        np.testing.assert_array_max_ulp(a + 1, b + 1, maxulp=2)


def test_what_reads_and_writes_single_leaves():
    state, _ = train(mlp_state(3, "bf16"))
    expected, _ = train(mlp_state(3, "bf16", jzero.Offload()))
    path = "layer_0/kernel"
    for a, b in (
        (jzero.get_full_param(state, path), jzero.get_full_param(expected, path)),
        *((jzero.get_full_opt_state(x, path, name="mu") for x in (state, expected)),),
        *((jzero.gather_params(x, masters=True)["layer_0"]["kernel"] for x in (state, expected)),),
    ):
        np.testing.assert_array_max_ulp(np.asarray(a) + 1, np.asarray(b) + 1, maxulp=2)
    state = jzero.set_full_opt_state(state, path, name="mu", value=np.ones((37, 127)))
    state = jzero.set_full_param(state, path, value=np.full((37, 127), 0.3))
    assert float(jzero.get_full_opt_state(state, path, name="mu").min()) == 1
    assert kinds(state.opt_state.inner) == {"pinned_host"}
    np.testing.assert_array_equal(jzero.get_full_param(state, path), np.float32(0.3))
    state = jzero.update_params(state, lambda p: jax.tree.map(lambda x: x * 0, p), paths=path)
    assert float(np.abs(jzero.get_full_param(state, path)).max()) == 0
    state, _ = train(state, steps=1)  # and the step takes what was set


def test_an_edited_parameter_is_taken_over():
    state = mlp_state(3, "bf16", SMALL, tx=optax.sgd(0.0))
    state = state.replace(params=jax.tree.map(lambda x: x * 0 + 3, state.params))
    assert float(jzero.get_full_param(state, "layer_0/kernel").min()) == 3
    state, _ = train(state, steps=1)
    assert float(jzero.get_full_param(state, "layer_0/kernel").min()) == 3


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


@pytest.mark.parametrize("writer", [HOST, pytest.param(jzero.Offload(), marks=pytest.mark.slow)])
def test_checkpoints(writer, tmp_path):
    options = {"tx": optax.adamw(1e-2)}
    state, _ = train(mlp_state(3, "bf16", writer, **options))
    jzero.save_checkpoint(tmp_path / "x", state)
    for stage, reader in ((3, HOST), (1, SMALL), (2, jzero.Offload())):
        like = mlp_state(stage, "bf16", reader, **options)
        back = jzero.restore_checkpoint(tmp_path / "x", like)
        assert [x.sharding for x in jax.tree.leaves(back)] == [x.sharding for x in jax.tree.leaves(like)]
        assert_same_bits(whole(back), whole(state))
        jzero.make_train_step(models.mlp_loss)(back, models.mlp_batch(48))


def test_a_checkpoint_is_read_to_the_host_directly(tmp_path):
    plain = linen_state()
    jzero.save_checkpoint(tmp_path / "x", jzero.shard_train_state(plain, stage=2))
    like = jzero.abstract_train_state(plain, config=config(3, "bf16"))
    back = jzero.restore_checkpoint(tmp_path / "x", like)
    assert kinds(back.opt_state.masters) == {"pinned_host"}
    expected = jzero.shard_train_state(plain, config=config(3, "bf16"))
    assert_same_bits(arrays(back), arrays(expected))


def test_moved_by_hand_and_back():
    state, _ = train(mlp_state(3, "bf16"))
    before = arrays(state)
    shardings = [x.sharding for x in jax.tree.leaves(state)]
    away = jzero.offload_train_state(state)
    assert kinds((away.params, away.opt_state.inner)) == {"pinned_host"}
    with pytest.raises(RuntimeError, match=r"are in host memory: \['layer_0/bias'"):
        train(away, steps=1)
    back = jzero.reload_train_state(away)
    assert [x.sharding for x in jax.tree.leaves(back)] == shardings
    assert_same_bits(arrays(back), before)
    near = back.replace(opt_state=jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), back.opt_state))
    with pytest.raises(RuntimeError, match=r"are on the devices, but the plan keeps them in host memory"):
        train(near, steps=1)


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
    expected, _ = train(mlp_state(3, offload=jzero.Offload()))
    found, _ = train(mlp_state(3, offload=jzero.Offload(optimizer="host", ratio=0.5), rules=rules))
    assert_close(whole(found), whole(expected), ulps=2)


def test_frozen_parameters_do_not_count():
    params = {"frozen": jnp.ones((256, 512)), "a": jnp.ones((128, 64)), "b": jnp.ones((64, 32))}
    labels = {"frozen": "f", "a": "t", "b": "t"}
    tx = optax.multi_transform({"f": optax.set_to_zero(), "t": optax.adam(1e-3)}, labels)
    state = jzero.TrainState.create(params=params, tx=tx)
    for ratio, expected in ((0.5, {"a"}), (0.9, {"a", "b"}), (0.0, set())):
        plan = jzero.plan_train_state(state, config=config(3, offload=jzero.Offload(optimizer="host", ratio=ratio)))
        assert {plan.leaves[i].path for i in plan.offloaded} == expected


@pytest.mark.parametrize("offload", [jzero.Offload(), HOST])
def test_what_a_state_hands_to_its_optimizer_counts(offload):
    """Decay towards something else than zero: the optimizer sees other parameters than those that are updated."""

    class Anchored(TrainState):
        def apply_gradients(self, *, grads):
            away = jax.tree.map(lambda p: p - 1, self.params)
            updates, opt_state = self.tx.update(grads, self.opt_state, away)
            return self.replace(
                step=self.step + 1, params=optax.apply_updates(self.params, updates), opt_state=opt_state
            )

    tx = optax.adamw(1e-2, eps=1e-3, weight_decay=0.5)
    plain = Anchored.create(apply_fn=None, params=models.mlp_params(), tx=tx)
    state = jzero.shard_train_state(plain, config=config(3, offload=offload))
    state, _ = jzero.make_train_step(models.mlp_loss)(state, models.mlp_batch(48))
    expected = plain.apply_gradients(grads=jax.grad(models.mlp_loss)(plain.params, models.mlp_batch(48)))
    for a, b in zip(jax.tree.leaves(jzero.gather_params(state)), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_updates_wider_than_the_gradient():
    """16-bit parameters without a policy, and an optimizer that returns fp32: added as without offload."""
    tx = optax.chain(
        optax.trace(0.0), optax.stateless(lambda u, _: jax.tree.map(lambda x: x.astype(jnp.float32) * (1 + 2**-10), u))
    )
    state = jzero.TrainState.create(params={"w": jnp.ones((64, 64), jnp.bfloat16)}, tx=tx)
    loss = lambda params, batch: params["w"].astype(jnp.float32).sum() * 2**-8 * batch.mean()
    found = []
    for offload in (jzero.Offload(), HOST):
        sharded = jzero.shard_train_state(state, config=config(3, offload=offload))
        sharded, _ = jzero.make_train_step(loss)(sharded, np.ones(8, np.float32))
        found.append(float(jzero.gather_params(sharded)["w"].astype(jnp.float32).mean()))
    assert found == [1.0078125, 1.0078125]


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
    with pytest.raises(ValueError, match=r"`Offload.device_budget_bytes=100` cannot be met: .* bytes more"):
        plan(100)


def test_what_needs_more_than_elements_says_so():
    state = mlp_state(3, tx=optax.contrib.muon(1e-3))
    with pytest.warns(UserWarning, match=r"as a whole: \['layer_0/kernel', 'layer_1/kernel'"):
        train(state, steps=1)
    away = dataclasses.replace(SMALL, params="host")
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tx in (clipped, optax.lamb(1e-3)):  # norms are summed chunk by chunk
            train(mlp_state(3, tx=tx, offload=away), steps=1)


def test_plan_and_analysis_tell_host_bytes_apart():
    state = mlp_state(3, "bf16")
    plan = jzero.plan_of(state)
    held = lambda kind: sum(
        x.addressable_shards[0].data.nbytes
        for x in jax.tree.leaves((state.params, state.opt_state))
        if x.sharding.memory_kind == kind
    )
    assert plan.host_bytes_per_device.total == held("pinned_host")
    assert plan.bytes_per_device.params + plan.bytes_per_device.opt_state == held("device")
    assert "on the host" in str(plan)
    report = jzero.analyze(jzero.make_train_step(models.mlp_loss), state, models.mlp_batch(48))
    assert report.memory.host == report.reckoned.host == held("pinned_host")
    assert report.reckoned.params + report.reckoned.opt_state == held("device")
    batch = sum(x.nbytes for x in models.mlp_batch(48).values()) // 8
    assert report.memory.arguments == report.reckoned.arguments == held("device") + batch + 4  # the step's number
    report.verify()


def test_what_cannot_be():
    for options, message in (
        ({"optimizer": "tape"}, r"`Offload.optimizer` must be one of \('none', 'host', 'disk'\): got 'tape'"),
        ({"optimizer": "host", "ratio": 1.5}, r"`Offload.ratio` must be a number from 0 to 1: got 1.5"),
        ({"ratio": 0.5}, r"`optimizer` is 'none'"),
        ({"optimizer": "host", "chunk_bytes": 0}, r"`Offload.chunk_bytes` must be .* >= 1: got 0"),
        ({"optimizer": "host", "ratio": 0.5, "device_budget_bytes": 9}, r"set one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.Offload(**options)
    with pytest.raises(ValueError, match=r"`offload` must be a `jzero.Offload`: got 'host'"):
        jzero.ZeroConfig(offload="host")
    with pytest.raises(ValueError, match=r"offload=True, but nothing is offloaded"):
        jzero.ZeroConfig(rules={"w": jzero.LeafRule(offload=True)})


def test_devices_without_host_memory(monkeypatch):
    monkeypatch.setattr("jzero.layout.mesh.memory_kinds", lambda device: ["device"])
    with pytest.raises(ValueError, match=r"\(cpu\) have no memory of the kind 'pinned_host', only \['device'\]"):
        mlp_state(3)


def test_devices_that_do_not_say_what_memories_they_have(monkeypatch):
    """As compile-only GPUs: a plan is fine, but nothing may be placed where the devices would have to hold it."""
    monkeypatch.setattr("jzero.layout.mesh.memory_kinds", lambda device: [])
    monkeypatch.setattr("jzero.plan.plan.memory_kinds", lambda device: [])
    monkeypatch.setattr("jzero.plan.planner._PLANS", weakref.WeakKeyDictionary())  # an equal one knows other memories
    state = jzero.TrainState.create(params=models.mlp_params(), tx=optax.adamw(1e-2))
    assert jzero.plan_train_state(state, config=config(3)).host_bytes_per_device.opt_state > 0
    for place in (
        lambda: jzero.shard_train_state(state, config=config(3)),
        lambda: jzero.init_train_state(lambda key: state, jax.random.key(0), config=config(3)),
    ):
        with pytest.raises(ValueError, match=r"do not say what memories they have.*`offload=jzero.Offload\(\)`"):
            place()
