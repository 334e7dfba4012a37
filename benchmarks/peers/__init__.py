"""What DeepSpeed and FSDP2 train for `benchmarks.torch_peers`: a small decoder, the same in all, from equal numbers.

The decoder is that of `tests/deepspeed_model.py`, larger: pre-norm, no bias on queries, keys and values (whose gradient
is rounding noise, which Adam would magnify), an untied head. Matrices multiply from the right.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VOCAB, WIDTH, LAYERS, HEADS, LENGTH, HIDDEN = 4096, 384, 6, 6, 128, 1536
PROCESSES, ROWS = 4, 16
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE, CLIP = 1e-3, 1.0
DEPTH = np.sqrt(2 * LAYERS)  # matrices that write to the residual stream start smaller by this
# In the order of drawing: shape, mean, standard deviation, and what that is divided by.
BLOCK = {
    "ln1.g": ((WIDTH,), 1, 0.05, 1),
    "ln1.b": ((WIDTH,), 0, 0.02, 1),
    "attn.wqkv": ((WIDTH, 3 * WIDTH), 0, 0.04, 1),
    "attn.wo": ((WIDTH, WIDTH), 0, 0.04, DEPTH),
    "attn.bo": ((WIDTH,), 0, 0.02, 1),
    "ln2.g": ((WIDTH,), 1, 0.05, 1),
    "ln2.b": ((WIDTH,), 0, 0.02, 1),
    "mlp.w1": ((WIDTH, HIDDEN), 0, 0.04, 1),
    "mlp.b1": ((HIDDEN,), 0, 0.02, 1),
    "mlp.w2": ((HIDDEN, WIDTH), 0, 0.04, DEPTH),
    "mlp.b2": ((WIDTH,), 0, 0.02, 1),
}
WEIGHTS: dict[str, tuple[tuple[int, ...], int, float, Any]] = {
    "wte": ((VOCAB, WIDTH), 0, 0.04, 1),
    "wpe": ((LENGTH, WIDTH), 0, 0.04, 1),
    **{f"blocks.{i}.{name}": leaf for i in range(LAYERS) for name, leaf in BLOCK.items()},
    "ln_f.g": ((WIDTH,), 1, 0.05, 1),
    "ln_f.b": ((WIDTH,), 0, 0.02, 1),
    "head.w": ((WIDTH, VOCAB), 0, 0.06, 1),
}


def weights() -> dict[str, np.ndarray]:
    """Returns the weights from which all start, fp32."""
    rng = np.random.default_rng(1234)
    draw = lambda shape, mean, std, divisor: mean + std * rng.standard_normal(shape) / divisor
    return {name: draw(*leaf).astype(np.float32) for name, leaf in WEIGHTS.items()}


def tokens(steps: int) -> np.ndarray:
    """Returns the global batch of every step, `[steps, ROWS, LENGTH + 1]`: an affine rule, broken one time in five."""
    rng, rows = np.random.default_rng(4321), (steps, ROWS)
    columns = [rng.integers(0, VOCAB, rows)]
    broken, random = rng.random((*rows, LENGTH)) < 0.2, rng.integers(0, VOCAB, (*rows, LENGTH))
    for i in range(LENGTH):
        columns.append(np.where(broken[..., i], random[..., i], (5 * columns[-1] + 17) % VOCAB))
    return np.stack(columns, axis=-1)


def own_rows(rank: int) -> slice:
    """Returns the rows of one process."""
    return slice(rank * ROWS // PROCESSES, (rank + 1) * ROWS // PROCESSES)
