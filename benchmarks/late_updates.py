"""Updates that nobody waits for: what they cost in loss, and how long steps still wait.

    python -m benchmarks.late_updates losses [--seeds 0 1 2] [--steps 300] [--chart FILE.svg]
    python -m benchmarks.late_updates waits [--share 0.7]

`losses` trains a small GPT on bytes, each way from the same seeds on the same batches, and prints the mean of the last
50 losses. `waits` makes the records of a state slow, so that an update takes a share of the time of loss and gradients,
and prints how long steps take, and which share of the update they wait for, one option after another in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jzero
from benchmarks.quantized_training import LENGTH, ROWS, loss_fn, make_params
from examples.text_data import load_corpus, sample_batch
from jzero.core.state.record_states import records_of

TAIL, PLAIN = 50, 64
HOST = jzero.Offload(optimizer="host", compute="host")
LATE = dataclasses.replace(HOST, delay=1)


def flow(**options: Any) -> jzero.Offload:
    """Returns ZenFlow with its defaults but some."""
    return dataclasses.replace(HOST, zenflow=jzero.ZenFlow(**options))


VARIANTS: dict[str, tuple[jzero.Offload, jzero.Offload | None]] = {
    "Adam": (HOST, None),
    "delay=1": (LATE, None),
    f"delay=1 after {PLAIN} steps": (HOST, LATE),
    "ZenFlow": (flow(), None),
    "ZenFlow, waits": (flow(overlap=False), None),
    f"ZenFlow after {PLAIN} steps": (flow(warm_up_steps=PLAIN), None),
}
"""For each way the offload at the start, and after some steps if that changes."""


def config_of(offload: jzero.Offload) -> jzero.ZeroConfig:
    """Returns the configuration of all runs."""
    return jzero.ZeroConfig(stage=3, precision="bf16", persistence_threshold=0, offload=offload)


def losses_of(variant: str, seed: int, steps: int, text: np.ndarray) -> list[float]:
    """Returns the losses of one run."""
    start, then = VARIANTS[variant]
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 20, steps, 3e-4)
    plain = jzero.TrainState.create(params=make_params(seed), tx=optax.adamw(schedule))
    state = jzero.shard_train_state(plain, config=config_of(start))
    step, rng, losses = jzero.make_train_step(loss_fn, clip_norm=1.0), np.random.default_rng(seed), []
    for number in range(steps):
        if then is not None and number == PLAIN:
            state = jzero.shard_train_state(state, config=config_of(then), donate=True)
        state, metrics = step(state, sample_batch(text, rng, batch_size=ROWS, seq_len=LENGTH))
        losses.append(float(metrics["loss"]))
    return losses


def draw(losses: dict[str, list[list[float]]], path: str) -> None:
    """Draws the mean of each way over seeds, each point the mean of 20 steps."""
    import matplotlib.pyplot as plt  # only for the chart

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for variant, runs in losses.items():
        mean = np.mean(runs, axis=0)
        smooth = np.convolve(mean, np.ones(20) / 20, "valid")
        axes.plot(np.arange(len(smooth)) + 20, smooth, label=variant)
    axes.set(xlabel="step", ylabel="loss, mean of 20 steps and of the seeds", ylim=(None, 4))
    axes.legend()
    figure.savefig(path)


def print_losses(options: argparse.Namespace) -> None:
    """Prints one line for each run, and one for each way."""
    text = load_corpus().train
    losses: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    for variant, runs in losses.items():
        off = []
        for k, seed in enumerate(options.seeds):
            begun = time.perf_counter()
            runs.append(losses_of(variant, seed, options.steps, text))
            tail, plain = (statistics.mean(x[-TAIL:]) for x in (runs[-1], losses["Adam"][k]))
            off.append(tail - plain)
            print(
                f"{variant:24} seed {seed}  {tail:.4f}  {off[-1]:+.4f}  {time.perf_counter() - begun:.0f} s", flush=True
            )
        print(f"{variant:24} mean    {statistics.mean(off):+.4f}", flush=True)
        if options.chart:
            draw({name: x for name, x in losses.items() if x}, options.chart)


def slowed(fn: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Returns a function that takes some more time, in which it uses no processor."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        result = jax.block_until_ready(fn(*args, **kwargs))
        time.sleep(seconds)
        return result

    return slow


def print_waits(options: argparse.Namespace) -> None:
    """Prints the seconds of steps, in turns, where loss and gradients take a second."""
    text = load_corpus().train
    rng = np.random.default_rng(0)
    offloads = {"at once": None, "delay=1": LATE, "ZenFlow": flow(update_interval=2, select_interval=1000)}
    runs: dict[str, tuple[Any, Any]] = {}
    for name, offload in offloads.items():
        # Records are outside of programs in all three, so that the same store can be slow.
        config = config_of(offload or dataclasses.replace(LATE, delay=0, optimizer="disk", path=options.folder))
        state = jzero.shard_train_state(
            jzero.TrainState.create(params=make_params(0), tx=optax.adamw(1e-3)), config=config
        )
        step = jzero.make_train_step(loss_fn)
        for _ in range(4):
            state, _ = step(state, sample_batch(text, rng, batch_size=ROWS, seq_len=LENGTH))
        (program,) = step._jits.values()
        program.gradients = slowed(program.gradients, 1.0)
        records = records_of(state)
        store = records.pipeline.store
        store.read = slowed(store.read, 2 * options.share / len(records.index))  # two threads read
        runs[name] = state, step
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shares: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name in list(runs):
            state, step = runs[name]
            begun = time.perf_counter()
            state, metrics = step(state, sample_batch(text, rng, batch_size=ROWS, seq_len=LENGTH))
            jax.block_until_ready(metrics["loss"])
            seconds[name].append(time.perf_counter() - begun)
            rates = {key.partition("_")[2]: float(x) for key, x in metrics["perf"].items()}
            shares[name] += [rates["wait_share"]] if rates["read_bytes_per_s"] else []
            runs[name] = state, step
    for name in runs:
        took, share = statistics.median(seconds[name]), statistics.median(shares[name])
        print(f"{name:12} {took:.2f} s a step, waits for {share:.3f} of each update", flush=True)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    losses = commands.add_parser("losses")
    losses.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    losses.add_argument("--steps", type=int, default=300)
    losses.add_argument("--chart")
    losses.set_defaults(run=print_losses)
    waits = commands.add_parser("waits")
    waits.add_argument("--share", type=float, default=0.7, help="seconds of an update, for one second of gradients")
    waits.add_argument("--rounds", type=int, default=7)
    waits.add_argument("--folder", default=".", help="for the state that is updated at once")
    waits.set_defaults(run=print_waits)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    options.run(options)


if __name__ == "__main__":
    main()
