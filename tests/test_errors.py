"""Errors come before damage: each names the culprit and the way out, and leaves the state as it was."""

import contextlib
import dataclasses
import gc
import pathlib
import re
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
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

ROOT = pathlib.Path(__file__).parents[1]
EVERYTHING = jzero.ZeroConfig(stage=3, persistence_threshold=0)
BATCH = np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32)


def plain_state():
    params = {"dense": {"w": jnp.linspace(-1, 1, 32 * 24).reshape(32, 24), "b": jnp.ones(24)}}
    return jzero.TrainState.create(params=params, tx=optax.adam(1e-2))


def sharded_state(mesh=None, config=EVERYTHING):
    return jzero.shard_train_state(plain_state(), config=config, mesh=mesh)


def loss_fn(params, batch):
    return jnp.square(batch @ params["dense"]["w"] + params["dense"]["b"][None]).mean()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithStats(jzero.TrainState):
    stats: object = None


@contextlib.contextmanager
def raises(error, *parts):
    """Expects an error whose message holds each of `parts`."""
    with pytest.raises(error) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)


@contextlib.contextmanager
def leaves_intact(state):
    """Checks that the state is as good as before."""
    before = jax.tree.map(np.array, (state.params, state.opt_state, state.step))
    yield
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state, state.step), before)


# Configuration.


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "3", True, None])
def test_impossible_stage(stage):
    with raises(ValueError, "`stage` must be one of (0, 1, 2, 3)", repr(stage)):
        jzero.ZeroConfig(stage=stage)


@pytest.mark.parametrize("call", [jzero.shard_train_state, jzero.plan_train_state])
def test_stage_is_checked_wherever_it_is_given(call):
    state = plain_state()
    with raises(ValueError, "`stage` must be one of (0, 1, 2, 3)", "got 4"):
        call(state, stage=4)
    with raises(ValueError, "pass `stage=`", "config=jzero.ZeroConfig(...)"):
        call(state)
    with raises(ValueError, "`stage=2` contradicts `config.stage=3`", "pass one of them"):
        call(state, stage=2, config=jzero.ZeroConfig(stage=3))
    with raises(TypeError, "`config` must be a `jzero.ZeroConfig`", "dict"):
        call(state, config={"stage": 3})
    assert call(state, stage=2, config=jzero.ZeroConfig(stage=2)) is not None


def test_stage_is_checked_by_init_too():
    with raises(ValueError, "`stage=1` contradicts `config.stage=3`"):
        jzero.init_train_state(lambda key: plain_state(), jax.random.key(0), stage=1, config=EVERYTHING)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("axis", "", "name of a mesh axis"),
        ("axis", 3, "name of a mesh axis"),
        ("replica_axis", "data", "other than `axis`"),
        ("persistence_threshold", -1, "integer >= 0"),
        ("persistence_threshold", 1.5, "integer >= 0"),
        ("model_persistence_threshold", -1, "integer >= 0"),
        ("reshard_after_forward", "no", "True or False"),
        ("reduce_scatter", None, "True or False"),
        ("rules", [("w", jzero.LeafRule())], "must map"),
        ("rules", {"w": {"dim": 0}}, "`LeafRule`s"),
        ("rules", {"*": jzero.LeafRule()}, "regular expression"),
    ],
)
def test_config_names_field_value_and_what_is_allowed(field, value, allowed):
    shown = {"rules": "list"}.get(field, repr(value)) if isinstance(value, list) else repr(value)
    shown = shown if not isinstance(value, dict) else repr(next(iter(value)))
    with raises(ValueError, f"`{field}`", shown, allowed):
        jzero.ZeroConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"dim": -1}, ("`LeafRule.dim`", "-1", ">= 0")),
        ({"scan_dim": -2}, ("`LeafRule.scan_dim`", "-2", ">= -1")),
        ({"replicated": True, "dim": 0}, ("replicated=True", "dim=0", "Drop one")),
        ({"replicated": True, "persistent": False}, ("replicated=True", "persistent=False", "Drop one")),
        ({"dim": 1, "scan_dim": 1}, ("both 1", "Cut another dimension")),
        ({"persistent": "yes"}, ("`LeafRule.persistent`", "'yes'")),
    ],
)
def test_rule_names_field_value_and_what_is_allowed(fields, parts):
    with raises(ValueError, *parts):
        jzero.LeafRule(**fields)


