"""Single parameters, gradients and optimizer leaves by path, against values that were not made by jzero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from tests import models, shared
from tests.drawn import initializer
from tests.tiers import slow

BF16 = jnp.bfloat16
KERNEL = "layer_0/kernel"  # (37, 127), which eight divides nowhere
ROWS = 16
MOMENTS = jzero.Precision(compute_dtype="bfloat16", state_dtype="bfloat16")
MASTERS = jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16")


def make_config(stage, precision="fp32", **options):
    return jzero.ZeroConfig(stage=stage, precision=precision, **{"persistence_threshold": 0, **options})


def make_params():
    return models.mlp_params(sizes=models.TWO_LAYERS)


ADAM = optax.adam(1e-3, eps=1e-6)
STEP = jzero.make_train_step(models.mlp_loss)
"""One step for all tests: of states with equal plans and one optimizer it compiles one program."""


def sharded(config, tx=ADAM, cls=TrainState, params=None, **options):
    plain = cls.create(apply_fn=None, params=params or make_params(), tx=tx)
    return jzero.shard_train_state(plain, config=config, **options)


def one_kernel():
    """For optimizers whose update takes long to compile."""
    return {"layer_0": {"kernel": make_params()["layer_0"]["kernel"]}}


def one_kernel_loss(params, batch):
    return jnp.square(jnp.tanh(batch["x"] @ params["layer_0"]["kernel"])).mean()


ONE_KERNEL_STEP = jzero.make_train_step(one_kernel_loss)


def train(state, num_steps=2):
    for seed in range(num_steps):
        state, _ = STEP(state, models.mlp_batch(ROWS, seed))
    return state


@functools.cache
def plain_adam(compute_dtype):
    """Returns parameters and Adam's state after training on one device, with fp32 masters."""
    loss = lambda masters, batch: models.mlp_loss(jax.tree.map(lambda x: x.astype(compute_dtype), masters), batch)
    found = shared.by_optax(loss, make_params(), ADAM, [models.mlp_batch(ROWS, seed) for seed in range(2)])
    return found.params, found.opt_state[0]


plain_gradient = jax.jit(jax.grad(models.mlp_loss))


def assert_whole(x, dtype=jnp.float32, shape=(37, 127)):
    assert isinstance(x, jax.Array)
    assert (x.shape, x.dtype) == (shape, dtype)
    assert x.sharding.is_fully_replicated
    assert len(x.sharding.device_set) == 8


def assert_near(a, b, tolerance):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def assert_same_layout(a, b):
    assert [(x.aval, x.sharding) for x in jax.tree.leaves(a)] == [(x.aval, x.sharding) for x in jax.tree.leaves(b)]


