"""Numbers that NumPy draws, as arrays of jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def to_jax(x: Any, dtype: Any = None) -> jax.Array:
    """Returns what `jnp.asarray` returns, which would compile a program for each shape."""
    x = np.asarray(x)
    x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.device_put(x if dtype is None else x.astype(jax.dtypes.canonicalize_dtype(dtype)))


def initializer(seed: int) -> Callable[..., jax.Array]:
    """Returns an initializer of kernels that needs no key: each shape that jax draws compiles a program."""

    def init(key: Any, shape: Sequence[int], dtype: Any = np.float32, **_: Any) -> jax.Array:
        return to_jax(np.random.default_rng(seed).normal(size=shape) / math.sqrt(shape[0]), dtype)

    return init