def test_rules_must_match_something():
    config = jzero.ZeroConfig(stage=3, rules={"dense/w": jzero.LeafRule(dim=0), "decoder/.*": jzero.LeafRule(dim=0)})
    with raises(ValueError, "'decoder/.*'", "whole path", "'dense/b'", "'dense/w'"):
        jzero.shard_train_state(plain_state(), config=config)
    shadowed = jzero.ZeroConfig(stage=3, rules={"dense/.*": jzero.LeafRule(), "dense/w": jzero.LeafRule(dim=0)})
    with raises(ValueError, "['dense/w']", "earlier pattern"):
        jzero.shard_train_state(plain_state(), config=shadowed)


def test_rules_must_name_dimensions_that_are_there():
    config = jzero.ZeroConfig(stage=3, rules={"dense/.*": jzero.LeafRule(dim=1)})
    with raises(ValueError, "dense/b: shape (24,), but the rule has dim=1"):
        jzero.plan_train_state(plain_state(), config=config)


def test_rules_must_name_dimensions_that_are_free():
    mesh = jzero.make_mesh(data=4, model=2)
    params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "model")))}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=3, rules={"w": jzero.LeafRule(dim=1)})
    with raises(ValueError, "w: the rule has dim=1", "'model'"):
        jzero.plan_train_state(state, config=config, mesh=mesh)


# Meshes.


def test_mesh_must_have_the_axis():
    mesh = jzero.make_mesh(fsdp=8)
    with raises(ValueError, "`axis`", "'data'", "('fsdp',)", "ZeroConfig(axis=...)", "jzero.make_mesh(data=...)"):
        jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)
    config = jzero.ZeroConfig(stage=3, axis="fsdp", replica_axis="replica")
    with raises(ValueError, "`replica_axis`", "'replica'", "('fsdp',)"):
        jzero.plan_train_state(plain_state(), config=config, mesh=mesh)
    with raises(ValueError, "`replica_axis='replica'`", "mesh=jzero.make_mesh(replica=..., fsdp=...)"):
        jzero.plan_train_state(plain_state(), config=config)


def test_mesh_must_have_automatic_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with raises(ValueError, "['data']", "AxisType.Auto", "jzero.make_mesh"):
        jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"data": 5}, ("{'data': 5}", "8 devices", "-1")),
        ({"data": -1, "model": -1}, ("Only one", "['data', 'model']")),
        ({"data": 0}, ("'data'", "got 0")),
        ({"data": -1, "model": 3}, ("'model': 3", "8 devices")),
    ],
)
def test_mesh_sizes_must_fit_the_devices(sizes, parts):
    with raises(ValueError, *parts):
        jzero.make_mesh(**sizes)


def test_mesh_devices_must_be_some_and_distinct():
    with raises(ValueError, "`devices` is empty"):
        jzero.make_mesh(devices=[])
    with raises(ValueError, "twice"):
        jzero.make_mesh(devices=[jax.devices()[0]] * 2)


def test_mesh_of_one_device_warns_where_there_are_more():
    mesh = jzero.make_mesh(devices=jax.devices()[:1])
    with pytest.warns(UserWarning, match=r"one device, but 8 are there.*jzero\.make_mesh\(\)"):
        state = jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)
    state, metrics = jzero.make_train_step(loss_fn)(state, BATCH)
    assert metrics["loss"] == pytest.approx(float(loss_fn(plain_state().params, BATCH)), rel=1e-6)


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
    with pytest.raises(TypeError, match=r"`tx` must be an optax transformation.*got NoneType.*set_to_zero"):
        jzero.TrainState.create(params={"w": jnp.ones((4, 4))}, tx=None)


def test_a_name_that_is_not_there_hints_at_the_nearest():
    with pytest.raises(AttributeError, match=r"no attribute 'shard_state'. Did you mean 'shard_train_state'"):
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
import sys
from tests import conftest
import jax
import jzero
from tests.test_errors import BATCH, loss_fn, sharded_state

state = sharded_state(jzero.make_mesh(devices=jax.devices()[: int(sys.argv[1])]))
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