@pytest.mark.smoke
@pytest.mark.parametrize(("stage", "precision"), [(3, MOMENTS), slow(0, "fp32"), slow(2, "bf16")])
def test_parameters_and_moments_are_those_of_one_device(stage, precision):
    state = sharded(make_config(stage, precision), cls=jzero.TrainState if stage == 3 else TrainState)
    start = make_params()
    np.testing.assert_array_equal(jzero.get_full_param(state, KERNEL), start["layer_0"]["kernel"])
    assert not np.any(jzero.get_full_opt_state(state, KERNEL, name="mu"))
    state = train(state)
    params, adam = plain_adam(jnp.float32 if precision == "fp32" else BF16)
    tolerance = {"fp32": 1e-5, "bf16": 1e-2, MOMENTS: 2e-2}[precision]
    for layer, kind in (("layer_0", "kernel"), ("layer_1", "bias")):
        of = lambda tree, layer=layer, kind=kind: tree[layer][kind]
        path, shape = f"{layer}/{kind}", of(start).shape
        found = jzero.get_full_param(state, path)
        assert_whole(found, shape=shape)
        assert_near(found - of(start), of(params) - of(start), 10 * tolerance)
        for name, alias, tree in (("mu", "exp_avg", adam.mu), ("nu", "exp_avg_sq", adam.nu)):
            found = jzero.get_full_opt_state(state, path, name=name)
            assert_whole(found, shape=shape)  # in float32 also where 16 bits are stored
            assert_near(found, of(tree), tolerance)
            np.testing.assert_array_equal(jzero.get_full_opt_state(state, path, name=alias), found)
    edited = jzero.set_full_opt_state(state, KERNEL, name="mu", value=jnp.full((37, 127), 64.0))
    np.testing.assert_array_equal(jzero.get_full_opt_state(edited, KERNEL, name="mu"), np.full((37, 127), 64.0))
    assert_same_layout(edited, state)
    assert_near(jzero.get_full_opt_state(state, KERNEL, name="mu"), adam.mu["layer_0"]["kernel"], tolerance)
    others = [jzero.get_full_opt_state(x, "layer_1/kernel", name="mu") for x in (edited, state)]
    np.testing.assert_array_equal(*others)


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "bf16")])
def test_gradient_is_that_of_one_device(stage, precision):
    state = sharded(make_config(stage, precision))
    _, grads = jzero.value_and_grad(models.mlp_loss)(state, models.mlp_batch(ROWS))
    dtype = jnp.float32 if precision == "fp32" else BF16
    params = jax.tree.map(lambda x: x.astype(dtype), make_params())
    want = plain_gradient(params, models.mlp_batch(ROWS))
    for layer, kind in (("layer_0", "kernel"), ("layer_1", "bias")):
        found = jzero.get_full_grad(state, f"{layer}/{kind}", grads=grads)
        assert_whole(found, shape=want[layer][kind].shape)
        assert_near(found, want[layer][kind], 1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), slow(3, "fp32"), slow(3, MASTERS)])
