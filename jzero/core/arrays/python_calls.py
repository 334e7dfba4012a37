"""Calls of Python functions while a program runs, with NumPy arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jzero.core.base import compat
from jzero.core.base.compat import IrResults, IrValue
from jzero.core.base.types import DType

PythonFunction: TypeAlias = Callable[[np.ndarray, tuple[int, ...], DType], np.ndarray]

_call_python_p = Primitive("jzero_call_python")


def call_python(fn: PythonFunction, x: jax.Array, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    """Calls a Python function while a program runs, once on each device, with a NumPy array.

    jax's callbacks place their arguments on a device of the CPU, and the function may then wait for a thread that waits
    for the function. This one sees NumPy arrays alone. It runs every time: no compiler merges equal calls. In programs
    for compile-only devices, an operation with a result of the same size takes its place.

    Args:
      fn: `fn(x, shape, dtype)`, which returns a NumPy array of these and never raises. A function of a module, since
        compiled programs keep it.
      x: Its argument.
      shape: The shape of the result.
      dtype: Its dtype.
    """
    return _call_python_p.bind(x, fn=fn, shape=tuple(shape), dtype=np.dtype(dtype))


def _stand_in(x: jax.Array, *, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    # No constant, which a compiler would not send to other devices.
    return (jax.lax.iota(np.float32, math.prod(shape)) * x.reshape(-1)[0]).reshape(shape).astype(dtype)


def _lower(
    ctx: mlir.LoweringRuleContext, x: IrValue, *, fn: PythonFunction, shape: tuple[int, ...], dtype: DType
) -> IrResults:
    if not compat.names_backend(ctx):
        return mlir.lower_fun(functools.partial(_stand_in, shape=shape, dtype=dtype), multiple_results=False)(ctx, x)
    return compat.emit_callback(ctx, lambda x: fn(x, shape, dtype), x)


_call_python_p.def_abstract_eval(lambda x, *, fn, shape, dtype: compat.array_type(shape, dtype))
mlir.register_lowering(_call_python_p, _lower)
