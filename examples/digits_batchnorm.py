"""Trains a convolutional network with batch normalization on scikit-learn's digits, with ZeRO on every device.

    python examples/digits_batchnorm.py                      # stage 3, statistics of the whole batch
    python examples/digits_batchnorm.py --statistics local   # each device normalizes with its own part of the batch
    python examples/digits_batchnorm.py --stage 2

It runs on all accelerators if there are any, else on eight virtual CPU devices.

Batch normalization is the only common layer in which examples are not independent. `nn.BatchNorm(axis_name="data")`
takes means over ZeRO's axis, so the result equals that of one device with the whole batch, at the cost of a small
all-reduce per layer and pass. Without it, each device normalizes with its own examples: no all-reduce, noisier
statistics, and results that depend on the number of devices. Either way, jzero averages the running statistics over the
devices.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import jzero
from cpu_devices import use_virtual_cpu_devices
from memory_by_stage import bytes_on

NUM_TEST = 360  # of 1797 images, drawn at random

Batch = dict[str, np.ndarray]


class TrainState(train_state.TrainState):
    """Flax's own train state, with the running statistics."""

    batch_stats: Any


class ConvNet(nn.Module):
    """Maps images [B, 8, 8, 1] to logits [B, 10]."""

    width: int
    axis_name: str | None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for features in (self.width, 2 * self.width):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(4 * self.width)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def main() -> None:
    """Trains, and measures the accuracy on held-out images."""
    args = parse_args()
    use_virtual_cpu_devices()
    mesh = jzero.make_mesh()
    if args.batch_size % mesh.size:
        raise SystemExit(f"--batch-size must be a multiple of {mesh.size} (devices): got {args.batch_size}.")
    config = jzero.ZeroConfig(stage=args.stage, persistence_threshold=args.persistence_threshold)
    train, test = load_data()
    is_synced = args.statistics == "synced"
    model = ConvNet(args.width, axis_name="data" if is_synced else None)

    def make_state(key: jax.Array) -> TrainState:
        variables = model.init(key, train["images"][:1], train=False)
        return TrainState.create(apply_fn=model.apply, tx=optax.adamw(args.lr), **variables)

    def loss_fn(params: Any, batch: Any, *, batch_stats: Any) -> tuple[jax.Array, dict[str, Any]]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, batch["images"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, {"batch_stats": updated["batch_stats"]}

    def metric_fn(params: Any, batch: Any, *, batch_stats: Any) -> dict[str, jzero.Weighted]:
        logits = model.apply({"params": params, "batch_stats": batch_stats}, batch["images"], train=False)
        correct = (logits.argmax(-1) == batch["labels"]) * batch["counts"]
        return {"accuracy": jzero.Weighted(correct.sum(), batch["counts"].sum())}

    state = jzero.init_train_state(make_state, jax.random.key(args.seed), config=config, mesh=mesh)
    print(jzero.plan_of(state))
    # With local statistics it would warn that examples depend on each other, as they are meant to.
    step = jzero.make_train_step(loss_fn, has_aux=True, mutable=("batch_stats",), check_rows=is_synced)
    eval_step = jzero.make_eval_step(metric_fn, mutable=("batch_stats",))
    test = padded(test, args.batch_size)
    for epoch in range(1, args.epochs + 1):
        losses = []
        for batch in shuffled(train, args.batch_size, seed=(args.seed, epoch)):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        accuracy = eval_step(state, test)["accuracy"]
        print(f"epoch {epoch}: loss {np.mean(jax.device_get(losses)):.4f}, test accuracy {accuracy:.4f}")
    print_bytes(state)


def load_data() -> tuple[Batch, Batch]:
    """Returns the training and the test images, float32 [N, 8, 8, 1] from 0 to 1, with their labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    parts = slice(NUM_TEST, None), slice(NUM_TEST)
    train, test = ({"images": images[part], "labels": labels[part]} for part in parts)
    return train, test


def shuffled(data: Batch, batch_size: int, *, seed: tuple[int, int]) -> Iterator[Batch]:
    """Yields the batches of one epoch; drops the last rows if they do not fill a batch."""
    order = np.random.default_rng(seed).permutation(len(data["labels"]))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        rows = order[start : start + batch_size]
        yield {name: x[rows] for name, x in data.items()}


def padded(data: Batch, multiple: int) -> Batch:
    """Pads the data to a multiple of rows, so that devices can share it; `counts` is 0 for the padding."""
    num_rows = len(data["labels"])
    data = {**data, "counts": np.ones(num_rows, np.float32)}
    return {name: np.pad(x, [(0, -num_rows % multiple)] + [(0, 0)] * (x.ndim - 1)) for name, x in data.items()}


def print_bytes(state: TrainState) -> None:
    """Prints the bytes on the first device, with and without ZeRO."""
    device = jax.local_devices()[0]
    before, now = bytes_on(device, jzero.unshard_train_state(state)), bytes_on(device, state)
    print(f"state on each device: {now:,} bytes ({before:,} without ZeRO)")


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a network with batch normalization on digits, with ZeRO.")
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--statistics", choices=["synced", "local"], default="synced", help="of batch normalization")
    parser.add_argument("--persistence-threshold", type=int, default=1000, help="elements kept whole at stage 3")
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step over all devices")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
