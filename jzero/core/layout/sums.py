"""How values are summed over devices: the dtype, and the divisor."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jzero.core.base.types import DType
from jzero.core.config.precision import cast_dtype, is_float8

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sums:
    """How values of all devices with a part of the batch are summed.

    Attributes:
      axes: The mesh axes over which the batch is split.
      dtype: The dtype of sums of gradients; `None`: their own.
      predivide: The divisor of gradients before they are summed, so that sums over many devices fit into fp16.
      widens_bf16: Whether bf16 is summed as fp32, because the backend cannot sum bf16.
    """

    axes: tuple[str, ...]
    dtype: DType | None = None
    predivide: int = 1
    widens_bf16: bool = False

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else jnp.dtype(self.dtype).name
        return dtype + ("" if self.predivide == 1 else f"/{self.predivide}") or "own"

    def dtype_of(self, dtype: DType) -> DType:
        """Returns the dtype in which gradients of a dtype are summed."""
        dtype = cast_dtype(dtype, self.dtype)
        return jnp.float32 if self._widens(dtype) else dtype

    def prepare(self, x: jax.Array) -> jax.Array:
        """Returns a gradient in the form in which it is summed."""
        x = self.widen(x.astype(cast_dtype(x.dtype, self.dtype)))
        return x if self.predivide == 1 else x / self.predivide

    def widen(self, x: jax.Array) -> jax.Array:
        """Returns `x` in a dtype that the backend can sum over devices; 8 bits are too few for sums."""
        return x.astype(jnp.float32) if self._widens(x.dtype) else x

    def _widens(self, dtype: DType) -> bool:
        return (self.widens_bf16 and dtype == jnp.bfloat16) or is_float8(dtype)


def sum_along(x: T, *axes: str) -> T:
    """Sums arrays along mesh axes, except those with one device, where XLA for CPUs would copy all arrays."""
    shared = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return lax.psum(x, shared) if shared else x
