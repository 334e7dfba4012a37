"""What one of two processes may do otherwise than the other: each must be told to both."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from jzero.core.processes import agree as _processes
from tests.multiprocess_states import ROWS, config, message


def disagree(folder: pathlib.Path) -> dict[str, Any]:
    """Has the second process disagree in one thing after the other; returns what each of the two is told.

    Both must be told of it to go on with the next.
    """
    _processes.LINGER_S = 0.1  # the test waits for neither of them to die
    second = jax.process_index()
    attempts = {**states_that_differ(second), **steps_that_differ(second), **batches_that_differ(second)}
    results: dict[str, Any] = {name: message(attempt) for name, attempt in attempts.items()}
    evaluate = jzero.make_eval_step(small_loss)
    state = small_state()
    evaluate.lower(state, BATCH[: 8 * (1 + second)])  # runs nothing, so nothing is compared
    regardless = jzero.make_train_step(small_loss, clip_norm=1.0 + second, check_processes=False)
    losses = [evaluate(state, BATCH), regardless(small_state(), BATCH)[1]["loss"]]
    results["losses"] = [float(x) for x in losses]
    return results


def states_that_differ(second: int) -> dict[str, Any]:
    """Returns what makes states that are others in the second process."""

    def born(key: Any = 0, **kwargs: Any) -> None:
        jzero.init_train_state(lambda _: plain_state(**kwargs), jax.random.key(key), config=config(3))

    return {
        "stage": lambda: jzero.shard_train_state(plain_state(), stage=2 + second),
        "values": lambda: small_state(scale=1.0 + second, precision="bf16"),
        "key": lambda: born(second),
        "initialiser": lambda: born(scale=3.0 + second),
        "new value": lambda: jzero.set_full_param(small_state(), "head", value=np.full((8, 16), second)),
    }


def steps_that_differ(second: int) -> dict[str, Any]:
    """Returns what runs other programs in the second process."""

    def train(loss_fn: Any = small_loss, rate: float = 0.1, **kwargs: Any) -> None:
        jzero.make_train_step(loss_fn, **kwargs)(small_state(rate=rate), BATCH)

    def fails(params: Any, batch: Any) -> jax.Array:
        if second:
            raise ValueError("not today")
        return small_loss(params, batch)

    make_other = jzero.make_eval_step if second else jzero.make_train_step
    return {
        "learning rate": lambda: train(rate=0.1 + second),
        "clip_norm": lambda: train(clip_norm=1.0 + second),
        "limit": lambda: jzero.fill_memory(
            jzero.make_train_step(small_loss), small_state(), BATCH, hbm_bytes=1e9 * (1 + second), confirm=False
        ),
        "elsewhere": lambda: make_other(small_loss)(small_state(), BATCH),
        "failure": lambda: train(fails),
    }


def batches_that_differ(second: int) -> dict[str, Any]:
    """Returns what gives steps other batches in the second process."""

    def evaluate(batch: Any, rng: Any) -> None:
        with_key = lambda params, batch, rng: small_loss(params, batch)
        jzero.make_eval_step(with_key)(small_state(), batch, rng=rng)

    def later() -> None:
        state, batch = small_state(), BATCH
        step = jzero.make_train_step(small_loss)
        for _ in range(3):
            state, _ = step(state, batch)
        step(state, batch[: 16 - 8 * second])

    return {
        "rng": lambda: evaluate(BATCH, jax.random.key(second)),
        "later": later,
    }


BATCH = np.ones((ROWS, 8), np.float32)


def plain_state(*, scale: float = 1.0, rate: float = 0.1) -> jzero.TrainState:
    params = {"body": jnp.ones((8, 8)), "head": jnp.full((8, 16), scale)}
    return jzero.TrainState.create(params=params, tx=optax.sgd(rate, momentum=0.9))


def small_state(*, precision: Any = "fp32", **kwargs: Any) -> Any:
    chosen = dataclasses.replace(config(3), precision=precision)
    return jzero.shard_train_state(plain_state(**kwargs), config=chosen)


def small_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.square(batch @ params["body"] @ params["head"]).mean()
