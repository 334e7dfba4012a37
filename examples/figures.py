"""The two figures of the example, drawn without a display."""

import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure

from memory_by_stage import DeviceBytes


def save_losses(train: Sequence[float], validation: Sequence[tuple[int, float]], path: pathlib.Path) -> None:
    """Draws the training loss of every step and the validation loss after some of them."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(train) + 1), train, linewidth=0.8, label="train")
    axes.plot(*zip(*validation, strict=True), marker="o", markersize=4, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.legend()
    figure.savefig(path, dpi=150)


def save_memory(rows: Sequence[DeviceBytes], path: pathlib.Path) -> None:
    """Draws one bar for each way of training, its terms stacked."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    labels = [row.label for row in rows]
    bottom = [0.0] * len(rows)
    for field, legend in (("params", "params"), ("grads", "grads (plan)"), ("opt_state", "optimizer")):
        heights = [getattr(row, field) / 1e6 for row in rows]
        axes.bar(labels, heights, bottom=bottom, label=legend)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("MB per device")
    axes.legend()
    figure.savefig(path, dpi=150)
