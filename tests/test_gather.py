"""`gather_params` with a dtype and a layout: values, bytes on each device, and what does not fit."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jzero
from jzero.core.arrays.collectives import gather_leaf
from jzero.core.jaxpr.equations import equations_of

SHAPES = {"embed": (61, 36), "layers": {"q": (3, 36, 40), "norm": (3, 36)}, "head": (36, 61), "ids": (5,)}
"""Odd sizes: `embed` and `head` are padded or flattened on 8 devices, `q` is cut where it divides."""


def make_params():
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)
    params = jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return params | {"ids": np.arange(5, dtype=np.int32)}


def sharded(params, *, num_devices=8, **options):
    config = jzero.ZeroConfig(**{"stage": 3, "persistence_threshold": 0, **options})
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",), axis_types=(AxisType.Auto,))
    plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-2))
    return jzero.shard_train_state(plain, config=config, mesh=mesh, trainable=r"(?!ids).*")


def assert_same(found, params, dtype):
    def same(x, y):
        want = y.astype(dtype) if np.issubdtype(y.dtype, np.floating) else y
        assert x.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(x), want)

    jax.tree.map(same, found, params)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "num_devices"), [({"precision": "bf16"}, 3), ({"stage": 1}, 8), ({"precision": "bf16", "stage": 2}, 8)]
)
def test_values_are_those_of_numpy(options, num_devices):
    """On every layout; masters are cast from all of their bits."""
    params = make_params()
    state = sharded(params, num_devices=num_devices, **options)
    found = jzero.gather_params(state, masters=True, dtype=jnp.bfloat16)
    assert_same(found, params, jnp.bfloat16)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(found))
    spec = (
        {"layers/norm": PartitionSpec("data")} if num_devices == 3 else {"layers/q": PartitionSpec(None, None, "data")}
    )
    assert_same(jzero.gather_params(state, masters=True, shardings=spec), params, np.float32)


def test_leaves_lie_where_rules_and_trees_say():
    """Over the state's mesh, and over one with other axes and another order of the same devices."""
    params = make_params()
    state = sharded(params)
    devices = np.array(jax.devices())[[0, 2, 4, 6, 1, 3, 5, 7]].reshape(2, 4)
    mesh = Mesh(devices, ("a", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = {
        "layers/q": NamedSharding(mesh, PartitionSpec(None, "model", "a")),
        "layers/.*": PartitionSpec(None, "model"),
        "head": PartitionSpec("model"),
    }
    found = jzero.gather_params(state, dtype="bfloat16", shardings=rules)
    assert_same(found, params, jnp.bfloat16)
    parts = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, found)
    assert parts == {"embed": (61, 36), "layers": {"q": (3, 9, 20), "norm": (3, 9)}, "head": (9, 61), "ids": (5,)}
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(found))

    whole = PartitionSpec()
    tree = {
        "embed": whole,
        "layers": {"q": PartitionSpec(None, None, "data"), "norm": whole},
        "head": whole,
        "ids": whole,
    }
    found = jzero.gather_params(state, shardings=tree)
    assert_same(found, params, np.float32)
    assert found["layers"]["q"].addressable_shards[0].data.shape == (3, 36, 5)
    only = jzero.gather_params(state, shardings=tree, paths="layers/q")
    assert only["embed"] is None
    assert_same(only["layers"]["q"], params["layers"]["q"], np.float32)


def test_no_buffer_is_shared_with_the_state():
    """Even where the result lies as the state does: the next step consumes the state."""
    params = {"w": np.ones((16, 4), np.float32)}
    state = sharded(params | {"ids": np.arange(5)})
    found = jzero.gather_params(state, shardings={"w": PartitionSpec("data")})["w"]
    step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
    step(state, np.ones((8, 16), np.float32))
    np.testing.assert_array_equal(found, params["w"])


