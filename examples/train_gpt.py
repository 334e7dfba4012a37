"""Trains a byte-level GPT on the sources of Python's standard library, with ZeRO on every device.

    python examples/train_gpt.py                       # Flax Linen, scanned blocks, stage 3
    python examples/train_gpt.py --framework nnx       # the NNX twin
    python examples/train_gpt.py --no-scan --stage 2   # a Python loop over blocks
    python examples/train_gpt.py --offload             # masters and moments in host memory
    python examples/train_gpt.py --nodes 2 --integers  # as on two hosts with a slow network between them
    python examples/train_gpt.py --checkpoints ckpt    # resumes where it stopped, at any stage, on any devices
    python examples/train_gpt.py --log run.jsonl --tensorboard run --profile run

It runs on all accelerators if there are any, else on eight virtual CPU devices. jzero adds a mesh, a config and a few
calls to an ordinary training script, in `main` and `train`.
"""

import argparse
import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import rich

import figures
import gpt_linen
import gpt_nnx
import jzero
import memory_by_stage
from cpu_devices import use_virtual_cpu_devices
from gpt import GPTConfig
from text_data import Corpus, load_corpus, sample_batch

FRAMEWORKS = {"linen": gpt_linen, "nnx": gpt_nnx}
NO_SLOW_LINKS = {
    "node_axis": None,
    "secondary_params": False,
    "secondary_grads": False,
    "quantization": jzero.Quantization(),
}
VALIDATION_SEED = 0  # the validation batches are the same in every run

LossFn = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass
class History:
    """Losses in nats per byte: one for each training step, and (steps done, loss) for each evaluation. A sink."""

    train: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        if "loss" in values:
            self.train.append(values["loss"])
        else:
            self.validation.append((step, values["validation"]))


def main() -> None:
    """Trains, then compares the memory of the four stages."""
    args = parse_args()
    use_virtual_cpu_devices()
    mesh = jzero.make_mesh(node=args.nodes, data=-1) if args.nodes > 1 else jzero.make_mesh()
    parts = mesh.size * args.accumulate_steps
    if args.batch_size % parts:
        raise SystemExit(f"--batch-size must be a multiple of {parts} (devices x steps): got {args.batch_size}.")
    config = jzero.ZeroConfig(
        stage=args.stage,
        precision=args.precision,
        persistence_threshold=args.persistence_threshold,
        offload=jzero.Offload(optimizer="host" if args.offload else "none"),
        **slow_links(args),
    )

    framework = FRAMEWORKS[args.framework]
    make_state = framework.make_state_fn(model_config(args), make_optimizer(args))
    loss_fn = framework.make_loss_fn(model_config(args))

    print(f"creating the state at stage {args.stage}", flush=True)
    state = jzero.init_train_state(make_state, jax.random.key(args.seed), config=config, mesh=mesh)
    print(jzero.plan_of(state))
    with checkpoint_manager(args) as manager:
        state, history = train(state, loss_fn, load_corpus(), manager, args)

    one_level = dataclasses.replace(config, **NO_SLOW_LINKS)  # which every stage has
    rows = memory_by_stage.measure(state, framework.params_and_opt_state, config=one_level, mesh=jzero.make_mesh())
    rich.print(memory_by_stage.as_table(rows, num_devices=mesh.size))
    args.out.mkdir(parents=True, exist_ok=True)
    figures.save_losses(history.train, history.validation, args.out / "loss.png")
    figures.save_memory(rows, args.out / "memory.png")
    print(f"figures: {args.out / 'loss.png'} {args.out / 'memory.png'}")
    (_, untrained), (_, trained) = history.validation[0], history.validation[-1]
    print(f"validation loss {trained:.3f} nats per byte (untrained {untrained:.3f})")


