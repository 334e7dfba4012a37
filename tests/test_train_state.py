"""Sharding, initialising, gathering and editing train states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState

import jzero
from jzero.core.state.init import lower_init
from tests import models, shared


class RichState(TrainState):
    """A user's own subclass."""

    batch_stats: Any
    ema: Any
    dropout_key: jax.Array


def _rich_state():
    params = models.mlp_params(sizes=models.TWO_LAYERS)
    return RichState.create(
        apply_fn=None,
        params=params,
        tx=shared.adamw(1e-3),
        batch_stats={"mean": jnp.arange(37.0)},
        ema=jax.tree.map(lambda x: x + 1, params),
        dropout_key=jax.random.key(3),
    )


def _bits(tree):
    as_bits = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: np.asarray(as_bits(jnp.asarray(x))), tree)


def _assert_same_values(a, b):
    for x, y in zip(jax.tree.leaves(_bits(a)), jax.tree.leaves(_bits(b)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("stage", "num_devices"), [(0, 1), (1, 3), (2, 7), (3, 8)])
@pytest.mark.filterwarnings("ignore:The mesh has one device")
def test_sharding_and_back_changes_no_bit(stage, num_devices):
    state = _rich_state()
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices])
    sharded = jzero.shard_train_state(state, config=shared.config(stage), mesh=mesh)
    assert type(sharded) is RichState
    for x in jax.tree.leaves(sharded):
        assert isinstance(x, jax.Array)
        assert x.committed
        assert not getattr(x, "weak_type", False)  # keys have none
        assert x.sharding.device_set == set(mesh.devices.flat)
    whole = jzero.unshard_train_state(sharded)
    assert whole.tx is state.tx
    _assert_same_values(whole, state.replace(step=jnp.int32(0)))


@pytest.mark.smoke
def test_stage_3_stores_shards_of_everything_that_follows_a_parameter():
    sharded = jzero.shard_train_state(_rich_state(), config=shared.config(3))
    plan = jzero.plan_of(sharded)
    kernel = sharded.params["layer_0"]["kernel"]
    assert (kernel.shape, jax.tree.leaves(kernel)[0].shape) == ((37, 127), (37, 128))
    assert plan.padding["layer_0"]["kernel"] == 37
    for x in (kernel, sharded.opt_state[0].mu["layer_0"]["kernel"], sharded.ema["layer_0"]["kernel"]):
        assert x.addressable_shards[0].data.shape == (37, 16)
    assert sharded.batch_stats["mean"].sharding.is_fully_replicated
    assert any(leaf.path == "batch_stats/mean" for leaf in plan.replicated)
    whole = jzero.shard_train_state(_rich_state(), config=shared.config(2))
    assert jax.tree.map(jnp.shape, whole.params) == jax.tree.map(jnp.shape, _rich_state().params), "not padded"


def test_a_sharded_state_keeps_its_configuration_on_another_mesh():
    config = shared.config(3, precision="bf16")
    sharded = jzero.shard_train_state(_rich_state(), config=config)
    mesh = jzero.make_mesh(devices=jax.devices()[:4])
    moved = jzero.shard_train_state(sharded, mesh=mesh)
    assert jzero.plan_of(moved).config == config
    assert jzero.plan_of(moved).mesh == mesh
    _assert_same_values(jzero.unshard_train_state(moved), jzero.unshard_train_state(sharded))
    assert jzero.plan_train_state(sharded, mesh=mesh) == jzero.plan_of(moved)
    assert jzero.plan_of(jzero.abstract_train_state(sharded, mesh=mesh)) == jzero.plan_of(moved)
    with pytest.raises(ValueError, match="Say what to partition"):
        jzero.shard_train_state(_rich_state(), mesh=mesh)


