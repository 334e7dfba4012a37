"""`jax_numpy_dtype_promotion="strict"`: jzero mixes dtypes by casts alone.

Where nothing raises, promotion has changed nothing: what trains without trains to the bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests.tiers import default_for

RANDOM = np.random.default_rng(0)
PARAMS = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in {"w": (6, 9), "v": (9, 5)}.items()}
X = RANDOM.normal(size=(16, 6)).astype(np.float32)


def rows_loss(params, x):
    hidden = jnp.tanh(x.astype(params["w"].dtype) @ params["w"])
    return jnp.square(hidden @ params["v"]).mean(-1)


def mean_loss(params, x):
    return rows_loss(params, x).mean().astype(jnp.float32)


def weighted_loss(params, x):
    rows, real = rows_loss(params, x), x[:, 0] > 0
    return jzero.Weighted(jnp.where(real, rows, jnp.zeros_like(rows)).sum(), real.sum())


def loss_with_aux(params, x):
    rows = rows_loss(params, x)
    aux = {"half": jnp.abs(x).mean().astype(jnp.float16), "count": jzero.Summed((x > 0).sum())}
    return rows.mean(), aux | {"rows": jzero.PerExample(rows)}


FP32_SUMS = jzero.Precision(compute_dtype="bfloat16", reduce_dtype="float32", skip_nonfinite=True)
NO_FP32 = jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16")
FIXED_SCALE = jzero.Precision(compute_dtype="float16", accumulate_dtype="float32", loss_scale=8)
ON_HOST = {"optimizer": "host"}
BY_HOST = {"optimizer": "host", "compute": "host"}
CASES = {
    "bf16": (1, "bf16", {}, mean_loss, {"clip_norm": 0.1}),
    "fp16": (3, "fp16", {}, weighted_loss, {"accumulate_steps": 2}),
    "fp32 sums": (2, FP32_SUMS, ON_HOST, loss_with_aux, {"has_aux": True, "accumulate_steps": 2}),
    "no fp32": (3, NO_FP32, {}, mean_loss, {"accumulate_steps": 2, "reduce": "last"}),
    "a fixed scale": (0, FIXED_SCALE, BY_HOST, weighted_loss, {"clip_norm": 0.1}),
    "a delayed update": (1, "fp16", {**BY_HOST, "delay": 1}, mean_loss, {}),
}


strictly = jax.numpy_dtype_promotion("strict")


RMSPROP = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(0.1, momentum=0.9))


def sharded(stage, precision, offload=None, create=jzero.TrainState.create, tx=RMSPROP):
    """A sharded state of an optimizer that bears strict promotion; optax's Adam does not."""
    plain = create(params=PARAMS, tx=tx)
    config = jzero.ZeroConfig(
        stage=stage, precision=precision, persistence_threshold=0, offload=jzero.Offload(**(offload or {}))
    )
    return jzero.shard_train_state(plain, config=config)


@pytest.mark.parametrize("case", default_for(("bf16", "fp16", "fp32 sums", "a fixed scale"), CASES))
@strictly
def test_train_steps(case):
    """Programs of its own apply a delayed update, so that one runs."""
    stage, precision, offload, loss, options = CASES[case]
    train, state = jzero.make_train_step(loss, **options), sharded(stage, precision, offload)
    if case != "a delayed update":
        train.lower(state, X)
        return
    for _ in range(3):
        state, _ = train(state, X)
    jzero.gather_params(jzero.apply_pending(state), masters=True)
