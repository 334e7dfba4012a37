"""States that are refused, and states that a step has consumed."""

import builtins
import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state

import jzero
from tests import shared
from tests.error_cases import BATCH, leaves_intact, loss_fn, plain_state, raises, sharded_state
from tests.example_runs import run_python

CREATE = "jzero.TrainState.create(params=..., tx=...)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithStats(jzero.TrainState):
    stats: object = None


class StateWithName(flax_train_state.TrainState):
    extra: dict


class Model(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(32, 24, rngs=nnx.Rngs(0))


@pytest.mark.smoke
@pytest.mark.parametrize("call", [jzero.shard_train_state, jzero.plan_train_state])
def test_leaves_that_are_no_arrays_are_all_listed(call):
    extra = {"name": "first run", "fn": len, "objects": np.array([object()]), "count": 3, "scale": np.float32(2)}
    state = StateWithName.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=shared.sgd(0.1), extra=extra)
    parts = "extra/name: str", "first run", "extra/fn: builtin", "extra/objects", "pytree_node=False"
    with raises(TypeError, *parts) as caught:
        call(state, stage=1)
    assert "extra/count" not in str(caught.value), "numbers are fine"
    assert "extra/scale" not in str(caught.value)
    layer = {"w": jnp.ones((8, 8)), "activation": jnp.tanh, "name": np.array(["dense"])}
    with raises(TypeError, "params/activation: ", "params/name: ndarray", "eqx.partition"):
        call(jzero.TrainState(step=0, params=layer, opt_state=(), tx=shared.sgd(0.1)), stage=1)


@pytest.mark.parametrize(
    ("missing", "part"),
    [("tx", "set_to_zero"), ("params", "`params` "), ("step", "`step=0`")],
    ids=["tx", "params", "step"],
)
@pytest.mark.parametrize("call", [jzero.shard_train_state, jzero.init_train_state])
def test_fields_of_a_state_that_are_none(call, missing, part):
    fields = {"step": 0, "apply_fn": None, "params": {"w": jnp.ones((8, 8))}, "tx": optax.sgd(0.1), "opt_state": None}
    state = flax_train_state.TrainState(**{**fields, missing: None})
    with raises(TypeError, f"`{missing}", part, "None" if missing == "params" else ""):
        call(state, stage=1) if call is jzero.shard_train_state else call(lambda _: state, jax.random.key(0), stage=1)


def shard(state, **options):
    return jzero.shard_train_state(state, **{"stage": 3} | options)


def state_with(**changes):
    return plain_state().replace(**changes)


