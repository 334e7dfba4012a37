"""XLA options of one step, the program without any, and small compilations by the compilers of accelerators.

CI runs the latter where the extra `gpu` or `tpu` installs:

    python -m pytest -m compilers -k h200     # needs jzero[gpu]
    python -m pytest -m compilers -k v5e      # needs jzero[tpu]
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.analysis.collectives import find_collectives
from jzero.core.layout.route import route_of
from jzero.core.state.shard import abstract_train_state
from jzero.core.step import compiler_options as _compiler_options
from jzero.machines.topologies import topology_devices
from tests import models, shared


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


@pytest.mark.filterwarnings("ignore:The mesh has one device")
def test_one_device_sends_nothing():
    """XLA for CPUs copies what is summed over one device. Here is all that jzero sums and averages."""

    def loss_fn(params, batch):
        loss = models.mlp_loss(params, batch)
        aux = {"mean": loss, "sum": jzero.Summed(loss), "rows": jzero.PerExample(batch["x"][:, 0])}
        return jzero.Weighted(loss * 16, 16.0), aux

    mesh = jzero.make_mesh(devices=jax.devices()[:1], replica=1, data=1)
    config = jzero.ZeroConfig(stage=2, precision="fp16", replica_axis="replica")
    params = models.mlp_params(sizes=models.TWO_LAYERS)
    state = jzero.TrainState.create(params=params, tx=shared.sgd(0.1, momentum=0.9))
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=2, clip_norm=1.0)
    assert find_collectives(step.lower(state, models.mlp_batch(16)).compile().as_text()) == []


@pytest.mark.compilers
@pytest.mark.parametrize("topology", ["h200:8", "v5e:2x4"])
def test_step_compiles_for(topology):
    """Stage 3 in bf16: an eighth of the states, 16-bit gathers, no departure from the plan."""
    model = models.GPT(vocab=512, d_model=256, heads=4, layers=2)
    plain = jax.eval_shape(lambda: models.gpt_state(model, optax.adamw(1e-3)))
    batch = jax.ShapeDtypeStruct((16, models.SEQ + 1), jnp.int32)
    step = jzero.make_train_step(models.gpt_loss(model), remat="cheap")
    report = jzero.analyze(step, plain, batch, topology=topology, config=shared.config(3, precision="bf16"))
    report.verify()
    num_params = sum(x.size for x in jax.tree.leaves(plain.params))
    assert report.memory.arguments * 8 == pytest.approx(12 * num_params, rel=0.02)
    gathered = sum(row.elements for row in report.collectives if row.kind == "all-gather" and row.dtype == "bf16")
    assert gathered > num_params
    assert 2.5 * num_params < report.communication_elements < 3.5 * num_params
    assert report.exposed_communication is not None
    assert report.estimated is not None


@pytest.mark.compilers
@pytest.mark.parametrize(("bucket", "most"), [(None, 16 * 2**20), (8 * 2**20, 8 * 2**20)])
@pytest.mark.parametrize("topology", ["h200:8"])
def test_gradients_are_reduced_by_buckets(topology, bucket, most):
    """Twelve gradients of 2 MiB: one reduce-scatter takes as many as a bucket holds, not all, nor each its own."""
    names = [f"layer_{i}" for i in range(12)]
    params = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in names}
    mesh = jzero.make_mesh(devices=topology_devices(topology))
    plain = jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=optax.sgd(0.1)), params)
    config = jzero.ZeroConfig(stage=3, precision="bf16", reduce_bucket_bytes=bucket)
    state = abstract_train_state(plain, config=config, mesh=mesh)

    def loss_fn(params, batch):
        for name in names:
            batch = jnp.tanh(batch @ params[name])
        return batch.astype(jnp.float32).mean()

    batch = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
    text = jzero.make_train_step(loss_fn, remat="as_written").lower(state, batch).compile().as_text()
    starts = [line.split(" reduce-scatter-start(")[0] for line in text.splitlines() if " reduce-scatter-start(" in line]
    sizes = [2 * 2**20 * start.count("bf16[128,1024]") for start in starts]
    assert sum(sizes) == 12 * 2 * 2**20
    assert most // 2 < max(sizes) <= most
