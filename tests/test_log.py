"""The log names what takes long, at its start."""

import logging

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero


@pytest.fixture
def said(caplog):
    """Returns a function that returns what the log has got since the last call."""
    caplog.set_level(logging.INFO, "jzero")

    def messages():
        found = [x.getMessage() for x in caplog.records if x.name == "jzero"]
        caplog.clear()
        return found

    return messages


def make_state(key):
    return jzero.TrainState.create(params={"w": jax.random.normal(key, (64, 16))}, tx=optax.sgd(0.1))


def loss_fn(params, batch):
    return jnp.square(batch @ params["w"]).mean()


def test_from_a_state_to_files(said, tmp_path):
    state = jzero.init_train_state(make_state, jax.random.key(0), stage=2)
    assert said() == ["Tracing the function that makes the state.", "Making a state with 4.00 KiB on each device."]
    step = jzero.make_train_step(loss_fn, clip_norm=1.0)
    for rows in (8, 8, 8):
        state, _ = step(state, jnp.ones((rows, 64)))
    assert said() == ["Compiling make_train_step(loss_fn, clip_norm=1.0)."], "once"
    jzero.save_checkpoint(tmp_path / "saved", state)
    jzero.restore_checkpoint(tmp_path / "saved", state)
    assert said() == [f"Saving the state to {tmp_path / 'saved'}.", f"Restoring 4.00 KiB from {tmp_path / 'saved'}."]
    jzero.export_params(state, tmp_path / "x.safetensors")
    jzero.load_params(state, tmp_path / "x.safetensors")
    files = f"4.00 KiB to {tmp_path / 'x.safetensors'}", f"4.00 KiB of weights from {tmp_path / 'x.safetensors'}"
    assert said() == [f"Writing {files[0]}.", f"Reading {files[1]}."]
