"""Frozen parameters: no gradient, no master, no moments, still partitioned; equal to plain optax on the rest."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jzero
from tests import shared
from tests.stablehlo import in_line

D, R, ROWS, LAYERS = 64, 4, 16, 2


def lora_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype)
    layer = lambda: {"kernel": make(D, D), "lora_a": make(D, R), "lora_b": make(R, D)}
    return {f"layer_{i}": layer() for i in range(LAYERS)}


def lora_loss(params, batch):
    x = batch.astype(params["layer_0"]["kernel"].dtype)
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + (x @ layer["lora_a"]) @ layer["lora_b"])
    return jnp.square(x.astype(jnp.float32) - 0.1).mean()


def batch(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, D)).astype(np.float32)


LORA = r".*/lora_[ab]"


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda p, _: "train" if "lora" in str(p[-1]) else "freeze", params)


is_label = lambda label: lambda params: jax.tree.map(lambda x: x == label, labels(params))
ADAM, ZERO = optax.adam(1e-2), optax.set_to_zero()
MULTI = optax.multi_transform({"train": ADAM, "freeze": ZERO}, labels)
WAYS = {
    "trainable": (ADAM, {"trainable": LORA}),
    "multi_transform": (MULTI, {}),
    "masked": (optax.chain(optax.masked(ADAM, is_label("train")), optax.masked(ZERO, is_label("freeze"))), {}),
}


def plain_state(tx=ADAM, params=None):
    return TrainState.create(apply_fn=None, params=params or lora_params(), tx=tx)


def make_state(way, stage, precision="fp32"):
    tx, options = WAYS[way]
    return jzero.shard_train_state(plain_state(tx), config=shared.config(stage, precision=precision), **options)


@jax.jit
def by_hand(state, batch):
    """A step of plain optax."""
    return state.apply_gradients(grads=jax.grad(lora_loss)(state.params, batch))


@functools.cache
def plain_run(steps):
    """One device, plain optax: gradients of the adapters alone, so that nothing but them can move."""
    params = lora_params()
    adapters = {k: {n: x for n, x in v.items() if "lora" in n} for k, v in params.items()}
    merge = lambda a: {k: {**v, **a[k]} for k, v in params.items()}
    found = shared.by_optax(lambda a, batch: lora_loss(merge(a), batch), adapters, ADAM, map(batch, range(steps)))
    return found.losses, merge(found.params)


@pytest.mark.parametrize(("way", "stage"), [("trainable", 3), ("multi_transform", 1)])
def test_equals_training_the_adapters_alone(way, stage):
    state, losses = shared.train(shared.make_train_step(lora_loss), make_state(way, stage), map(batch, range(3)))
    want, params = plain_run(3)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    have = jzero.gather_params(state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), have, params)
    for name, layer in lora_params().items():  # to the bit
        np.testing.assert_array_equal(have[name]["kernel"], layer["kernel"])


@pytest.mark.parametrize("way", WAYS)
def test_frozen_leaves_cost_their_shard_alone(way):
    """Ψ frozen fp32 weights cost 4Ψ/N, whatever the loss sees, and nothing else; the adapters their full state."""
    frozen = LAYERS * D * D
    adapters = LAYERS * 2 * D * R
    for precision, width in (("fp32", 4), ("bf16", 2)):
        plan = jzero.plan_of(make_state(way, 3, precision))
        have = plan.bytes_per_device
        masters = 4 * adapters / 8
        assert have.params == 4 * frozen / 8 + masters
        assert have.grads == width * adapters / 8
        assert have.opt_state == pytest.approx(8 * adapters / 8, abs=16)
    # Stage 2 holds them whole, without a master.
    plan = jzero.plan_of(make_state(way, 2, "bf16"))
    assert plan.bytes_per_device.params == 4 * frozen + 2 * adapters
    assert plan.bytes_per_device.opt_state == pytest.approx(12 * adapters / 8, abs=16)


def test_no_gradient_is_computed_or_communicated():
    """Nothing of a frozen kernel's size is reduced, nor made in the backward pass."""
    text = in_line(jzero.make_train_step(lora_loss).lower(make_state("trainable", 3), batch()).as_text())
    reduced = re.findall(r'"stablehlo\.reduce_scatter".*?\) : \(tensor<([^>]*)>\)', text, flags=re.DOTALL)
    assert sorted(reduced) == sorted([f"{D}x{R}xf32", f"{R}x{D}xf32"] * LAYERS)
    gathered = re.findall(r'"stablehlo\.all_gather".*?-> tensor<([^>]*)>', text, flags=re.DOTALL)
    # Forward all; backward all but the first, whose input needs no gradient.
    assert gathered.count(f"{D}x{D}xf32") == 2 * LAYERS - 1


