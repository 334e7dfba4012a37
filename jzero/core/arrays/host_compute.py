"""Runs a function on the CPU of each device's host, inside of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jzero.core.base import compat
from jzero.core.base.types import PyTree
from jzero.core.jaxpr.interpret import evaluate


def run_on_cpu(fn: Callable[..., PyTree], args: Sequence[PyTree], out_memories: PyTree) -> PyTree:
    """Returns the results of a function, computed by the CPU of each device's host.

    jax's `compute_on` would have every constant in `fn` annotated with host memory, since operations may not mix
    memories. Inside the call only the CPU computes, so `fn` is traced without memories, and becomes one equation.

    Args:
      fn: The function.
      args: Its arguments, pytrees of arrays in either memory.
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