@pytest.mark.parametrize("num_devices", [8, 1])
def test_consumed_state_is_refused(num_devices):
    finished = subprocess.run(
        [sys.executable, "-c", USES_OF_A_CONSUMED_STATE, str(num_devices)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = finished.stdout.splitlines()
    names = ["train step", "eval step that had it before", "eval step", "gather", "unshard"]
    assert [line.split(" raised:")[0] for line in lines] == names, finished.stderr
    assert finished.returncode == 0, "not a crash"
    assert all("This state was consumed" in line for line in lines)


def test_what_a_step_consumes_cannot_be_an_argument_too():
    """Called all the same, jax 0.10 ends the process on several devices."""
    state, step = sharded_state(), jzero.make_train_step(lambda params, batch, rng: loss_fn(params, batch["x"]))
    key = jax.random.key(0)
    with pytest.raises(
        ValueError, match=r"'batch/step' is the very array that the state holds as 'step'.* `jnp\.copy`"
    ):
        step(state, {"x": BATCH, "step": state.step}, rng=key)
    with pytest.raises(ValueError, match=r"'rng' is the very array that the state holds as 'params/dense/b'"):
        step(state, {"x": BATCH}, rng=state.params["dense"]["b"])
    twice = state.replace(params={"dense": dict.fromkeys("bw", state.params["dense"]["w"])})
    with pytest.raises(ValueError, match="holds one array twice, as 'params/dense/b' and as 'params/dense/w'"):
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


# Editing parameters.


@pytest.mark.parametrize(
    "call", [jzero.gather_params, lambda s, paths: jzero.update_params(s, lambda p: p, paths=paths)]
)
def test_paths_must_match_something(call):
    with raises(ValueError, "'encoder/.*' matches no parameter", "whole path", "'dense/b', 'dense/w'"):
        call(sharded_state(), paths="encoder/.*")
    with raises(ValueError, "'dense' matches no parameter"):
        call(sharded_state(), paths="dense")


def test_update_params_keeps_shapes_dtypes_and_structure():
    state = sharded_state()
    with leaves_intact(state):
        with raises(ValueError, "dense/w: float32[24, 32], but it is float32[32, 24]", "`fn` must keep shapes"):
            jzero.update_params(state, lambda p: jax.tree.map(jnp.transpose, p))
        with raises(ValueError, "dense/b: float16[24]", "dense/w: float16[32, 24]", "dtypes"):
            jzero.update_params(state, lambda p: jax.tree.map(lambda x: x.astype(jnp.float16), p))
        with raises(ValueError, "`fn` must return a tree of the structure it was given"):
            jzero.update_params(state, lambda p: p["dense"])


# Batches.


@pytest.mark.smoke
def test_batch_must_be_divisible_by_the_devices():
    state = sharded_state()
    batch = {"x": BATCH[:12], "y": BATCH[:12, 0], "scale": np.float32(1)}
    step = jzero.make_train_step(lambda params, batch: loss_fn(params, batch["x"]))
    parts = ("divisible by 8", "('data',)", "batch['x']: shape (12, 32)", "batch['y']: shape (12,)", "8 or 16")
    with leaves_intact(state):
        for call in (
            step,
            step.lower,
            step.eval_shape,
            jzero.make_eval_step(lambda p, b: 0.0),
            jzero.value_and_grad(loss_fn),
        ):
            with raises(ValueError, *parts, "jzero.Weighted"):
                call(state, batch)
    with raises(ValueError, "divisible by 8", "Use a batch of 8,"):
        step(state, {"x": BATCH[:3]})


def test_batch_must_be_divisible_by_the_micro_batches_too():
    step = jzero.make_train_step(loss_fn, accumulate_steps=3)
    with raises(ValueError, "divisible by 24", "accumulate_steps=3", "shape (16, 32)", "Use a batch of 24"):
        step(sharded_state(), BATCH)


def test_batch_is_split_over_the_replicas_too():
    config = jzero.ZeroConfig(stage=3, replica_axis="replica")
    state = sharded_state(jzero.make_mesh(replica=2, data=4), config)
    with raises(ValueError, "divisible by 8", "('replica', 'data')", "shape (12, 32)"):
        jzero.make_train_step(loss_fn)(state, BATCH[:12])


def test_batch_leaves_must_agree_and_be_arrays():
    state = sharded_state()
    step = jzero.make_train_step(lambda params, batch: loss_fn(params, batch["x"]))
    with raises(ValueError, "agree on their leading dimension", "batch['x']: shape (16, 32)", "batch['y']: shape (8,)"):
        step(state, {"x": BATCH, "y": BATCH[:8, 0]})
    with raises(TypeError, "names/0: str", "must be an array"):
        step(state, {"x": BATCH, "names": ["first"]})


# Losses.


@pytest.mark.parametrize("make", [jzero.make_train_step, jzero.value_and_grad, jzero.make_eval_step])
def test_loss_must_be_callable(make):
    with raises(TypeError, "must be callable", "float"):
        make(3.0)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"accumulate_steps": 0}, ("`accumulate_steps`", "0")),
        ({"accumulate_steps": 2.0}, ("`accumulate_steps`", "2.0")),
        ({"clip_norm": -1.0}, ("`clip_norm`", "-1.0")),
        ({"clip_norm": 0}, ("`clip_norm`", "0")),
        ({"check_processes": 0.0}, ("`check_processes`", "0.0")),
        ({"check_processes": "no"}, ("`check_processes`", "'no'")),
        ({"mutable": ("batch_stats",)}, ("batch_stats", "has_aux=True")),
    ],
)
def test_step_arguments_are_checked_when_it_is_made(arguments, parts):
    with raises(ValueError, *parts):
        jzero.make_train_step(loss_fn, **arguments)


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (lambda p, b: b @ p["dense"]["w"], ("its loss is", "2, 24")),
        (lambda p, b: jnp.ones((1,)), ("its loss is", "1")),
        (lambda p, b: jnp.ones((), jnp.int32), ("its loss is", "int32")),
        (lambda p, b: jzero.Weighted(b.sum(0), jnp.ones(())), ("its sum is", "32")),
    ],
    ids=["matrix", "vector", "integer", "vector sum"],
)
def test_loss_must_be_a_floating_scalar(loss, parts):
    state = sharded_state()
    with leaves_intact(state), raises(TypeError, "floating-point scalar", "jzero.Weighted", "Take the mean", *parts):
        jzero.make_train_step(loss)(state, BATCH)


