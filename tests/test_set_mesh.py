"""Meshes that the program sets with `jax.set_mesh`: the state's mesh decides, and jax's own kind is taken as it is."""

import contextlib
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import jzero.data
from tests.tiers import slow

EXPLICIT = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Explicit,))
MESHES = {
    "explicit": EXPLICIT,
    "explicit_of_another_shape": jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2),
    "auto_of_another_shape": jzero.make_mesh(a=4, b=2),
    "of_the_state": jzero.make_mesh(),
}
"""What a program may have set. The state is on `jzero.make_mesh()`, or on four devices of it."""

TX = optax.sgd(0.1, momentum=0.9)
TRAINED = {"rtol": 2e-5, "atol": 2e-6}  # another order of summation


def loss_fn(params, x):
    return jnp.square(jnp.tanh(x @ params["w"]) @ params["v"] - 1).mean()


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 2


def make_state(kind=jzero.TrainState.create, **more):
    """A state of odd widths; its arrays have the types of the mesh that is set."""
    return kind(params={"w": jnp.asarray(draw(5, 37)), "v": jnp.asarray(draw(37, 3))}, tx=TX, **more)


def shard(stage=3, mesh=None, **options):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, **options)
    return jzero.shard_train_state(make_state(), config=config, mesh=mesh)


def make_batch():
    """Rows, split over the mesh that is set."""
    x, mesh = draw(16, 5, seed=1), jax.sharding.get_mesh()
    return jnp.asarray(x) if mesh.empty else jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


@pytest.fixture(scope="module")
def want():
    """Loss, new and old parameters of one step of optax on one device, as NumPy arrays."""
    state = make_state()
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(state.params, make_batch())
    old, grads = jax.tree.map(np.asarray, (state.params, grads))
    return {
        "loss": np.asarray(loss),
        "new": {name: w - np.float32(0.1) * grads[name] for name, w in old.items()},
        "old": old,
    }


def near(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TRAINED), got, want)


def trained(state, loss, want):
    """Checks a step; computes with its results as programs do."""
    near(loss * 2 + jnp.ones(()), want["loss"] * 2 + 1)
    near(jzero.gather_params(state), want["new"])


STEP = jzero.make_train_step(loss_fn)
WITH_MICRO_BATCHES = jzero.make_train_step(loss_fn, accumulate_steps=2, clip_norm=1e6)
LOSS_AND_GRADS = jzero.value_and_grad(loss_fn)


def called_step(step, stage, **options):
    def check(want, _):
        state, metrics = step(shard(stage, **options), make_batch())
        trained(state, metrics["loss"], want)

    return check


def own_step(want, _):
    @jax.jit
    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(jzero.natural_params(state), x)
        return state.apply_gradients(grads=grads), loss * 2

    state, loss = step(shard(), make_batch())
    trained(state, loss / 2, want)


def steps_in_jit(want, _):
    @jax.jit
    def step(state, x):
        loss, grads = LOSS_AND_GRADS(state, x)
        new = state.apply_gradients(grads=grads)
        return new, loss * 2, STEP(state, x)[1]["loss"] + 1

    state, loss, again = step(shard(), make_batch())
    near(again - 1, want["loss"])
    trained(state, loss / 2, want)


def gradients_and_metrics(want, _):
    state, x = shard(2), make_batch()
    (loss, rows), grads = jzero.value_and_grad(lambda p, x: (loss_fn(p, x), jzero.PerExample(x[:, 0])), has_aux=True)(
        state, x
    )
    near((loss, rows), (want["loss"], np.asarray(x)[:, 0]))
    near(jzero.make_eval_step(loss_fn)(state, x) + 0, want["loss"])
    trained(state.apply_gradients(grads=grads), loss, want)


def whole_and_back(want, folder):
    state = shard()
    near(jax.tree.map(lambda x: x + 0, jzero.gather_params(state)), want["old"])
    near(jzero.unshard_train_state(state).params["w"] * 1, want["old"]["w"])
    near(jzero.natural_params(state)["v"] - 0, want["old"]["v"])
    doubled = jzero.update_params(state, lambda p: jax.tree.map(lambda x: x * 2, p))
    doubled = jzero.set_full_param(doubled, "v", value=jzero.get_full_param(doubled, "v") / 2)
    doubled = jzero.set_full_opt_state(
        doubled, "w", name="trace", value=1 + jzero.get_full_opt_state(doubled, "w", name="trace")
    )
    doubled = jzero.reload_train_state(jzero.offload_train_state(doubled))
    moved = jzero.shard_train_state(doubled, stage=1, mesh=jzero.make_mesh(devices=jax.devices()[:4]))
    near(jzero.gather_params(moved), {"w": 2 * want["old"]["w"], "v": want["old"]["v"]})
    near(jzero.get_full_opt_state(moved, "w", name="trace"), np.ones((5, 37)))


def saved_and_restored(want, folder):
    state = shard()
    jzero.save_checkpoint(folder / "one", state)
    jzero.export_params(state, folder / "exported")
    with jzero.CheckpointManager(folder / "several") as manager:
        manager.save(state)
        manager.wait()
        near(jzero.gather_params(manager.restore(shard(1))), want["old"])
    near(jzero.gather_params(jzero.restore_checkpoint(folder / "one", shard(2))), want["old"])
    restored = jzero.load_params(shard(1), folder / "exported")
    near(jzero.gather_params(restored), want["old"])


def on_disk(want, folder):
    options = {"offload": jzero.Offload(optimizer="disk", path=str(folder))}
    two = jzero.make_mesh(devices=jax.devices()[:2])  # for each device programs are compiled
    state, metrics = STEP(shard(mesh=two, **options), make_batch())
    trained(jzero.shard_train_state(state, stage=1), np.asarray(metrics["loss"]), want)