def slow_links(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what sends less over slow links: hops between nodes once per step, and integers."""
    integers = jzero.Quantization(gather="int8" if args.stage == 3 else "none", reduce="int8")
    fields = {"quantization": integers} if args.integers else {}
    if args.nodes == 1:
        return fields
    return {**fields, "node_axis": "node", "secondary_params": args.stage == 3, "secondary_grads": args.stage > 1}


def checkpoint_manager(args: argparse.Namespace) -> Any:
    """Returns the checkpoint manager, or an empty context without `--checkpoints`."""
    if args.checkpoints is None:
        return contextlib.nullcontext()
    return jzero.CheckpointManager(args.checkpoints, max_to_keep=2, save_interval_steps=args.save_every)


def train(
    state: Any,
    loss_fn: LossFn,
    corpus: Corpus,
    manager: jzero.CheckpointManager | None,
    args: argparse.Namespace,
) -> tuple[Any, History]:
    """Trains from an untrained state or the newest checkpoint; returns the trained state and the losses."""
    step = jzero.make_train_step(loss_fn, accumulate_steps=args.accumulate_steps, clip_norm=1.0)
    eval_step = jzero.make_eval_step(lambda model, batch: {"loss": loss_fn(model, batch)})
    held_out = list(itertools.islice(Batches(corpus.validation, args, seed=VALIDATION_SEED), args.eval_batches))
    print("evaluating the untrained model", flush=True)
    history = History(validation=[(0, evaluate(eval_step, state, held_out))])
    data, done = Batches(corpus.train, args, seed=args.seed), 0
    if manager is not None and manager.latest_step() is not None:
        state = manager.restore(state, data_iterator=data, donate=True)
        done = manager.latest_step()
        print(f"resuming from step {done}")
    print("compiling the first step", flush=True)
    with make_monitor(history, args, start_step=done) as monitor:
        for index in range(done + 1, args.steps + 1):
            state, metrics = step(state, next(data))
            monitor.log(metrics)
            if manager is not None:
                manager.save(state, step=index, data_iterator=data)
            if index % args.eval_every == 0 or index == args.steps:
                with monitor.pause():
                    monitor.write({"validation": evaluate(eval_step, state, held_out)})
    return state, history


def make_monitor(history: History, args: argparse.Namespace, *, start_step: int) -> jzero.Monitor:
    """Returns the monitor, which shows and records the run."""
    sinks = [history]
    if args.log is not None:
        sinks.append(jzero.JsonLines(args.log))
    if args.tensorboard is not None:
        sinks.append(jzero.TensorBoard(args.tensorboard))
    return jzero.Monitor(
        args.steps,
        sinks=sinks,
        tokens_per_step=args.batch_size * args.seq_len,
        start_step=start_step,
        show=("loss", "validation"),
        profile_dir=args.profile,
    )


def evaluate(eval_step: Callable[..., Any], state: Any, held_out: list[np.ndarray]) -> float:
    """Returns the mean loss over the held-out batches."""
    losses = [eval_step(state, batch)["loss"] for batch in held_out]
    return float(np.mean(jax.device_get(losses)))


class Batches:
    """Endless random batches, the same for the same seed; a checkpoint keeps their position."""

    def __init__(self, text: np.ndarray, args: argparse.Namespace, *, seed: int) -> None:
        self.text, self.args = text, args
        self.rng = np.random.default_rng(seed)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> np.ndarray:
        return sample_batch(self.text, self.rng, batch_size=self.args.batch_size, seq_len=self.args.seq_len)

    def get_state(self) -> dict[str, Any]:
        return dict(self.rng.bit_generator.state)

    def set_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Returns AdamW with a linear warm-up and a cosine decay to a tenth of the peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=args.lr,
        warmup_steps=max(1, args.steps // 10),
        decay_steps=max(2, args.steps),
        end_value=args.lr / 10,
    )
    return optax.adamw(schedule, b2=0.98, weight_decay=0.1)


def model_config(args: argparse.Namespace) -> GPTConfig:
    """Returns the sizes of the model from the command line."""
    return GPTConfig(
        d_model=args.d_model,
        num_layers=args.layers,
        num_heads=args.heads,
        seq_len=args.seq_len,
        scan=args.scan,
        remat=args.remat,
    )


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with ZeRO.")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="linen")
    parser.add_argument("--stage", type=int, choices=memory_by_stage.STAGES, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--offload", action="store_true", help="keep the optimizer state on the host")
    parser.add_argument("--nodes", type=int, default=1, help="hosts, or as many groups of devices on one")
    parser.add_argument("--integers", action="store_true", help="gather and reduce int8")
    parser.add_argument("--accumulate-steps", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--persistence-threshold", type=int, default=1000, help="elements kept whole at stage 3")
    parser.add_argument("--scan", action=argparse.BooleanOptionalAction, default=True, help="scan over stacked blocks")
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=False, help="recompute blocks")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step over all devices")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--eval-every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=pathlib.Path, help="folder to save to, and to go on from")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("train_gpt_out"), help="folder for figures")
    parser.add_argument("--log", type=pathlib.Path, help="file for the metrics, one JSON object per line")
    parser.add_argument("--tensorboard", type=pathlib.Path, help="folder for the metrics, for TensorBoard")
    parser.add_argument("--profile", type=pathlib.Path, help="folder for a profile of steps 10 to 12")
    return parser.parse_args()


if __name__ == "__main__":
    main()
