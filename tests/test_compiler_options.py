"""XLA options of one step's program, and what the program is without any."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jzero
from jzero.analysis.collectives import find_collectives
from jzero.layout.route import route_of
from jzero.step import compiler_options as _compiler_options
from tests import models, shared
from tests.tiers import default_for, slow


def make_params():
    return models.mlp_params(sizes=models.TWO_LAYERS)


def state_of(stage=3, mesh=None, tx=None, cls=jzero.TrainState, **options):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, **options)
    arguments = {"apply_fn": None} if cls is not jzero.TrainState else {}
    state = cls.create(params=make_params(), tx=tx or shared.sgd(0.1, momentum=0.9), **arguments)
    return jzero.shard_train_state(state, config=config, mesh=mesh)


def test_compiler_options_are_those_of_one_step():
    """XLA refuses what it does not know, so an option that arrives is seen."""
    plain = jzero.TrainState.create(params={"w": np.ones((16, 16), np.float32)}, tx=shared.sgd(0.1))
    state = jzero.shard_train_state(plain, stage=3)
    loss_fn, batch = lambda params, batch: (batch @ params["w"]).mean(), np.ones((8, 16), np.float32)
    with pytest.raises(Exception, match="no_such_option"):
        jzero.make_train_step(loss_fn, compiler_options={"no_such_option": True})(state, batch)
    options = {"xla_cpu_enable_fast_min_max": True}
    state, _ = jzero.make_train_step(loss_fn, compiler_options=options)(state, batch)
    assert int(state.step) == 1


def test_buckets_and_recommended_options_are_those_of_the_platform(monkeypatch):
    config = jzero.ZeroConfig(stage=3, all_gather_bucket_bytes=2**20, reduce_bucket_bytes=2**22)

    def options(platform, given=None, config=config, count=4):
        monkeypatch.setattr(_compiler_options, "mesh_platform", lambda mesh: platform)
        sizes = {"data": count} if config.node_axis is None else {"node": 2, "data": count // 2}
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        plan = type("Plan", (), {"config": config, "mesh": mesh, "route": route_of(config, mesh)})
        return _compiler_options.compiler_options(plan, given)

    buckets = {
        "xla_gpu_all_gather_combine_threshold_bytes": 2**20,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20,  # of a shard, on 4 devices
    }
    assert options("gpu") == buckets
    assert options("gpu", "recommended") == buckets, "loops gather ahead by themselves"
    assert options("gpu", "recommended", dataclasses.replace(config, reshard_after_forward=False)) == buckets
    recommended = options("gpu", "recommended", dataclasses.replace(config, prefetch_bytes=0))
    assert buckets.items() < recommended.items()
    assert [key for key in recommended if key not in buckets and "pipeline" in key]
    on_host = dataclasses.replace(config, offload=jzero.Offload(params="host"))
    assert options("gpu", "recommended", on_host) == buckets
    default = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**24 // 4}
    assert options("gpu", config=jzero.ZeroConfig(stage=2)) == default
    assert options("gpu", config=jzero.ZeroConfig(stage=2), given="recommended") == default
    many = options("gpu", config=jzero.ZeroConfig(stage=3), count=512)
    assert many == {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**18}, "not below what a ring's hop takes"
    nodes = options("gpu", config=jzero.ZeroConfig(stage=3, node_axis="node"), count=16)
    assert nodes == {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**23}, "hops between nodes travel together"
    for field in ({"secondary_grads": True}, {"quantization": jzero.Quantization(reduce="int4")}):
        rare = options("gpu", config=jzero.ZeroConfig(stage=3, node_axis="node", **field), count=16)
        assert rare == {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20}
    own = {"xla_gpu_all_gather_combine_threshold_bytes": 7}
    assert options("gpu", own)["xla_gpu_all_gather_combine_threshold_bytes"] == 7
    with pytest.warns(UserWarning, match="reduce_bucket_bytes.*tpu"):
        assert options("tpu", "recommended") is None
    with pytest.raises(ValueError, match="`compiler_options` must be"):
        jzero.make_train_step(models.mlp_loss, compiler_options="fast")
    with pytest.raises(ValueError, match=r"`reduce_bucket_bytes` .*: got 0"):
        jzero.ZeroConfig(reduce_bucket_bytes=0)


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_no_product_of_a_bf16_step_is_left_to_a_slow_kernel_on_cpus(scanned):
    """With jax 0.12 XLA gives bf16 products to YNNPACK, but not those that it merges with a transpose."""
    params = {"table": jnp.ones((32, 64)), "w": jnp.ones((2, 64, 64))}

    def loss_fn(params, tokens):  # [B, S]
        x, ws = params["table"][tokens], params["w"]  # [B, S, D], [L, D, D]
        block = lambda x, w: (jnp.sin(x @ w), None)
        x = jax.lax.scan(block, x, ws)[0] if scanned else block(block(x, ws[0])[0], ws[1])[0]
        return jnp.mean(jnp.square(x @ params["table"].T))

    state = jzero.TrainState.create(params=params, tx=shared.sgd(0.1))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(persistence_threshold=0, precision="bf16"))
    text = jzero.make_train_step(loss_fn).lower(state, np.ones((16, 16), np.int32)).compile().as_text()
    fused = set(re.findall(r"kind=kCustom, calls=(%\S+?),", text))
    kernels, name = [], ""
    for line in text.splitlines():
        name = line.split()[0] if line.startswith("%") else name
        kernels += [name in fused] if re.search(r"= bf16\S* dot\(", line) else []
    assert all(kernels)
    if jax.__version_info__[:2] == (0, 12):
        assert len(kernels) == (6 if scanned else 9), "forward; gradients of kernels and of activations"


def test_one_device_costs_nothing():
    """The program for one device is that of plain `jax.jit`, within 5 % of its instructions and bytes."""
    state = TrainState.create(apply_fn=None, params=make_params(), tx=shared.sgd(0.1, momentum=0.9))
    batch = jax.device_put(models.mlp_batch(16), jax.devices()[0])

    def plain_step(state, batch):
        loss, grads = jax.value_and_grad(models.mlp_loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    count = lambda compiled: sum(" = " in line for line in compiled.as_text().splitlines())
    moved = lambda compiled: compiled.cost_analysis()["bytes accessed"]
    plain = jax.jit(plain_step, donate_argnums=0).lower(state, batch).compile()
    mesh = jzero.make_mesh(devices=jax.devices()[:1])
    with pytest.warns(UserWarning, match="one device"):
        ours = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3), mesh=mesh)
    compiled = jzero.make_train_step(models.mlp_loss).lower(ours, batch).compile()
    assert count(compiled) <= 1.05 * count(plain) + 12  # and step_applied
    assert moved(compiled) <= 1.05 * moved(plain)


@pytest.mark.filterwarnings("ignore:The mesh has one device")
@pytest.mark.parametrize(
    ("stage", "precision"), default_for([(2, "fp16")], itertools.product([1, 2, 3], ["fp32", "fp16"]))
)
def test_one_device_sends_nothing(stage, precision):
    """XLA for CPUs copies what is summed over one device. Here is all that jzero sums and averages."""

    def loss_fn(params, batch):
        loss = models.mlp_loss(params, batch)
        aux = {"mean": loss, "sum": jzero.Summed(loss), "rows": jzero.PerExample(batch["x"][:, 0])}
        return jzero.Weighted(loss * 16, 16.0), aux

    mesh = jzero.make_mesh(devices=jax.devices()[:1], replica=1, data=1)
    config = jzero.ZeroConfig(stage=stage, precision=precision, replica_axis="replica")
    state = jzero.TrainState.create(params=make_params(), tx=shared.sgd(0.1, momentum=0.9))
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=2, clip_norm=1.0)
    assert find_collectives(step.lower(state, models.mlp_batch(16)).compile().as_text()) == []


class DoublesUpdates(TrainState):
    def apply_gradients(self, *, grads, **kwargs):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, jax.tree.map(lambda x: 2 * x, updates))
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state)


class DoublesUnderItsName(TrainState):
    @functools.wraps(TrainState.apply_gradients)
    def apply_gradients(self, *, grads, **kwargs):
        return DoublesUpdates.apply_gradients(self, grads=grads, **kwargs)


CLASSES = [(TrainState, 1), (DoublesUpdates, 2), (DoublesUnderItsName, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [slow("fp32"), "bf16"])
@pytest.mark.parametrize(("cls", "factor"), default_for(CLASSES[:2], CLASSES))  # `test_train_state.py` has the third
def test_whole_parameters_are_made_anew_unless_somebody_looks_at_updates(cls, factor, precision):
    """Stage 2: the sum is taken on shards, and gathered; a class that computes on updates gets whole ones."""
    batch, plain = models.mlp_batch(16), make_params()
    state = state_of(2, cls=cls, tx=shared.sgd(0.1), precision=precision)
    step = jzero.make_train_step(models.mlp_loss)
    program = step.lower(state, batch).compile().as_text()
    sums = re.findall(r"= (?:f32|bf16)\[127,11\]\S* add\(", program)
    assert bool(sums) == (cls is not TrainState)
    new, _ = step(state, batch)
    seen = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16) if precision == "bf16" else x, plain)
    grads = jax.jit(jax.grad(models.mlp_loss))(seen, batch)
    moved = jax.tree.map(
        lambda x, g: np.asarray(x) - np.float32(factor * 0.1) * np.asarray(g, np.float32), plain, grads
    )
    for found, expected in zip(jax.tree.leaves(jzero.gather_params(new)), jax.tree.leaves(moved), strict=True):
        atol = 1e-6 if precision == "fp32" else 2**-8  # half a bf16 unit at 1, and what its gradients differ by
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=atol, rtol=0)