def test_a_parameter_that_was_set_is_trained_on(stage, precision):
    """A master keeps the bits that its parameter loses: they are more than a step moves it by."""
    state = sharded(make_config(stage, precision), tx=optax.sgd(0.5))
    value = np.random.default_rng(5).normal(size=(37, 127))  # float64, cast to the dtype of the master
    edited = jzero.set_full_param(state, KERNEL, value=value)
    kept = value.astype(np.float32).astype(BF16 if precision == MASTERS else np.float32)
    np.testing.assert_array_equal(jzero.get_full_param(edited, KERNEL), kept)
    np.testing.assert_array_equal(
        jzero.get_full_param(state, KERNEL), make_params()["layer_0"]["kernel"].astype(kept.dtype)
    )
    assert_same_layout(edited, state)
    params = make_params()
    params["layer_0"]["kernel"] = jnp.asarray(kept)
    seen = jax.tree.map(lambda x: x.astype(jnp.float32 if precision == "fp32" else BF16), params)
    loss, grads = jax.jit(jax.value_and_grad(models.mlp_loss))(seen, models.mlp_batch(ROWS))
    new, metrics = STEP(edited, models.mlp_batch(ROWS))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5 if precision == "fp32" else 1e-2)
    moved = jzero.get_full_param(new, KERNEL).astype(jnp.float32) - kept.astype(np.float32)
    if precision != MASTERS:  # where the steps are lost in rounding
        assert_near(moved, -0.5 * grads["layer_0"]["kernel"].astype(jnp.float32), 1e-3 if precision == "fp32" else 2e-2)


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(37, 61, kernel_init=initializer(0), rngs=nnx.Rngs(0))
        self.b = nnx.Linear(61, 11, kernel_init=initializer(1), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def nnx_loss(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def test_a_parameter_that_is_not_trained():
    state = sharded(make_config(2, "bf16"), trainable="layer_1/.*")
    _, grads = jzero.value_and_grad(models.mlp_loss)(state, models.mlp_batch(ROWS))
    assert_whole(jzero.get_full_param(state, KERNEL))
    assert_whole(jzero.get_full_grad(state, "layer_1/bias", grads=grads), shape=(11,))
    assert not np.any(jzero.get_full_opt_state(state, "layer_1/bias", name="mu"))
    with pytest.raises(ValueError, match=r"layer_0/kernel' .* no gradient\."):
        jzero.get_full_grad(state, KERNEL, grads=grads)
    with pytest.raises(ValueError, match="nothing for 'layer_0/kernel', "):
        jzero.get_full_opt_state(state, KERNEL, name="mu")


def test_a_parameter_that_no_optimizer_knows():
    """A frozen NNX parameter lies beside `params`; its path in the plan begins with the field."""
    model = Model()
    is_trained = lambda path, x: isinstance(x, nnx.Param) and path[0] == "b"
    state = (model, nnx.Optimizer(model, optax.adam(1e-3), wrt=is_trained))
    state = jzero.shard_train_state(state, config=make_config(3))
    path = "frozen/a/kernel"
    kept = np.asarray(model.a.kernel[...])
    assert_whole(jzero.get_full_param(state, path), shape=(37, 61))
    np.testing.assert_array_equal(jzero.get_full_param(state, path), kept)
    edited = jzero.set_full_param(state, path, value=np.full((37, 61), 0.5))
    np.testing.assert_array_equal(jzero.get_full_param(edited, "a/kernel"), np.full((37, 61), 0.5))
    np.testing.assert_array_equal(jzero.get_full_param(state, path), kept)
    np.testing.assert_array_equal(jzero.get_full_param(edited, "b/kernel"), model.b.kernel[...])
    assert edited[0].a.kernel.sharding == state[0].a.kernel.sharding
    with pytest.raises(ValueError, match=r"a/kernel' .* no optimizer state"):
        jzero.get_full_opt_state(state, path, name="mu")
    with pytest.raises(ValueError, match=r"\(3,\), .*/kernel' .*\(37, 61\)"):
        jzero.set_full_param(state, path, value=np.zeros(3))
    batch = models.mlp_batch(ROWS)
    graphdef, variables = nnx.split(model)
    variables["a"]["kernel"][...] = jnp.full((37, 61), 0.5)
    want = jax.jit(lambda x: nnx_loss(nnx.merge(graphdef, x), batch))(variables)
    _, metrics = jzero.make_train_step(nnx_loss)(edited, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


def test_names_of_nested_chains():
    """A whole name goes before the end of another; of two ends none is chosen."""
    tx = optax.chain(optax.chain(optax.identity(), optax.trace(0.9)), optax.trace(0.3), optax.scale_by_adam())
    state, _ = ONE_KERNEL_STEP(sharded(make_config(3), tx=tx, params=one_kernel()), models.mlp_batch(ROWS))
    get = functools.partial(jzero.get_full_opt_state, path=KERNEL)
    with pytest.raises(ValueError, match=r"several .*\['0/1/trace', '1/trace'\]"):
        get(state, name="trace")
    names = {"0/1/trace": state.opt_state[0][1].trace, "1/trace": state.opt_state[1].trace}
    names |= {"2/exp_avg": state.opt_state[2].mu, "mu": state.opt_state[2].mu}
    for name, kept in names.items():
        np.testing.assert_array_equal(get(state, name=name), shared.whole(kept)["layer_0"]["kernel"])
    edited = jzero.set_full_opt_state(state, KERNEL, name="1/trace", value=np.ones((37, 127)))
    np.testing.assert_array_equal(get(edited, name="1/trace"), np.ones((37, 127)))
    np.testing.assert_array_equal(get(edited, name="0/1/trace"), get(state, name="0/1/trace"))


def test_leaves_of_another_shape_and_of_wrapped_optimizers():
    tx = optax.MultiSteps(optax.adafactor(1e-2, min_dim_size_to_factor=32), 2)
    state = sharded(make_config(3), tx=tx, params=one_kernel())
    batch = models.mlp_batch(ROWS)
    state, _ = ONE_KERNEL_STEP(state, batch)
    want = jax.jit(jax.grad(one_kernel_loss))(one_kernel(), batch)["layer_0"]["kernel"]
    assert_near(jzero.get_full_opt_state(state, KERNEL, name="acc_grads"), want, 1e-5)
    assert jzero.get_full_opt_state(state, KERNEL, name="v_row").shape == (37,)
    assert not np.any(jzero.get_full_opt_state(state, KERNEL, name="v_row"))
    state, _ = ONE_KERNEL_STEP(state, batch)
    assert np.all(jzero.get_full_opt_state(state, KERNEL, name="v_row") > 0)


def test_errors_name_what_there_is():
    state = sharded(make_config(3))
    _, grads = jzero.value_and_grad(models.mlp_loss)(state, models.mlp_batch(ROWS))
    calls = [
        lambda path: jzero.get_full_param(state, path),
        lambda path: jzero.set_full_param(state, path, value=0.0),
        lambda path: jzero.get_full_opt_state(state, path, name="mu"),
        lambda path: jzero.set_full_opt_state(state, path, name="mu", value=0.0),
        lambda path: jzero.get_full_grad(state, path, grads=grads),
    ]
    for call in calls:
        near = r"`path` 'layer_0/kernal' names no parameter: .* whole key path\. The nearest are \['layer_0/kernel', "
        with pytest.raises(ValueError, match=near):
            call("layer_0/kernal")
        with pytest.raises(ValueError, match=r"names no .*'layer_0/bias', "):
            call("?")
        with pytest.raises(ValueError, match=r"names no parameter"):
            call("layer_./kernel")  # no regular expression
    unknown = r"The optimizer keeps no 'trace' for 'layer_0/kernel': it has \['0/mu', '0/nu'\]\."
    for call in (jzero.get_full_opt_state, lambda *args, **kw: jzero.set_full_opt_state(*args, **kw, value=0.0)):
        with pytest.raises(ValueError, match=unknown):
            call(state, KERNEL, name="trace")
    shapes = r"`value` has shape \(37, 128\), but {} has shape \(37, 127\)\."  # not the stored shape either
    with pytest.raises(ValueError, match=shapes.format("'layer_0/kernel'")):
        jzero.set_full_param(state, KERNEL, value=np.zeros((37, 128)))
    with pytest.raises(ValueError, match=shapes.format("'0/mu/layer_0/kernel'")):
        jzero.set_full_opt_state(state, KERNEL, name="mu", value=np.zeros((37, 128)))
    with pytest.raises(ValueError, match=r"1 leaves, .* 4 parameters"):
        jzero.get_full_grad(state, KERNEL, grads=grads["layer_0"]["kernel"])
    natural = plain_gradient(make_params(), models.mlp_batch(ROWS))
    with pytest.raises(ValueError, match=r"\(37, 127\), .*\(37, 128\)"):
        jzero.get_full_grad(state, KERNEL, grads=natural)


def test_states_that_cannot_be_looked_at():
    plain = TrainState.create(apply_fn=None, params=make_params(), tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"nothing for 'layer_0/kernel'\."):
        jzero.get_full_opt_state(jzero.shard_train_state(plain, stage=1), KERNEL, name="trace")
    with pytest.raises(TypeError, match="shard"):
        jzero.get_full_param(plain, KERNEL)
    state = sharded(make_config(3, MOMENTS), cls=jzero.TrainState)
    train(state, 1)
    for call in (
        lambda: jzero.get_full_param(state, KERNEL),
        lambda: jzero.set_full_param(state, KERNEL, value=np.zeros((37, 127))),
        lambda: jzero.get_full_opt_state(state, KERNEL, name="mu"),
        lambda: jzero.set_full_opt_state(state, KERNEL, name="mu", value=np.zeros((37, 127))),
    ):
        with pytest.raises(RuntimeError, match="This state was consumed"):
            call()
