"""One small compilation by each accelerator's compiler: CI runs these where the extra `gpu` or `tpu` installs.

python -m pytest -m compilers -k h200     # needs jzero[gpu]
python -m pytest -m compilers -k v5e      # needs jzero[tpu]
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from tests import models

pytestmark = pytest.mark.compilers


@pytest.mark.parametrize("topology", ["h200:8", "v5e:2x4"])
def test_step_compiles_for(topology):
    """Stage 3 in bf16: an eighth of the states, 16-bit gathers, no departure from the plan."""
    model = models.GPT(vocab=512, d_model=256, heads=4, layers=2)
    plain = jax.eval_shape(lambda: models.gpt_state(model, optax.adamw(1e-3)))
    config = jzero.ZeroConfig(stage=3, precision="bf16", persistence_threshold=0)
    batch = jax.ShapeDtypeStruct((16, models.SEQ + 1), jnp.int32)
    step = jzero.make_train_step(models.gpt_loss(model))
    report = jzero.analyze(step, plain, batch, topology=topology, config=config)
    report.verify()
    num_params = sum(x.size for x in jax.tree.leaves(plain.params))
    assert report.memory.arguments * 8 == pytest.approx(12 * num_params, rel=0.02)
    gathered = sum(row.elements for row in report.collectives if row.kind == "all-gather" and row.dtype == "bf16")
    assert gathered > num_params
    assert report.exposed_communication is not None
    assert report.reckoned is not None
