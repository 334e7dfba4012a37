"""Steps on virtual CPU devices that share few threads: with jax 0.10 two in flight can wait for each other for ever."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

import jzero
from jzero.core.base import compat

LOOP = """
import jax, jax.numpy as jnp, numpy as np, optax, jzero

params = {f"w{i}": np.eye(256, dtype=np.float32) / 2 for i in range(6)}


def loss_fn(params, batch):
    for i in range(6):
        batch = jnp.tanh(batch @ params[f"w{i}"])
    return jnp.square(batch).mean()


state = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
step = jzero.make_train_step(loss_fn)
for _ in range(80):  # without a look at the loss, as fast as steps can be called
    state, metrics = step(state, np.ones((64, 256), np.float32))
print(float(metrics["loss"]))
"""


@pytest.mark.slow
def test_a_loop_that_never_looks_at_the_loss_ends():
    """Without waiting, XLA ends the process after 40 s in most runs on two cores."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-c", LOOP], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < float(done.stdout) < 1


@pytest.mark.parametrize(
    ("version", "threads", "devices", "starves"),
    [
        ((0, 10, 2), "8", 8, True),
        ((0, 10, 2), "15", 8, True),
        ((0, 10, 2), "16", 8, False),
        ((0, 10, 2), "1", 1, False),
        ((0, 12, 0), "1", 8, False),
    ],
)
def test_who_has_to_wait(version, threads, devices, starves, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setenv("PJRT_NPROC", threads)
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    assert compat.starves_steps.__wrapped__(mesh) == starves


@pytest.mark.parametrize("said", ["all", "-1", "1.5", "1e3", "9" * 5000])
def test_a_number_of_threads_that_is_none_is_named(said, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setenv("PJRT_NPROC", said)
    compat.starves_steps.cache_clear()
    with pytest.raises(ValueError, match="`PJRT_NPROC` must be a number of threads"):
        compat.starves_steps(jzero.make_mesh())
    compat.starves_steps.cache_clear()