OTHER_PARAMS = {"dense": {"w": jnp.ones((32, 25)), "c": jnp.ones(24)}}
ABSTRACT_MESH = jax.sharding.AbstractMesh((8,), ("data",))
REFUSED = {
    "no optimizer": (
        lambda: jzero.TrainState.create(params={"w": jnp.ones((4, 4))}, tx=None),
        "TypeError `tx` |got NoneType|set_to_zero",
    ),
    "an unknown name": (lambda: jzero.shard_state, "AttributeError mean 'shard_train_state'"),
    "optimizer state of other parameters": (
        lambda: shard(state_with(opt_state=plain_state().tx.init(OTHER_PARAMS))),
        "ValueError `opt_state` does not belong to `params`|0/mu/dense/w: shape (32, 25), but (32, 24)|"
        "0/nu/dense/b: missing|0/mu/dense/c: shape (24,)|tx.init(params)",
    ),
    "optimizer state of another optimizer": (
        lambda: jzero.plan_train_state(state_with(tx=shared.sgd(0.1, momentum=0.9)), stage=1),
        "ValueError 0/trace/dense/w: missing|0/mu/dense/w|tx.init(params)",
    ),
    "shapes": (
        lambda: shard(jax.eval_shape(plain_state)),
        "TypeError params/dense/w|plan_train_state|init_train_state",
    ),
    "one shape": (lambda: shard(state_with(step=jax.ShapeDtypeStruct((), jnp.int32))), "TypeError ['step']"),
    "within jit": (lambda: jax.jit(lambda s: shard(s).params)(plain_state()), "TypeError outside `jit`"),
    "an abstract mesh": (
        lambda: shard(plain_state(), mesh=ABSTRACT_MESH),
        "TypeError no devices|jzero.make_mesh()",
    ),
    "a field of the configuration": (
        lambda: shard(plain_state(), precision="bf16"),
        "TypeError `config=jzero.ZeroConfig(stage=..., precision='bf16')` to `shard_train_state`",
    ),
    "a field of the configuration, of a step": (
        lambda: jzero.make_train_step(loss_fn, offload=jzero.Offload(optimizer="host")),
        "TypeError `config=jzero.ZeroConfig(stage=..., offload=...)` to `shard_train_state`",
    ),
    "a configuration by position": (
        lambda: jzero.shard_train_state(plain_state(), jzero.ZeroConfig(stage=3)),
        "TypeError passed by name, `config=...`",
    ),
    "an unknown argument": (
        lambda: shard(plain_state(), precisoin="bf16"),
        "TypeError unexpected keyword argument 'precisoin'",
    ),
    "a dictionary": (lambda: shard({"w": np.ones(3)}), f"TypeError dict|{CREATE}"),
    "none": (lambda: shard(None), f"TypeError NoneType|{CREATE}"),
    "a model beside its model and optimizer": (
        lambda: shard((model := Model(), nnx.ModelAndOptimizer(model, optax.adam(1e-3)))),
        "ValueError nnx.ModelAndOptimizer|alone|nnx.Optimizer",
    ),
    "an optimizer alone": (
        lambda: shard(nnx.Optimizer(Model(), optax.adam(1e-3), wrt=nnx.Param)),
        "TypeError `nnx.Optimizer`|`(model, optimizer)`|ModelAndOptimizer",
    ),
    "mutable fields of NNX": (
        lambda: jzero.make_train_step(lambda model, batch: (0.0, {}), has_aux=True, mutable=("batch_stats",))(
            shard((model := Model(), nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))), BATCH
        ),
        "ValueError batch_stats|NNX",
    ),
    "mutable fields that the state has not": (
        lambda: jzero.make_train_step(lambda p, batch, batch_stats: (0.0, {}), has_aux=True, mutable=("batch_stats",))(
            sharded_state(), BATCH
        ),
        "ValueError ['batch_stats']|TrainState",
    ),
}
"""What is called, and the error with the parts of its message."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_state_is_refused_with_a_way_out(name):
    call, message = REFUSED[name]
    error, parts = message.split(" ", 1)
    with raises(getattr(builtins, error), *parts.split("|")):
        call()


def test_a_name_that_is_like_no_other_has_no_hint():
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        jzero.xyzzy  # noqa: B018


USES = {
    "train_step": lambda state: jzero.make_train_step(loss_fn)(state, BATCH),
    "eval_step": lambda state: jzero.make_eval_step(loss_fn)(state, BATCH),
    "value_and_grad": lambda state: jzero.value_and_grad(loss_fn)(state, BATCH),
    "lower": lambda state: jzero.make_train_step(loss_fn).lower(state, BATCH),
    "plan_of": jzero.plan_of,
    "natural_params": jzero.natural_params,
    "update_params": lambda state: jzero.update_params(state, lambda p: p),
    "gather_params": jzero.gather_params,
    "unshard": jzero.unshard_train_state,
    "offload": jzero.offload_train_state,
    "save": lambda state: jzero.save_checkpoint("nowhere", state),
}


@pytest.mark.parametrize("use", ["gather_params", "unshard", "offload", "save", "train_step", "eval_step"])
def test_abstract_states_have_no_values_to_work_on(use):
    with raises(TypeError, "shapes but no values", "jzero.init_train_state", "restore_checkpoint"):
        USES[use](jzero.abstract_train_state(plain_state(), stage=3))


@pytest.mark.parametrize("use", [*USES][:9])
def test_unsharded_state_is_refused(use):
    state = plain_state()
    parts = "TrainState", "no ZeRO plan", "jzero.shard_train_state(state, stage=...)"
    with leaves_intact(state), raises(TypeError, *parts):
        USES[use](state)


def test_abstract_meshes_need_the_name_of_a_platform_and_may_have_explicit_axes():
    state = jzero.abstract_train_state(plain_state(), stage=3, mesh=ABSTRACT_MESH)
    step = jzero.make_train_step(loss_fn)
    with raises(TypeError, "`AbstractMesh`", "lowering_platforms=('tpu',)", "jzero.make_mesh()"):
        step.lower(state, BATCH)
    assert "num_partitions = 8" in step.trace(state, BATCH).lower(lowering_platforms=("tpu",)).as_text()
    explicit = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    for mesh in (ABSTRACT_MESH, explicit):
        state = jzero.abstract_train_state(plain_state(), stage=3, mesh=mesh)
        assert jzero.estimate_step_memory(step, state, BATCH).peak > 0


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
    lines = run_python("-c", USES_OF_A_CONSUMED_STATE).splitlines()
    names = ["train step", "eval step that had it before", "eval step", "gather", "unshard"]
    assert [line.split(" raised:")[0] for line in lines] == 2 * names
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

    fresh = sharded_state()
    edited = fresh.replace(params={"dense": {**fresh.params["dense"], "w": jnp.ones((32, 25))}})
    state, _ = step(sharded_state(), BATCH)
    state.params["dense"]["w"] = jnp.ones((32, 25))
    for wrong in (state, edited):
        with leaves_intact(wrong), raises(ValueError, "dense/w: shape (32, 25)", "(32, 24)", "jzero.update_params"):
            step(wrong, BATCH)


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

    plain = jzero.TrainState.create(params={"w": jnp.ones((512, 64))}, tx=shared.sgd(0.5))
    state = jzero.shard_train_state(Slots(plain.step, plain.params, plain.opt_state, plain.tx), stage=3)
    step = jzero.make_train_step(lambda params, batch: jnp.mean(batch @ params["w"]))
    for _ in range(2):
        state, _ = step(state, jnp.ones((8, 512)))
    np.testing.assert_allclose(jzero.gather_params(state)["w"], 1 - 2 * 0.5 / 64, rtol=1e-6)


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
