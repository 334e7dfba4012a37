"""Runs a function on the CPU of each device's host, inside of a trace."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jzero.core.base import compat
from jzero.core.base.compat import IrResults, IrValue
from jzero.core.base.types import DType, PyTree
from jzero.core.jaxpr.interpret import evaluate


def run_on_cpu(fn: Callable[..., PyTree], args: Sequence[PyTree], out_memories: PyTree) -> PyTree:
    """Returns the results of a function, computed by the CPU of each device's host.

    jax's `compute_on` would have every constant in `fn` annotated with host memory, since operations may not mix
    memories. Inside the call only the CPU computes, so `fn` is traced without memories, and becomes one equation.

    Args:
      fn: What the CPU computes, as `fn(*args)`.
      args: Pytrees of arrays in either memory.
      out_memories: A `jax.memory.Space` for each of its results, in their structure or the upper part of it.
    """
    leaves, treedef = jax.tree.flatten(tuple(args))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in leaves]
    call = jax.jit(lambda *leaves: fn(*treedef.unflatten(leaves)))
    closed, out = jax.make_jaxpr(call, return_shape=True)(*shapes)
    treedef_out = jax.tree.structure(out)

    def run(*inputs: jax.Array) -> PyTree:
        return jax.tree.unflatten(treedef_out, evaluate(closed, inputs, compat.bind))

    return compat.compute_on(run, compute_type="device_host", out_memory_spaces=out_memories)(*leaves)


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
