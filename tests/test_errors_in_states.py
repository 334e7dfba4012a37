"""States that are refused, and states that a step has consumed."""

import dataclasses
import gc
import pathlib
import subprocess
import sys
import weakref

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state

import jzero
from tests.error_cases import BATCH, leaves_intact, loss_fn, plain_state, raises, sharded_state

ROOT = pathlib.Path(__file__).parents[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithStats(jzero.TrainState):
    stats: object = None


# States.


class StateWithName(flax_train_state.TrainState):
    extra: dict


@pytest.mark.smoke
@pytest.mark.parametrize("call", [jzero.shard_train_state, jzero.plan_train_state])
def test_leaves_that_are_no_arrays_are_all_listed(call):
    extra = {"name": "first run", "fn": len, "objects": np.array([object()]), "count": 3, "scale": np.float32(2)}
    state = StateWithName.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1), extra=extra)
    with raises(TypeError, "extra/name: str", "first run", "extra/fn: builtin", "extra/objects", "pytree_node=False"):
        call(state, stage=1)
    layer = {"w": jnp.ones((8, 8)), "activation": jnp.tanh, "name": np.array(["dense"])}
    with raises(TypeError, "params/activation: ", "params/name: ndarray", "eqx.partition"):
        call(jzero.TrainState(step=0, params=layer, opt_state=(), tx=optax.sgd(0.1)), stage=1)
    with pytest.raises(TypeError) as caught:
        call(state, stage=1)
    assert "extra/count" not in str(caught.value), "numbers are fine"
    assert "extra/scale" not in str(caught.value)


def test_static_fields_are_no_leaves():
    class Named(flax_train_state.TrainState):
        name: str = flax.struct.field(pytree_node=False)

    state = Named.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1), name="first run")
    assert jzero.shard_train_state(state, stage=3).name == "first run"


def test_tx_must_be_an_optimizer():
    with pytest.raises(TypeError, match=r"`tx` .*got NoneType.*set_to_zero"):
        jzero.TrainState.create(params={"w": jnp.ones((4, 4))}, tx=None)
    fields = {"step": 0, "apply_fn": None, "params": {"w": jnp.ones((8, 8))}, "tx": optax.sgd(0.1), "opt_state": None}
    for missing, pattern in (("tx", "`tx` .*set_to_zero"), ("params", "`params` .*None"), ("step", "`step=0`")):
        state = flax_train_state.TrainState(**{**fields, missing: None})
        with pytest.raises(TypeError, match=pattern):
            jzero.shard_train_state(state, stage=1)
        with pytest.raises(TypeError, match=pattern):
            jzero.init_train_state(lambda _, state=state: state, jax.random.key(0), stage=1)


def test_a_name_that_is_not_there_hints_at_the_nearest():
    with pytest.raises(AttributeError, match="mean 'shard_train_state'"):
        jzero.shard_state  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        jzero.xyzzy  # noqa: B018


def test_opt_state_must_belong_to_params():
    state = plain_state()
    other = {"dense": {"w": jnp.ones((32, 25)), "c": jnp.ones(24)}}
    state = state.replace(opt_state=state.tx.init(other))
    parts = ("0/mu/dense/w: shape (32, 25), but (32, 24)", "0/nu/dense/b: missing", "0/mu/dense/c: shape (24,)")
    with raises(ValueError, "`opt_state` does not belong to `params`", *parts, "tx.init(params)"):
        jzero.shard_train_state(state, stage=1)


def test_opt_state_must_be_of_the_optimizer():
    state = plain_state().replace(tx=optax.sgd(0.1, momentum=0.9))
    with raises(ValueError, "0/trace/dense/w: missing", "0/mu/dense/w", "tx.init(params)"):
        jzero.plan_train_state(state, stage=1)


def test_abstract_leaves_cannot_be_placed():
    state = jax.eval_shape(plain_state)
    with raises(TypeError, "params/dense/w", "plan_train_state", "init_train_state"):
        jzero.shard_train_state(state, stage=3)
    mixed = plain_state().replace(step=jax.ShapeDtypeStruct((), jnp.int32))
    with raises(TypeError, "['step']"):
        jzero.shard_train_state(mixed, stage=3)
    with raises(TypeError, "outside `jit`"):
        jax.jit(lambda s: jzero.shard_train_state(s, stage=3).params)(plain_state())


@pytest.mark.parametrize(
    "call",
    [
        jzero.gather_params,
        jzero.unshard_train_state,
        jzero.offload_train_state,
        lambda state: jzero.save_checkpoint("nowhere", state),
        lambda state: jzero.make_train_step(loss_fn)(state, BATCH),
        lambda state: jzero.make_eval_step(loss_fn)(state, BATCH),
    ],
    ids="gather unshard offload save train eval".split(),
)
def test_abstract_states_have_no_values_to_work_on(call):
    with raises(TypeError, "shapes but no values", "jzero.init_train_state", "restore_checkpoint"):
        call(jzero.abstract_train_state(plain_state(), stage=3))