def test_weight_must_be_a_scalar():
    state = sharded_state()
    loss = lambda p, b: jzero.Weighted(jnp.square(b @ p["dense"]["w"]).sum(), jnp.ones(3, jnp.int32))
    with leaves_intact(state), raises(TypeError, "`Weighted.weight`", "scalar", "int32", "(3,)"):
        jzero.make_train_step(loss)(state, BATCH)


def test_has_aux_must_be_said():
    state = sharded_state()
    with raises(TypeError, "returned a tuple", "`has_aux=True`"):
        jzero.make_train_step(lambda p, b: (loss_fn(p, b), {}))(state, BATCH)
    with raises(TypeError, "`(loss, aux)`"):
        jzero.make_train_step(loss_fn, has_aux=True)(state, BATCH)


@pytest.mark.parametrize("make", [jzero.make_train_step, jzero.value_and_grad])
def test_aux_without_a_reduction_is_named(make):
    def loss(params, batch):
        correct = (batch > 0).sum()
        return loss_fn(params, batch), {"mean": batch.mean(), "right": {"count": correct, "any": correct > 3}}

    state = sharded_state()
    with (
        leaves_intact(state),
        raises(
            TypeError, "aux['right/count']: int32[]", "aux['right/any']: bool[]", "jzero.Summed", "jzero.PerExample"
        ),
    ):
        make(loss, has_aux=True)(state, BATCH)


def test_metrics_without_a_reduction_are_named():
    eval_step = jzero.make_eval_step(lambda params, batch: {"mean": batch.mean(), "count": (batch > 0).sum()})
    with pytest.raises(TypeError, match=r"count.*int32\[\]") as caught:
        eval_step(sharded_state(), BATCH)
    assert "jzero.Summed" in str(caught.value)
    assert "mean" not in re.findall(r"'(\w+)'", str(caught.value))


@pytest.mark.parametrize(
    ("mark", "said"), [(jzero.PerExample(1.0), "PerExample inside of Summed"), (jax.random.key(0), "which has no sum")]
)
def test_sums_of_what_has_none_are_named(mark, said):
    loss = lambda params, batch: (loss_fn(params, batch), {"hits": jzero.Summed(mark)})
    with raises(TypeError, "aux['hits']", said):
        jzero.make_train_step(loss, has_aux=True)(sharded_state(), BATCH)