def test_result_shares_no_buffer_with_the_input():
    state = _rich_state()
    arrays = lambda state: jax.tree.leaves((state.params, state.opt_state, state.ema))
    pointers = lambda x: {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    taken = set().union(*map(pointers, arrays(state)))
    for stage in (0, 3):
        sharded = jzero.shard_train_state(state, config=shared.config(stage))
        assert not any(taken & pointers(x) for x in arrays(sharded))
    again = jzero.shard_train_state(sharded, config=shared.config(3))
    assert not any(pointers(x) & pointers(y) for x, y in zip(arrays(sharded), arrays(again), strict=True))
    jax.jit(lambda params: jax.tree.map(lambda x: 2 * x, params), donate_argnums=0)(again.params)
    _assert_same_values(jzero.unshard_train_state(sharded).params, state.params)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_program_may_reuse_the_memory_of_what_was_placed(make, stage):
    """The runtime takes large arrays of the host as they are, and could not give them away."""
    params = {"w": make(np.ones((8 * 128, 257), np.float32))}
    state = jzero.TrainState.create(params=params, tx=shared.sgd(0.1)).replace(params=params)
    placed = jzero.shard_train_state(state, stage).params["w"]
    pointers = lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    before = pointers(placed)
    assert pointers(jax.jit(lambda x: x + 1, donate_argnums=0)(placed)) == before


def test_donation_frees_every_input_leaf():
    state = _rich_state()
    state = state.replace(ema=state.params)  # the same arrays twice: freed after the second use
    want = _bits(state)
    sharded = jzero.shard_train_state(state, config=shared.config(3), donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state, state.batch_stats)))
    _assert_same_values(jzero.unshard_train_state(sharded).params, want.params)


@pytest.mark.parametrize(("before", "after"), [((1, 5), (3, 8)), ((3, 7), (3, 5))])
def test_sharding_again_lays_out_anew(before, after):
    mesh = lambda n: jzero.make_mesh(devices=jax.devices()[:n])
    plain = _rich_state()
    moments = jax.tree.map(lambda x, m: x + m, (plain.params, plain.ema), plain.opt_state[0][1:])
    plain = plain.replace(opt_state=(plain.opt_state[0]._replace(mu=moments[0], nu=moments[1]), *plain.opt_state[1:]))
    state = jzero.shard_train_state(plain, config=shared.config(before[0]), mesh=mesh(before[1]))
    again = jzero.shard_train_state(state, config=shared.config(after[0]), mesh=mesh(after[1]))
    fresh = jzero.shard_train_state(_rich_state(), config=shared.config(after[0]), mesh=mesh(after[1]))
    assert jzero.plan_of(again).leaves == jzero.plan_of(fresh).leaves
    assert [x.sharding for x in jax.tree.leaves(again)] == [x.sharding for x in jax.tree.leaves(fresh)]
    _assert_same_values(jzero.unshard_train_state(again), plain.replace(step=jnp.int32(0)))


def test_born_sharded_equals_sharded_after():
    """And at birth no device holds more than its shards and one leaf, as the compiler says."""
    tx, draw = optax.adam(1e-3), nn.initializers.normal(0.1)

    @jax.jit
    def make_state(key):
        first, *keys = jax.random.split(key, 4)
        stack = jax.vmap(lambda key: draw(key, (37, 61)))(jnp.stack(keys))
        params = {"layers": [draw(first, (509, 61))], "stack": stack, "bias": jnp.zeros(37)}
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    born = jzero.init_train_state(make_state, jax.random.key(0), config=shared.config(3))
    sharded = jzero.shard_train_state(make_state(jax.random.key(0)), config=shared.config(3))
    plan = jzero.plan_of(born)
    assert plan == jzero.plan_of(sharded)
    # The initialisers end in a scaling, which the compiler fuses otherwise when it sees one device: two ulp of 0.3.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=6e-8), _bits(born.params), _bits(sharded.params)
    )
    for x, y in zip(jax.tree.leaves(born), jax.tree.leaves(sharded), strict=True):
        assert (x.aval, x.sharding) == (y.aval, y.sharding)
    (program,), *_ = lower_init(make_state, jax.random.key(0), shared.config(3), jzero.make_mesh())
    memory = program.compile().memory_analysis()
    shards = plan.bytes_per_device.params + plan.bytes_per_device.opt_state
    assert memory.output_size_in_bytes <= shards * 1.01 + 4096
    assert memory.temp_size_in_bytes <= max(4 * leaf.param.size for leaf in plan.leaves)