def test_an_optimizer_that_reads_all_gradients_keeps_them():
    """Clipping by the norm of all gradients, then freezing: on one device the frozen ones count, so they do here."""
    # Not Adam: it would move adapters as far whatever the norm, and an element of next to no gradient by its last bits.
    parts = {"train": optax.sgd(10.0), "freeze": ZERO}
    plain = plain_state(optax.chain(optax.clip_by_global_norm(1e-2), optax.multi_transform(parts, labels)))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    assert all(leaf.trained for leaf in jzero.plan_of(state).leaves)
    step = jzero.make_train_step(lora_loss)
    for i in range(2):
        state, _ = step(state, batch(i))
        plain = by_hand(plain, batch(i))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), jzero.gather_params(state), plain.params)


def with_value(updates, state, params=None, *, value, **_):
    raise RuntimeError("no value")


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.chain(optax.masked(ZERO, lambda p: jax.tree.map(lambda _: False, p))),
        optax.chain(
            optax.multi_transform({"train": optax.sgd(0.1), "freeze": ZERO}, labels),
            optax.add_decayed_weights(-1e-3),
        ),
        optax.masked(ADAM, is_label("train")),
        optax.multi_transform({"train": ADAM, "freeze": optax.scale(0.0)}, labels),  # 0 * inf is NaN
        optax.chain(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), with_value), MULTI),
        optax.stateless(
            lambda grads, _: jax.tree.map(lambda x: jnp.asarray(np.arange(x.size).reshape(x.shape)), grads)
        ),
    ],
    ids=[
        "no state",
        "masked nothing",
        "decay after freezing",
        "masked passes gradients on",
        "times zero",
        "asks for more arguments",
        "adds constants",
    ],
)
def test_what_is_not_frozen_is_trained(tx):
    assert all(leaf.trained for leaf in jzero.plan_train_state(plain_state(tx), stage=3).leaves)


@pytest.mark.parametrize("stage", [1, 3])
def test_negative_zeros_of_frozen_leaves_stay_negative(stage):
    """Updates add nothing to them, to the bit; where nothing is compiled, since compilers drop additions of zeros."""
    params = {"frozen": np.full(16, -0.0, np.float32), "w": np.ones((16, 8), np.float32)}
    state = shared.sharded(params, shared.sgd(0.1), stage, trainable="w")
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    assert np.signbit(jzero.gather_params(state)["frozen"]).all()