def test_marked_aux_is_reduced():
    def loss(params, batch):
        aux = {"count": jzero.Summed((batch > 0).sum()), "first": jzero.PerExample(batch[:, 0] > 0)}
        return loss_fn(params, batch), aux

    _, metrics = jzero.make_train_step(loss, has_aux=True)(sharded_state(), BATCH)
    assert int(metrics["aux"]["count"]) == (BATCH > 0).sum()
    np.testing.assert_array_equal(metrics["aux"]["first"], BATCH[:, 0] > 0)


@pytest.mark.smoke
@pytest.mark.parametrize("threshold", [0, 10_000])
def test_large_arrays_that_the_loss_closes_over_are_warned_about(threshold):
    table = jnp.ones((100, 101))
    config = jzero.ZeroConfig(stage=3, persistence_threshold=threshold)

    def loss(params, batch):
        return loss_fn(params, batch) + (table * batch.mean()).mean()

    state = sharded_state(config=config)
    step = jzero.make_train_step(loss)
    plan = step.plan(state, BATCH)
    assert [(leaf.shape, leaf.dtype) for leaf in plan.closed_over] == [((100, 101), jnp.float32)]
    (listed,) = [whole for whole in plan.replicated if whole.shape == (100, 101)]
    assert listed.num_bytes == 4 * 100 * 101
    assert "closed over" in listed.reason
    assert "closed over" in str(plan)
    with pytest.warns(UserWarning, match="closes over arrays") as caught:
        step(state, BATCH)
    (warning,) = caught
    for part in ("float32[100, 101]", "40400 bytes", "as parameters"):
        assert part in str(warning.message)


@pytest.mark.parametrize(("threshold", "shape"), [(10_000, (100, 100)), (0, (64, 64))])
def test_small_arrays_that_the_loss_closes_over_are_fine(threshold, shape):
    table = jnp.ones(shape)
    step = jzero.make_train_step(lambda params, batch: loss_fn(params, batch) + (table * batch.mean()).mean())
    state = sharded_state(config=jzero.ZeroConfig(stage=3, persistence_threshold=threshold))
    assert step.plan(state, BATCH).closed_over == ()
    step(state, BATCH)  # warnings are errors here


# Other users of the mesh inside the loss.


def model_axis_loss(params, batch, mesh, axes):
    def product(x, w):  # each device of the axis multiplies its part of the inner dimension
        return jax.lax.psum(x @ w, axes)

    inner = jax.shard_map(
        product,
        mesh=mesh,
        in_specs=(P(None, axes), P(axes, None)),
        out_specs=P(),
        axis_names=set(axes),
        check_vma=False,
    )
    return jnp.square(inner(batch, params["dense"]["w"]) + params["dense"]["b"][None]).mean()


def test_shard_map_over_the_axis_of_zero_is_refused():
    mesh = jzero.make_mesh(data=4, model=2)
    state = sharded_state(mesh)
    for axes in (("data",), ("data", "model")):
        with leaves_intact(state), raises(ValueError, "jax.shard_map", "['data'] is ZeRO's own", "axis_names"):
            jzero.make_train_step(lambda p, b, axes=axes: model_axis_loss(p, b, mesh, axes))(state, BATCH)


def test_shard_map_over_sizes_that_do_not_divide_is_explained():
    mesh = jzero.make_mesh()
    loss = lambda p, b: jax.shard_map(jnp.mean, mesh=mesh, in_specs=P("data"), out_specs=P())(b)
    with raises(ValueError, "jax.shard_map", "already runs once per device along ('data',)", "axis_names"):
        jzero.make_train_step(loss)(sharded_state(), BATCH)


def test_an_axis_of_another_name_is_explained():
    loss = lambda p, b: jax.lax.pmean(loss_fn(p, b), "batch")
    with raises(ValueError, "'batch'", "ZeRO's are ('data',)", "`ZeroConfig(axis='batch')`", "make_mesh(batch=-1)"):
        jzero.make_train_step(loss)(sharded_state(), BATCH)
    with pytest.raises(NameError, match="undefined"):
        jzero.make_train_step(lambda p, b: undefined)(sharded_state(), BATCH)  # noqa: F821


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shard_map_over_another_axis_works(stage):
    mesh = jzero.make_mesh(data=4, model=2)
    state = sharded_state(mesh, jzero.ZeroConfig(stage=stage, persistence_threshold=0))
    loss, grads = jzero.value_and_grad(lambda p, b: model_axis_loss(p, b, mesh, ("model",)))(state, BATCH)
    assert_right(loss, grads, state)