def test_float64_of_numpy_is_trained_as_jax_would_have_it():
    params = {"w": np.linspace(-1, 1, 64 * 64).reshape(64, 64)}
    assert params["w"].dtype == np.float64
    state = shared.sharded(params, shared.sgd(0.1, momentum=0.9), 3)
    assert jzero.plan_of(state).leaves[0].param.dtype == state.params["w"].dtype == np.float32
    loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
    batch = np.ones((8, 64), np.float32)
    state, _ = jzero.make_train_step(loss_fn)(state, batch)
    want = params["w"] - 0.1 * np.outer(np.ones(64), params["w"].sum(0)) / 32
    np.testing.assert_allclose(jzero.gather_params(state)["w"], want, rtol=1e-6, atol=1e-6)


def test_fp8_scales_that_flax_overwrites_with_their_gradients_are_refused():
    """Their mean over devices would be silently too small: a history of the largest values needs the maximum."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, dot_general_cls=Fp8DirectDotGeneralOp)(x)

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 4)))
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=model.apply, params=p, tx=shared.sgd(0.1)), params)
    with pytest.raises(ValueError, match="_overwrite_with_gradient"):
        jzero.plan_train_state(state, stage=1)


TX = optax.adam(1e-2)
CONFIG = jzero.ZeroConfig(stage=3, persistence_threshold=0)


def make_state(key):
    """Draws three large arrays."""
    names = ("embed", "w", "lora_a")
    params = {name: jax.random.normal(k, (61, 36)) for name, k in zip(names, jax.random.split(key, 3), strict=True)}
    return jzero.TrainState.create(params=params, tx=TX, extra={"copy": params["w"], "key": key})


def num_draws(make, **options):
    """Random numbers that the lowered programs draw."""
    programs, *_ = lower_init(make, jax.random.key(0), CONFIG, jzero.make_mesh(), **options)
    return sum(program.as_text().count("call @_normal") for program in programs)


@pytest.mark.smoke
def test_what_matches_is_zero_and_not_drawn():
    """What is made of it is made of zeros; the rest is as without."""
    plain = jax.jit(make_state)(jax.random.key(0))
    born = jzero.unshard_train_state(
        jzero.init_train_state(make_state, jax.random.key(0), config=CONFIG, zeros=r"(?!.*lora_a).*")
    )
    for name in ("embed", "w"):
        assert not np.any(born.params[name])
    assert not np.any(born.extra["copy"])
    np.testing.assert_allclose(born.params["lora_a"], plain.params["lora_a"], rtol=0, atol=6e-7)
    everything, one, none = (
        num_draws(make_state),
        num_draws(make_state, zeros=r"(?!.*lora_a).*"),
        num_draws(make_state, zeros=".*"),
    )
    assert everything > one > none == 0


def test_integers_of_zeros_are_made_by_the_program():
    """And not while it is compiled, where rounding 100M elements took 90 seconds."""
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, quantization=jzero.Quantization(frozen="int8"))
    options = {"trainable": "lora_a", "zeros": "embed|w"}
    programs, *_ = lower_init(make_state, jax.random.key(0), config, jzero.make_mesh(), **options)
    assert any("round-nearest-even" in program.compile().as_text() for program in programs)


def test_shared_arrays():
    """One array of two names is zero only if both match."""

    def tied(key):
        w = jax.random.normal(key, (61, 36))
        return jzero.TrainState.create(params={"a": w, "b": w}, tx=shared.sgd(0.1))

    for zeros, is_drawn in (("a", True), ("a|b", False)):
        born = jzero.init_train_state(tied, jax.random.key(0), config=CONFIG, zeros=zeros)
        assert np.any(born.params["b"]) == is_drawn


def test_what_matches_nothing():
    with pytest.raises(ValueError, match="`zeros` 'W' matches no"):
        jzero.init_train_state(make_state, jax.random.key(0), config=CONFIG, zeros="W")
    with pytest.raises(ValueError, match=r"`zeros` must be .*'\('"):
        jzero.init_train_state(make_state, jax.random.key(0), config=CONFIG, zeros="(")
