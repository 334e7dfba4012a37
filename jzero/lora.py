"""Adapters: `lora_a` and `lora_b` beside a `kernel`, with `y = x W + alpha / rank · x A B`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

__all__ = ["merged"]


def merged(rank: int, alpha: float) -> Callable[[str, Mapping[str, np.ndarray]], np.ndarray]:
    """Returns a function for `jzero.export_params(..., decode=)` that merges adapters into their kernels.

    The sum `W + alpha / rank · A B` is computed in fp32; parameters without adapters stay as they are.

    Args:
      rank: The rank of the adapters: the columns of `lora_a`.
      alpha: As the model has it.

    Returns:
      The function.

    Raises:
      ValueError: Adapters have another rank (when the function is called).

    Example:
      >>> import jzero.lora
      >>> leaves = {"kernel": np.ones((3, 2)), "lora_a": np.ones((3, 1)), "lora_b": np.ones((1, 2))}
      >>> jzero.lora.merged(rank=1, alpha=2.0)("layer/kernel", leaves)[0].tolist()
      [3.0, 3.0]
    """

    def decode(path: str, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        name = path.rpartition("/")[2]
        if name != "kernel" or "lora_a" not in leaves:
            return leaves[name]
        kernel, a, b = (leaves[x].astype(np.float32) for x in ("kernel", "lora_a", "lora_b"))
        if a.shape[-1] != rank:
            raise ValueError(f"`rank` must be that of the adapters beside {path}, {a.shape[-1]}: got {rank}.")
        return kernel + np.float32(alpha / rank) * (a @ b)

    return decode