def test_abstract_meshes_hold_no_arrays():
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    with raises(TypeError, "no devices", "jzero.make_mesh()"):
        jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)
    with raises(TypeError, "no devices", "jzero.make_mesh()"):
        jzero.init_train_state(lambda key: plain_state(), jax.random.key(0), stage=3, mesh=mesh)


def test_a_program_for_an_abstract_mesh_needs_the_name_of_a_platform():
    state = jzero.abstract_train_state(plain_state(), stage=3, mesh=jax.sharding.AbstractMesh((8,), ("data",)))
    step = jzero.make_train_step(loss_fn)
    with raises(TypeError, "`AbstractMesh`", "lowering_platforms=('tpu',)", "jzero.make_mesh()"):
        step.lower(state, BATCH)
    assert "num_partitions = 8" in step.trace(state, BATCH).lower(lowering_platforms=("tpu",)).as_text()
    assert jzero.estimate_step_memory(step, state, BATCH).peak > 0


def test_abstract_meshes_may_have_explicit_axes():
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    state = jzero.abstract_train_state(plain_state(), stage=3, mesh=mesh)
    assert jzero.estimate_step_memory(jzero.make_train_step(loss_fn), state, BATCH).peak > 0


def test_fields_of_the_configuration_are_sent_where_they_go():
    with raises(TypeError, "`config=jzero.ZeroConfig(stage=..., precision='bf16')` to `shard_train_state`"):
        jzero.shard_train_state(plain_state(), stage=3, precision="bf16")
    with raises(TypeError, "`config=jzero.ZeroConfig(stage=..., offload=...)` to `shard_train_state`"):
        jzero.make_train_step(loss_fn, offload=jzero.Offload(optimizer="host"))
    with raises(TypeError, "passed by name, `config=...`"):
        jzero.shard_train_state(plain_state(), jzero.ZeroConfig(stage=3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'precisoin'"):
        jzero.shard_train_state(plain_state(), stage=3, precisoin="bf16")


@pytest.mark.parametrize("state", [{"w": np.ones(3)}, (1, 2), None], ids=["dict", "tuple", "None"])
def test_other_objects_are_no_states(state):
    with raises(TypeError, type(state).__name__, "jzero.TrainState.create(params=..., tx=...)"):
        jzero.shard_train_state(state, stage=3)


@pytest.mark.parametrize(
    "call",
    [
        lambda state: jzero.make_train_step(loss_fn)(state, BATCH),
        lambda state: jzero.make_eval_step(loss_fn)(state, BATCH),
        lambda state: jzero.value_and_grad(loss_fn)(state, BATCH),
        lambda state: jzero.make_train_step(loss_fn).lower(state, BATCH),
        jzero.plan_of,
        jzero.gather_params,
        jzero.natural_params,
        jzero.unshard_train_state,
        lambda state: jzero.update_params(state, lambda p: p),
    ],
    ids="train_step eval_step value_and_grad lower plan_of gather_params natural_params unshard update_params".split(),
)
def test_unsharded_state_is_refused(call):
    state = plain_state()
    with (
        leaves_intact(state),
        raises(TypeError, "TrainState", "no ZeRO plan", "jzero.shard_train_state(state, stage=...)"),
    ):
        call(state)


def test_state_edited_by_hand_is_refused():
    state = sharded_state()
    edited = state.replace(params={"dense": {**state.params["dense"], "w": jnp.ones((32, 25))}})
    with leaves_intact(state), raises(ValueError, "dense/w: shape (32, 25)", "(32, 24)", "jzero.update_params"):
        jzero.make_train_step(loss_fn)(edited, BATCH)


# In a process of its own: jax 0.10 does not raise for arrays that a step has consumed, it crashes.
USES_OF_A_CONSUMED_STATE = """
from tests import conftest
import jax
import jzero
from tests.error_cases import BATCH, loss_fn, sharded_state

for num_devices in (8, 1):
    state = sharded_state(jzero.make_mesh(devices=jax.devices()[:num_devices]))
    step = jzero.make_train_step(loss_fn)
    known = jzero.make_eval_step(loss_fn)
    known(state, BATCH)
    step(state, BATCH)
    uses = {
        "train step": lambda: step(state, BATCH),
        "eval step that had it before": lambda: known(state, BATCH),
        "eval step": lambda: jzero.make_eval_step(loss_fn)(state, BATCH),
        "gather": lambda: jzero.gather_params(state),
        "unshard": lambda: jzero.unshard_train_state(state),
    }
    for name, use in uses.items():
        try:
            use()
        except (RuntimeError, ValueError) as error:
            print(name, "raised:", error, flush=True)
"""


def test_consumed_state_is_refused():
    finished = subprocess.run(
        [sys.executable, "-c", USES_OF_A_CONSUMED_STATE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = finished.stdout.splitlines()
    names = ["train step", "eval step that had it before", "eval step", "gather", "unshard"]
    assert [line.split(" raised:")[0] for line in lines] == 2 * names, finished.stderr
    assert finished.returncode == 0, "not a crash"
    assert all("This state was consumed" in line for line in lines)


def test_what_a_step_consumes_cannot_be_an_argument_too():
    """Called all the same, jax 0.10 ends the process on several devices."""
    state, step = sharded_state(), jzero.make_train_step(lambda params, batch, rng: loss_fn(params, batch["x"]))
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"'batch/step' .* as 'step'"):
        step(state, {"x": BATCH, "step": state.step}, rng=key)
    with pytest.raises(ValueError, match=r"'rng' .* as 'params/dense/b'"):
        step(state, {"x": BATCH}, rng=state.params["dense"]["b"])
    twice = state.replace(params={"dense": dict.fromkeys("bw", state.params["dense"]["w"])})
    with pytest.raises(ValueError, match=r"dense/b' and as 'params/dense/w'"):
        step(twice, {"x": BATCH}, rng=key)
    new, _ = step(state, {"x": BATCH, "step": jnp.copy(state.step)}, rng=key)
    assert int(new.step) == 1


def test_a_step_knows_the_state_of_its_next_call_and_does_not_keep_it():
    step = jzero.make_train_step(loss_fn)
    state, _ = step(sharded_state(), BATCH)
    array = weakref.ref(state.params["dense"]["w"])
    del state
    gc.collect()
    assert array() is None

    state, _ = step(sharded_state(), BATCH)
    state.params["dense"]["w"] = jnp.ones((32, 25))
    with leaves_intact(state), raises(ValueError, "dense/w: shape (32, 25)", "(32, 24)", "jzero.update_params"):
        step(state, BATCH)


def test_a_state_that_has_no_weak_references():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slots:
        step: jax.Array
        params: dict
        opt_state: tuple
        tx: optax.GradientTransformation = dataclasses.field(metadata={"static": True})
        replace = dataclasses.replace
        apply_gradients = jzero.TrainState.apply_gradients

    plain = jzero.TrainState.create(params={"w": jnp.ones((512, 64))}, tx=optax.sgd(0.5))
    state = jzero.shard_train_state(Slots(plain.step, plain.params, plain.opt_state, plain.tx), stage=3)
    step = jzero.make_train_step(lambda params, batch: jnp.mean(batch @ params["w"]))
    for _ in range(2):
        state, _ = step(state, jnp.ones((8, 512)))
    np.testing.assert_allclose(jzero.gather_params(state)["w"], 1 - 2 * 0.5 / 64, rtol=1e-6)


# NNX.


class Model(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(32, 24, rngs=nnx.Rngs(0))


def test_model_and_optimizer_goes_alone():
    model = Model()
    both = nnx.ModelAndOptimizer(model, optax.adam(1e-3))
    with raises(ValueError, "nnx.ModelAndOptimizer", "alone", "nnx.Optimizer"):
        jzero.shard_train_state((model, both), stage=3)
    assert isinstance(jzero.shard_train_state(both, stage=3), nnx.ModelAndOptimizer)


def test_optimizer_does_not_go_alone():
    optimizer = nnx.Optimizer(Model(), optax.adam(1e-3), wrt=nnx.Param)
    with raises(TypeError, "`nnx.Optimizer`", "`(model, optimizer)`", "ModelAndOptimizer"):
        jzero.shard_train_state(optimizer, stage=3)


def test_mutable_is_for_linen():
    pair = (model := Model(), nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    state = jzero.shard_train_state(pair, stage=3)
    step = jzero.make_train_step(lambda model, batch: (0.0, {}), has_aux=True, mutable=("batch_stats",))
    with raises(ValueError, "batch_stats", "NNX"):
        step(state, BATCH)
    step = jzero.make_train_step(lambda params, batch, batch_stats: (0.0, {}), has_aux=True, mutable=("batch_stats",))
    with raises(ValueError, "['batch_stats']", "TrainState"):
        step(sharded_state(), BATCH)


@pytest.mark.parametrize(
    ("aux", "named"),
    [
        ({"stats": {"mean": jnp.zeros(5)}}, "stats/mean: float32[4], then float32[5]"),
        ({"stats": {"mean": jnp.zeros(4, jnp.complex64)}}, "stats/mean: float32[4], then complex64[4]"),
        ({"stats": {"mean": jnp.zeros(4), "var": 1.0}}, "stats/var: float32[], added"),
        ({"stats": {}}, "stats/mean: float32[4], deleted"),
        ({}, "stats: not there"),
        (jnp.zeros(4), "stats: not there"),
    ],
)
def test_a_mutable_field_comes_back_as_it_was(aux, named):
    state = jzero.shard_train_state(WithStats(**vars(plain_state()), stats={"mean": jnp.zeros(4)}), stage=2)
    step = jzero.make_train_step(
        lambda params, batch, *, stats: (loss_fn(params, batch), aux), has_aux=True, mutable=("stats",)
    )
    with raises(ValueError, "`mutable=('stats',)`", named):
        step.eval_shape(state, BATCH)
