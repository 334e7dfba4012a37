"""Errors come before damage: each names the culprit and the way out, and leaves the state as it was."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests.error_cases import BATCH, EVERYTHING, leaves_intact, loss_fn, plain_state, raises, sharded_state

rules = lambda **patterns: (
    lambda: jzero.plan_train_state(plain_state(), config=jzero.ZeroConfig(stage=3, rules=patterns))
)
zero = lambda **fields: lambda: jzero.ZeroConfig(**{"stage": 3} | fields)
rule = lambda **fields: lambda: jzero.LeafRule(**fields)
keep = lambda **fields: lambda: jzero.Keep(**fields)
mesh = lambda **sizes: lambda: jzero.make_mesh(**sizes)
train = lambda **arguments: lambda: jzero.make_train_step(loss_fn, **arguments)

SHADOWED = {"dense/.*": jzero.LeafRule(), "dense/w": jzero.LeafRule(dim=0)}
NOWHERE = {"dense/w": jzero.LeafRule(dim=0), "decoder/.*": jzero.LeafRule(dim=0)}
VALUES = [  # a call, and what its error names; what no field takes, `test_settings.py` has
    *((zero(stage=x), "`stage` must be one of (0, 1, 2, 3)", repr(x)) for x in (-1, 4, 1.5, "3", True, None)),
    (zero(axis=""), "`axis`", "''", "name of a mesh axis"),
    (zero(replica_axis="data"), "`replica_axis`", "'data'", "other than `axis`"),
    (zero(rules=[("w", jzero.LeafRule())]), "`rules`", "list", "must map"),
    (zero(rules={"w": {"dim": 0}}), "`rules`", "'w'", "`LeafRule`s"),
    (zero(rules={"*": jzero.LeafRule()}), "`rules`", "'*'", "regular expression"),
    (zero(prefetch_bytes=8, offload=jzero.Offload(params="host")), "prefetch_bytes", "params='host'"),
    (keep(blocks=-1), "`Keep.blocks`", "an integer >= 0", "got -1"),
    (keep(blocks=True), "`Keep.blocks`", "an integer >= 0", "got True"),
    (keep(params=3), "`Keep.params`", "got 3"),
    (keep(params=("(",)), "Keep.params"),
    (keep(remat="offload"), "`Keep.remat`", "got 'offload'"),
    (keep(remat="as_written", blocks=2), "Keep.blocks=2", "Keep.remat"),
    (train(remat="all"), "a `Keep`", "got 'all'"),
    (lambda: jzero.value_and_grad(loss_fn, remat="all"), "a `Keep`", "got 'all'"),
    (rule(dim=-1), "`LeafRule.dim`", "-1", ">= 0"),
    (rule(scan_dim=-2), "`LeafRule.scan_dim`", "-2", ">= -1"),
    (rule(replicated=True, dim=0), "replicated=True", "dim=0", "Drop one"),
    (rule(replicated=True, persistent=False), "replicated=True", "persistent=False", "Drop one"),
    (rule(dim=1, scan_dim=1), "both 1", "Cut another dimension"),
    (rules(**NOWHERE), "'decoder/.*'", "whole path", "'dense/b'", "'dense/w'"),
    (rules(**SHADOWED), "['dense/w']", "earlier pattern"),
    (rules(**{"dense/.*": jzero.LeafRule(dim=1)}), "dense/b: shape (24,), but the rule has dim=1"),
    (mesh(data=5), "{'data': 5}", "8 devices", "-1"),
    (mesh(data=-1, model=-1), "Only one", "['data', 'model']"),
    (mesh(data=0), "`data`", "got 0"),
    (mesh(data=-1, model=3), "'model': 3", "8 devices"),
    (mesh(devices=[]), "`devices` is empty"),
    (mesh(devices=[jax.devices()[0]] * 2), "twice"),
    (train(accumulate_steps=0), "`accumulate_steps`", "0"),
    (train(clip_norm=0), "`clip_norm`", "0"),
    (train(check_processes="no"), "`check_processes`", "'no'"),
    (train(mutable=("batch_stats",)), "batch_stats", "has_aux=True"),
]


@pytest.mark.parametrize("case", VALUES, ids=lambda case: case[1])
def test_errors_name_what_is_wrong_its_value_and_what_is_allowed(case):
    call, *parts = case
    with raises(ValueError, *parts):
        call()


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


def test_rules_must_name_dimensions_that_are_free():
    mesh = jzero.make_mesh(data=4, model=2)
    params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "model")))}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=3, rules={"w": jzero.LeafRule(dim=1)})
    with raises(ValueError, "w: the rule has dim=1", "'model'"):
        jzero.plan_train_state(state, config=config, mesh=mesh)


def test_mesh_must_have_the_axis():
    mesh = jzero.make_mesh(fsdp=8)
    with raises(ValueError, "`axis`", "'data'", "('fsdp',)", "ZeroConfig(axis=...)", "jzero.make_mesh(data=...)"):
        jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)
    config = jzero.ZeroConfig(stage=3, axis="fsdp", replica_axis="replica")
    with raises(ValueError, "`replica_axis`", "'replica'", "('fsdp',)"):
        jzero.plan_train_state(plain_state(), config=config, mesh=mesh)
    with raises(ValueError, "`replica_axis='replica'`", "mesh=jzero.make_mesh(replica=..., fsdp=...)"):
        jzero.plan_train_state(plain_state(), config=config)


@pytest.mark.parametrize("field", ["params", "extra"])
def test_two_leaves_of_one_path_are_named(field):
    same = {"a/b": jnp.ones((8, 4)), "a": {"b": jnp.zeros((8, 4))}, "c": jnp.ones(5)}
    fields = {"params": {"w": jnp.ones((8, 4))}} | {field: same}
    state = jzero.TrainState.create(tx=optax.adam(0.1), **fields)
    for call in (jzero.shard_train_state, jzero.abstract_train_state):
        with raises(ValueError, f"  {field}/a/b: `{field}['a']['b']` and `{field}['a/b']`", "a path of its own"):
            call(state, stage=3)


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


def test_batch_leaves_must_agree_and_be_arrays():
    state = sharded_state()
    step = jzero.make_train_step(lambda params, batch: loss_fn(params, batch["x"]))
    with raises(ValueError, "agree on their leading dimension", "batch['x']: shape (16, 32)", "batch['y']: shape (8,)"):
        step(state, {"x": BATCH, "y": BATCH[:8, 0]})
    with raises(TypeError, "names/0: str", "must be an array"):
        step(state, {"x": BATCH, "names": ["first"]})


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


@pytest.mark.parametrize(
    ("mark", "said"), [(jzero.PerExample(1.0), "PerExample inside of Summed"), (jax.random.key(0), "which has no sum")]
)
def test_sums_of_what_has_none_are_named(mark, said):
    loss = lambda params, batch: (loss_fn(params, batch), {"hits": jzero.Summed(mark)})
    with raises(TypeError, "aux['hits']", said):
        jzero.make_train_step(loss, has_aux=True)(sharded_state(), BATCH)


# What a loss may not do: axes, effects, arrays that it closes over.


@pytest.mark.smoke
@pytest.mark.parametrize("threshold", [0, 10_000])
def test_large_arrays_that_the_loss_closes_over_are_warned_about(threshold):
    table = jnp.ones((100, 101))

    def loss(params, batch):
        return loss_fn(params, batch) + (table * batch.mean()).mean()

    state = sharded_state(config=jzero.ZeroConfig(stage=3, persistence_threshold=threshold))
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


def test_unordered_effects_work(capfd):
    def loss(params, batch):
        jax.debug.print("mean weight {w:.3f}", w=jnp.abs(params["dense"]["w"]).mean())
        return loss_fn(params, batch)

    state = sharded_state(config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    state, _ = jzero.make_train_step(loss)(state, BATCH)
    jax.block_until_ready(state)
    jax.effects_barrier()
    expected = float(jnp.abs(plain_state().params["dense"]["w"]).mean())
    printed = re.findall(r"mean weight ([\d.]+)", capfd.readouterr().out)
    assert len(printed) >= 8, "on each device, whole weights"
    assert set(printed) == {f"{expected:.3f}"}
