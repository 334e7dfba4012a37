"""Trains a model of nothing but `jax.numpy` with ZeRO: parameters in a dictionary, a loss, no Flax.

    python examples/plain_jax.py                    # bf16, both loops below
    python examples/plain_jax.py --precision fp16   # with a loss scale; `make_train_step` alone
    python examples/plain_jax.py --stage 2

The model predicts the next byte of the standard library's sources from the bytes before it. It is trained twice from
the same state: by `jzero.make_train_step`, with the collectives of the stage, and by a hand-written step around
`jax.grad`, where the compiler chooses the collectives. It runs on all accelerators if there are any, else on eight
virtual CPU devices.

Shapes: B batch, C context, E embedding, D hidden width, L layers, V vocabulary (256 bytes).
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jzero
from cpu_devices import use_virtual_cpu_devices
from memory_by_stage import bytes_on
from text_data import load_corpus, sample_batch

VOCAB_SIZE = 256
EMBED_SIZE = 32

Params = dict[str, jax.Array]
Step = Callable[[jzero.TrainState, np.ndarray], tuple[jzero.TrainState, jax.Array]]


def main() -> None:
    """Trains with one loop or with both, and compares them."""
    args = parse_args()
    use_virtual_cpu_devices()
    mesh = jzero.make_mesh()
    if args.batch_size % mesh.size:
        raise SystemExit(f"--batch-size must be a multiple of {mesh.size} (devices): got {args.batch_size}.")
    config = jzero.ZeroConfig(
        stage=args.stage, precision=args.precision, persistence_threshold=args.persistence_threshold
    )
    params = init_params(jax.random.key(args.seed), args)
    plain = jzero.TrainState.create(params=params, tx=optax.adamw(args.lr))
    print(jzero.plan_train_state(plain, config=config, mesh=mesh))

    loops = {"make_train_step": zero_step()}
    if args.precision != "fp16":  # a hand-written step does not scale the loss
        loops["jax.grad"] = own_step()
    for name, step in loops.items():
        state = jzero.shard_train_state(plain, config=config, mesh=mesh)
        state, losses = train(state, step, args)
        print(f"{name}: loss {np.mean(losses[-10:]):.4f} nats per byte (at first {losses[0]:.4f})")
    device = jax.local_devices()[0]
    before, now = bytes_on(device, jzero.unshard_train_state(state)), bytes_on(device, state)
    print(f"state on each device: {now:,} bytes ({before:,} without ZeRO, in fp32)")


def init_params(key: jax.Array, args: argparse.Namespace) -> Params:
    """Returns the parameters; those of the hidden layers are stacked, for `lax.scan`."""
    keys = iter(jax.random.split(key, 4))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])

    return {
        "embed": normal(VOCAB_SIZE, EMBED_SIZE) * 4,
        "input": normal(args.context * EMBED_SIZE, args.width),  # [C*E, D]
        "layers": normal(args.layers, args.width, args.width),  # [L, D, D]
        "head": normal(args.width, VOCAB_SIZE) * 0.1,  # [D, V]
    }


def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats of the last byte of each row [C + 1], given the bytes before it."""
    context, target = batch[:, :-1], batch[:, -1]
    x = params["embed"][context].reshape(len(context), -1) @ params["input"]  # [B, D]

    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(x) @ kernel, None  # jzero gathers one layer at a time, inside the loop

    x, _ = lax.scan(layer, x, params["layers"])
    logits = (jax.nn.relu(x) @ params["head"]).astype(jnp.float32)  # [B, V]
    return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()


def zero_step() -> Step:
    """Returns a step of `make_train_step`."""
    train_step = jzero.make_train_step(loss_fn)

    def step(state: jzero.TrainState, batch: np.ndarray) -> tuple[jzero.TrainState, jax.Array]:
        state, metrics = train_step(state, batch)
        return state, metrics["loss"]

    return step


def own_step() -> Step:
    """Returns an ordinary jax step, except for `natural_params`: parameters without padding."""

    @jax.jit(donate_argnums=0)
    def step(state: jzero.TrainState, batch: np.ndarray) -> tuple[jzero.TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(jzero.natural_params(state), batch)
        return state.apply_gradients(grads=grads), loss

    return step


def batches(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yields random windows of the text, the same in every run, int32 [B, C + 1]."""
    text, rng = load_corpus().train, np.random.default_rng(args.seed)
    for _ in range(args.steps):
        yield sample_batch(text, rng, batch_size=args.batch_size, seq_len=args.context)


def train(state: jzero.TrainState, step: Step, args: argparse.Namespace) -> tuple[jzero.TrainState, Any]:
    """Returns the trained state and the loss of every step."""
    losses = []
    for batch in batches(args):
        state, loss = step(state, batch)
        losses.append(loss)
    return state, jax.device_get(losses)


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a model of plain jax.numpy with ZeRO.")
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--persistence-threshold", type=int, default=1000, help="elements kept whole at stage 3")
    parser.add_argument("--context", type=int, default=16, help="bytes to predict the next one from")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="examples per step over all devices")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