def analyzed(want, _):
    state, x = shard(), make_batch()
    jzero.analyze(STEP, state, x).verify()
    assert jzero.estimate_step_memory(STEP, state, x).peak > 0
    assert jzero.fit(lambda key: make_state(), loss_fn, x, topology="h100:8").config.stage >= 0
    jzero.check_equivalence(loss_fn, state, [x]).check()


def born_sharded(want, _):
    def make(key):
        return make_state().replace(extra=jax.random.normal(key, (3,)))

    state = jzero.init_train_state(make, jax.random.key(0), config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    near(jzero.gather_params(state), want["old"])
    assert jzero.plan_train_state(make(jax.random.key(0)), stage=1).num_shards == 8


class Model(nnx.Module):
    def __init__(self):
        self.w, self.v = nnx.Param(jnp.asarray(draw(5, 37))), nnx.Param(jnp.asarray(draw(37, 3)))

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...]) @ self.v[...]


def nnx_model(want, _):
    optimizer = nnx.ModelAndOptimizer(Model(), TX, wrt=nnx.Param)
    sharded = jzero.shard_train_state(optimizer, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    step = jzero.make_train_step(lambda model, x: jnp.square(model(x) - 1).mean())
    sharded, metrics = step(sharded, make_batch())
    near(metrics["loss"] + 0, want["loss"])
    params = jzero.gather_params(sharded)
    near(
        {name: params[name][...] if isinstance(params[name], nnx.Variable) else params[name] for name in "wv"},
        want["new"],
    )


CALLS = {
    "step": called_step(STEP, 3),
    "host_params": called_step(WITH_MICRO_BATCHES, 3, offload=jzero.Offload(optimizer="host", params="host")),
    **{f.__name__: f for f in (own_step, steps_in_jit, gradients_and_metrics, whole_and_back, saved_and_restored)},
    **{f.__name__: f for f in (on_disk, analyzed, born_sharded, nnx_model)},
}


OF_MANY_PARTS = ["host_params", "analyzed"]
FEW = ["own_step", "steps_in_jit", "whole_and_back"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(slow("explicit", call) if call in OF_MANY_PARTS else ("explicit", call) for call in CALLS),
        ("auto_of_another_shape", "steps_in_jit"),
        *(slow(name, call) for name in ("explicit_of_another_shape", "of_the_state") for call in FEW),
    ],
)
def test_calls(name, call, want, tmp_path):
    with jax.set_mesh(MESHES[name]):
        CALLS[call](want, pathlib.Path(tmp_path))


def test_meshes_of_jax_have_zeros_axes_as_auto():
    """`jax.make_mesh` makes Explicit axes by default: those of ZeRO are Auto, others stay."""
    mesh = jax.make_mesh((2, 2, 2), ("replica", "node", "shard"), axis_types=(AxisType.Explicit,) * 3)
    axes = {"axis": "shard", "node_axis": "node", "replica_axis": "replica"}
    options = {"config": jzero.ZeroConfig(stage=3, persistence_threshold=0, **axes), "mesh": mesh}
    with jax.set_mesh(mesh):
        rows = [{"x": row} for row in draw(16, 5, seed=1)]
        x = next(iter(jzero.data.make_loader(rows, batch_size=16, mesh=mesh, **axes)))["x"]
        assert jax.typeof(x * 1).sharding.spec == P(("replica", "node", "shard"), None)
        state = jzero.shard_train_state(make_state(), **options)
        plans = [
            jzero.plan_of(state),
            jzero.plan_train_state(make_state(), **options),
            jzero.plan_of(jzero.abstract_train_state(make_state(), **options)),
            jzero.plan_of(jzero.init_train_state(lambda key: make_state(), jax.random.key(0), **options)),
        ]
        assert all(plan.mesh.axis_types == (AxisType.Auto,) * 3 for plan in plans)
        jaxpr = STEP.trace(state, x).jaxpr
        assert all(f"'{axis}'" in str(jaxpr) for axis in axes.values()), "they are manual where gradients are summed"


def test_losses_close_over_no_array_of_another_mesh():
    with jax.set_mesh(EXPLICIT):
        scale = jnp.ones((5,))
    scaled = lambda params, x: loss_fn(params, x * scale[None])
    step = jzero.make_train_step(scaled)
    for mesh in (contextlib.nullcontext(), jax.set_mesh(EXPLICIT)):
        with mesh, pytest.raises(ValueError, match=r"closes over an array of another mesh.*np.asarray\(x\)"):
            step(shard(), make_batch())


def test_updates_are_added_by_others_only_on_the_mesh_that_is_set(want):
    """Flax adds an update to the parameters itself, which jax refuses on another mesh."""
    state = jzero.shard_train_state(make_state(TrainState.create, apply_fn=None), stage=1)

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss_fn)(jzero.natural_params(state), x))

    with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match=r"'batch'.*'data'.*jax.set_mesh\(jzero.plan_of"):
        step(state, make_batch())
    with jax.set_mesh(jzero.plan_of(state).mesh):
        near(jzero.gather_params(step(state, make_batch())), want["new"])


def test_every_public_function_of_a_state_sets_its_mesh():
    functions = {name: fn for name in jzero.__all__ if inspect.isfunction(fn := getattr(jzero, name))}
    takes_state = [name for name, fn in functions.items() if {"state", "like"} & set(inspect.signature(fn).parameters)]
    assert len(takes_state) > 20
    assert not [name for name in takes_state if not jzero._HOME[name].startswith(jzero._ROOMS_OF_STATES)]