@pytest.mark.smoke
def test_devices_hold_the_result_and_one_leaf(monkeypatch):
    """Of six leaves, half of which are padded, no more than one is whole at a time."""
    size, leaf_bytes = 8, 61 * 61 * 2
    params = {f"w{i}": np.ones((61 + i % 2 * 3, 61), np.float32) for i in range(6)} | {"ids": np.arange(5)}
    state = sharded(params)
    assert any(leaf.param.cut and leaf.param.cut.is_padded for leaf in jzero.plan_of(state).leaves)
    put, seen = jax.device_put, []
    part = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    live = lambda: sum(part(x) for x in jax.live_arrays() if len(x.sharding.device_set) == size)

    def counted(x, *args, **kwargs):
        seen.append(live())
        return put(x, *args, **kwargs)

    before = live()
    monkeypatch.setattr(jax, "device_put", counted)
    found = jzero.gather_params(state, dtype="bfloat16", shardings={"w[135]": PartitionSpec("data")})
    monkeypatch.undo()
    result = sum(map(part, jax.tree.leaves(found)))
    assert len(seen) == len(params)
    assert live() - before == result
    assert max(seen) - before <= result + leaf_bytes


def test_what_does_not_fit_is_told_before_anything_is_gathered():
    """Every leaf that does not fit, with its shape, spec and rule."""
    state = sharded(make_params())
    with pytest.raises(ValueError, match=r"`dtype` must be .*'int8'"):
        jzero.gather_params(state, dtype="int8")
    with pytest.raises(ValueError, match=r"(?s)embed .*'data'.*head .*'head'"):
        jzero.gather_params(state, shardings={"em.*": PartitionSpec("data"), "head": PartitionSpec(None, "data")})
    with pytest.raises(ValueError, match=r"embed \[61, 36\].*'model'"):
        jzero.gather_params(state, shardings={"embed": PartitionSpec("model")})
    with pytest.raises(ValueError, match=r"\['layer/q'\].*'layers/q'"):
        jzero.gather_params(state, shardings={"layer/q": PartitionSpec()})
    with pytest.raises(ValueError, match="structure of the parameters"):
        jzero.gather_params(state, shardings={"embed": PartitionSpec(), "layers": {}})
    few = Mesh(np.array(jax.devices()[:4]), ("model",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"embed.*its mesh is of other devices"):
        jzero.gather_params(state, shardings={"embed": NamedSharding(few, PartitionSpec())})
    tree = jax.tree.map(lambda _: PartitionSpec(), make_params())
    with pytest.raises(ValueError, match=r"head.*not a `PartitionSpec`.*: a str"):
        jzero.gather_params(state, shardings=tree | {"head": "data"})


@pytest.mark.parametrize(
    ("shape", "dim", "sent"),
    [
        ((16, 24), 0, (2, 24)),
        ((16, 24), 1, (1, 16, 3)),
        ((3, 16, 24), 1, (2, 24)),
        ((3, 16, 24), 2, (1, 16, 3)),
        ((5, 7), 1, (1, 5, 1)),
    ],
)
def test_onto_an_array_shards_arrive_one_behind_the_other(shape, dim, sent):
    """Those of a stack row by row; whatever is padded, or cut, the values are the same."""
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    config = jzero.ZeroConfig(stage=2, persistence_threshold=0, rules={"w": jzero.LeafRule(dim=dim)})
    plan = jzero.plan_train_state(jzero.TrainState.create(params={"w": x}, tx=optax.sgd(0.1)), config=config)
    fn = jax.jit(lambda x, old: gather_leaf(x, plan.leaves[0].grad, plan, onto=old))
    gathers = [eqn for eqn in equations_of(jax.make_jaxpr(fn)(x, x)) if eqn.primitive.name == "all_gather"]
    assert {(eqn.params["all_gather_dimension"], eqn.invars[0].aval.shape) for eqn in gathers} == {(0, sent)}
    assert len(gathers) == (shape[0] if len(shape) == 3 else 1)
    np.testing.assert_array_equal(fn(x, 0 * x), x)
