"""Errors come before damage: each names the culprit and the way out, and leaves the state as it was."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests.error_cases import BATCH, EVERYTHING, leaves_intact, loss_fn, plain_state, raises, sharded_state

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
    with pytest.warns(UserWarning, match="one device, but 8 are there"):
        state = jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)
    state, metrics = jzero.make_train_step(loss_fn)(state, BATCH)
    assert metrics["loss"] == pytest.approx(float(loss_fn(plain_state().params, BATCH)), rel=1e-6)


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