@pytest.mark.parametrize("stage", [0, 3])
def test_sharding_constraint_loses_the_axis_of_zero(stage):
    mesh = jzero.make_mesh(data=4, model=2)

    def constrained(params, batch):
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
        w = jax.lax.with_sharding_constraint(params["dense"]["w"], NamedSharding(mesh, P("data", "model")))
        hidden = jax.lax.with_sharding_constraint(batch @ w, NamedSharding(mesh, P(("data", "model"), None)))
        return jnp.square(hidden + params["dense"]["b"][None]).mean()

    state = sharded_state(mesh, jzero.ZeroConfig(stage=stage, persistence_threshold=0))
    loss, grads = jzero.value_and_grad(constrained)(state, BATCH)
    assert_right(loss, grads, state)
    lowered = jax.jit(jzero.value_and_grad(constrained)).lower(state, BATCH).as_text()
    constraints = re.findall(r"sdy\.sharding_constraint .*", lowered)
    inside = [line for line in constraints if '"model"' in line and '"data"' not in line]
    assert inside, "the other axis is kept"


def assert_right(loss, grads, state):
    """Compares with one device, in double precision done by hand."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), plain_state().params)
    x = BATCH.astype(np.float64)
    y = x @ params["dense"]["w"] + params["dense"]["b"]
    dy = 2 * y / y.size
    assert float(loss) == pytest.approx(np.square(y).mean(), rel=1e-5)
    # Gradients come in the plan's layout; nothing is padded here.
    np.testing.assert_allclose(grads["dense"]["w"], x.T @ dy, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads["dense"]["b"], dy.sum(0), rtol=1e-4, atol=1e-6)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, state.params)


# Effects.


def with_ordered_print(params, batch):
    jax.debug.print("loss on a device", ordered=True)
    return loss_fn(params, batch)


def with_ordered_callback(params, batch):
    io_callback(lambda x: None, None, batch.mean(), ordered=True)
    return loss_fn(params, batch)


@pytest.mark.parametrize("loss", [with_ordered_print, with_ordered_callback])
def test_ordered_effects_are_refused_before_anything_is_compiled(loss, caplog):
    def compilations():
        return sum("XLA compilation" in record.getMessage() for record in caplog.records)

    state = sharded_state()
    step = jzero.make_train_step(loss)
    with jax.log_compiles():
        with leaves_intact(state):
            for call in (step, step.trace, step.eval_shape, jzero.value_and_grad(loss)):
                with raises(ValueError, "ordered effects", "ordered=False"):
                    call(state, BATCH)
        assert not compilations()
        jzero.make_train_step(loss_fn)(state, BATCH)
        assert compilations(), "else the count above says nothing"


@pytest.mark.parametrize("is_set", [False, True])
def test_values_that_the_loss_casts_to_varying(is_set):
    """jax knows no such type where the loss is traced."""
    mesh = jzero.make_mesh()
    state = jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)
    step = jzero.make_train_step(lambda params, batch: loss_fn(params, jax.lax.pcast(batch, "data", to="varying")))
    context = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    with context, leaves_intact(state), raises(ValueError, "'data'", "`lax.pcast`", "leave that out"):
        step(state, BATCH)


@pytest.mark.parametrize("stage", [0, 3])
def test_unordered_effects_work(stage, capfd):
    def loss(params, batch):
        jax.debug.print("mean weight {w:.3f}", w=jnp.abs(params["dense"]["w"]).mean())
        return loss_fn(params, batch)

    state = sharded_state(config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))
    state, _ = jzero.make_train_step(loss)(state, BATCH)
    jax.block_until_ready(state)
    jax.effects_barrier()
    expected = float(jnp.abs(plain_state().params["dense"]["w"]).mean())
    printed = re.findall(r"mean weight ([\d.]+)", capfd.readouterr().out)
    assert len(printed) >= 8, "on each device, whole weights"
    assert set(printed) == {f"{expected:.3f}"}


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
