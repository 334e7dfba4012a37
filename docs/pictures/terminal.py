"""What a terminal shows: a run watched by `jzero.Monitor`, as rich writes it."""

import io
import re
from typing import Any
from unittest import mock

import jax.numpy as jnp
import optax
from rich.console import Console

import jzero

STEPS = 30


def draw_monitor() -> str:
    """Returns a terminal in which a run goes on, after two thirds of its steps."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.square(batch @ params["w"] - 1).mean()

    plain = jzero.TrainState.create(
        params={"w": jnp.zeros((256, 256))}, tx=optax.adam(1e-3)
    )
    state = jzero.shard_train_state(plain, stage=3)
    step, batch = jzero.make_train_step(loss_fn), jnp.ones((64, 256))
    console = Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        force_jupyter=False,
        width=96,
        color_system="standard",
    )
    with (
        mock.patch("rich.console.Console", return_value=console),
        jzero.Monitor(total_steps=STEPS, tokens_per_step=64) as monitor,
    ):
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            monitor.log(metrics)
    written = console.export_html(inline_styles=True, code_format="{code}")
    # A terminal shows the last of the lines that the bar has written over one another.
    shown = re.findall(rf"{STEPS * 2 // 3}/{STEPS} <.*?(?=\d+/{STEPS} <)", written)[
        -1
    ]
    return f'<pre class="terminal">$ python train.py\n{shown}</pre>'
