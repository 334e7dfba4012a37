"""One small compilation by each accelerator's compiler: CI runs these where the extra `gpu` or `tpu` installs.

python -m pytest -m compilers -k h200     # needs jzero[gpu]
python -m pytest -m compilers -k v5e      # needs jzero[tpu]
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.machines.topologies import topology_devices
from jzero.state.shard import abstract_train_state
from tests import models

pytestmark = pytest.mark.compilers


@pytest.mark.parametrize("topology", ["h200:8", "v5e:2x4"])
def test_step_compiles_for(topology):
    """Stage 3 in bf16: an eighth of the states, 16-bit gathers, no departure from the plan."""
    model = models.GPT(vocab=512, d_model=256, heads=4, layers=2)
    plain = jax.eval_shape(lambda: models.gpt_state(model, optax.adamw(1e-3)))
    config = jzero.ZeroConfig(stage=3, precision="bf16", persistence_threshold=0)
    batch = jax.ShapeDtypeStruct((16, models.SEQ + 1), jnp.int32)
    step = jzero.make_train_step(models.gpt_loss(model), remat="cheap")
    report = jzero.analyze(step, plain, batch, topology=topology, config=config)
    report.verify()
    num_params = sum(x.size for x in jax.tree.leaves(plain.params))
    assert report.memory.arguments * 8 == pytest.approx(12 * num_params, rel=0.02)
    gathered = sum(row.elements for row in report.collectives if row.kind == "all-gather" and row.dtype == "bf16")
    assert gathered > num_params
    assert 2.5 * num_params < report.communication_elements < 3.5 * num_params
    assert report.exposed_communication is not None
    assert report.estimated is not None


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