def test_trees_of_booleans_and_prefixes_select():
    plain = plain_state()
    by_tree = jzero.plan_train_state(plain, stage=3, trainable=is_label("train")(plain.params))
    by_path = jzero.plan_train_state(plain, stage=3, trainable=LORA)
    assert by_tree == by_path
    prefix = {"layer_0": True, "layer_1": False}
    trained = [leaf.path for leaf in jzero.plan_train_state(plain, stage=3, trainable=prefix).leaves if leaf.trained]
    assert trained == ["layer_0/kernel", "layer_0/lora_a", "layer_0/lora_b"]
    assert jzero.plan_train_state(plain, stage=3, trainable=".*") == jzero.plan_train_state(plain, stage=3)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("nothing", "selects no parameter. The first paths are 'layer_0/kernel'"),
        ("(", "not a regular expression"),
        ({"layer_0": True}, "structure of the parameters"),
        ({"layer_0": 1.0, "layer_1": True}, "layer_0: 1.0"),
    ],
)
def test_bad_masks(trainable, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jzero.shard_train_state(plain_state(), stage=3, trainable=trainable)


@pytest.mark.slow
def test_laid_out_anew_and_whole_again():
    state, step = make_state("trainable", 3), shared.make_train_step(lora_loss)
    state, _ = step(state, batch(0))
    for config in (jzero.ZeroConfig(stage=1), jzero.ZeroConfig(stage=3, persistence_threshold=0)):
        state = jzero.shard_train_state(state, config=config)
    with pytest.raises(ValueError, match="keeps no state"):
        jzero.shard_train_state(state, stage=3, trainable=".*/lora_a")
    state, _ = step(state, batch(1))
    whole = jzero.unshard_train_state(state)
    whole = by_hand(whole, batch(2))  # plain optax goes on
    _, params = plain_run(3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), whole.params, params)


class OwnUpdate(TrainState):
    def apply_gradients(self, **kwargs):
        return super().apply_gradients(**kwargs)


STATES = [(TrainState, 1, "w"), (jzero.TrainState, 3, None), (OwnUpdate, 3, None)]


@pytest.mark.parametrize(("make", "stage", "trainable"), STATES)
def test_random_keys_among_the_parameters_stay_as_they_are(make, stage, trainable):
    """On every device the same keys, not cut although 16 of them could be."""

    def loss_fn(params, batch):
        keep = jax.random.bernoulli(params["keys"][3], 0.5, (D,))
        return jnp.square(batch @ params["w"] * keep[None]).mean()

    params = {"w": jnp.ones((D, D)) / D, "keys": jax.random.split(jax.random.key(7), 16)}
    tx = optax.masked(optax.adamw(1e-2), {"w": True, "keys": False})
    state = make.create(params=params, tx=tx, apply_fn=None)
    state = jzero.shard_train_state(state, config=shared.config(stage), trainable=trainable)
    step = jzero.make_train_step(loss_fn, clip_norm=1.0)
    state, metrics = step(state, batch())
    np.testing.assert_allclose(metrics["loss"], loss_fn(params, batch()), rtol=1e-5)
    if make is jzero.TrainState:
        _, grads = jzero.value_and_grad(loss_fn)(state, batch())
        state = state.apply_gradients(grads=grads)
    assert state.params["keys"].sharding.is_fully_replicated
    assert (jzero.gather_params(state)["keys"] == params["keys"]).all()
    assert not np.allclose(jzero.gather_params(state)["w"], params["w"])


def test_optimizer_state_keeps_its_dtype_outside_of_a_step():
    params = {"w": jnp.ones((D, D), jnp.bfloat16), "table": jnp.arange(D)}
    plain = jzero.TrainState.create(params=params, tx=shared.sgd(0.1, momentum=0.9))
    state = jzero.shard_train_state(plain, stage=2)
    grads = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), params)
    state = jax.jit(lambda state: state.apply_gradients(grads=grads))(state)
    assert [x.dtype for x in jax.tree.leaves(state.opt_state)] == [x.dtype for x in jax.tree.leaves(plain.opt_state)]


@pytest.mark.parametrize("where", ["lora", "kernel"])
def test_an_overflow_of_trained_parameters_alone_skips_an_update(where):
    state = make_state("trainable", 3, "fp16")
    big = lambda path, x: jnp.full(x.shape, jnp.inf if where in str(path[-1]) else 1.0, x.dtype)
    new = state.apply_gradients(grads=jax.tree_util.tree_map_with_path(big, state.params))
    names = [(f"layer_{i}", f"lora_{x}") for i in range(LAYERS) for x in "ab"]
    moved = [(np.asarray(new.params[i][x]) != np.asarray(state.params[i][x])).all() for i, x in names]
    assert moved == [where == "kernel"] * len(names)
