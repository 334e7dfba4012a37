"""Functions of a loss that bring their own derivative, where a walk has to look into them.

[Note: Meshes in types]
The loss is traced outside of the step's `shard_map`. What a sharding constraint returns carries its mesh in the type,
with ZeRO's axes as automatic as all others, and so does all that is computed from it. Inside, ZeRO's axes are manual.
An equation without jaxprs takes the types of its new inputs; one that holds jaxprs takes theirs, which then do not
match. These are walked, whatever they hold, and so are functions that bring their own derivative: the rule for it, too,
is traced where the function was, and walked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jzero import _compat

__all__ = ["Beside", "instantiated", "with_own_derivative"]

Equation = Any
Function = Callable[..., list[Any]]
Evaluate = Callable[[Any, Sequence[Any]], list[Any]]


def with_own_derivative(eqn: Equation, evaluate: Evaluate) -> Function:
    """Returns the function of a `custom_jvp_call` or `custom_vjp_call`, with its derivative.

    Args:
      eqn: The equation.
      evaluate: Given a jaxpr and its inputs, returns its outputs. The function and its derivative are computed by it.
    """
    own = _Own(eqn, evaluate)
    if eqn.primitive.name == "custom_jvp_call":
        by_jvp = jax.custom_jvp(own.call)
        by_jvp.defjvp(own.jvp, symbolic_zeros=True)
        return by_jvp
    by_vjp = jax.custom_vjp(own.call)
    by_vjp.defvjp(own.forward, own.backward, symbolic_zeros=True)
    return by_vjp


@dataclasses.dataclass(frozen=True)
class _Own:
    """Such a function and its rules, evaluated anew."""

    eqn: Equation
    evaluate: Evaluate

    def call(self, *inputs: Any) -> list[Any]:
        return self.evaluate(self.eqn.params["call_jaxpr"], inputs)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = {i: t for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)}

        def both(primals: Sequence[Any], moving: dict[int, Any]) -> Any:
            return jax.jvp(functools.partial(self._of, primals), ({i: primals[i] for i in moving},), (moving,))

        outputs, moved = self._traced(both, list(primals), moving)
        return outputs, moved

    def forward(self, *inputs: CustomVJPPrimal) -> tuple[list[Any], Any]:
        wanted = [i for i, x in enumerate(inputs) if x.perturbed]

        def both(values: Sequence[Any]) -> Any:
            return jax.vjp(functools.partial(self._of, values), {i: values[i] for i in wanted})

        outputs, pullback = self._traced(both, [x.value for x in inputs])
        return outputs, pullback

    def backward(self, pullback: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        counts = {i: instantiated(c) for i, c in enumerate(cotangents) if jnp.issubdtype(c.dtype, jnp.inexact)}

        def pull(pullback: Any, counts: dict[int, Any]) -> Any:
            return pullback([counts.get(i, np.zeros(c.shape, jax.dtypes.float0)) for i, c in enumerate(cotangents)])[0]

        found = self._traced(pull, pullback, counts)
        return tuple(found.get(i) for i in range(len(self.eqn.invars)))

    def _of(self, inputs: Sequence[Any], some: dict[int, Any]) -> list[Any]:
        """The function of some inputs, the others given."""
        return _compat.bind(self.eqn, [some.get(i, x) for i, x in enumerate(inputs)])

    def _traced(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)`, traced where the equation was."""
        with _compat.where_traced(self.eqn):
            shapes = jax.tree.map(lambda x: _compat.shape_of(jax.typeof(x)), args)
            jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)
        return jax.tree.unflatten(jax.tree.structure(out), self.evaluate(jaxpr, jax.tree.leaves(args)))


def instantiated(x: Any) -> Any:
    """Returns a gradient as an array, where it may be a zero in name only."""
    if not isinstance(x, SymbolicZero):
        return x
    zeros, varying = jnp.zeros(x.shape, x.dtype), tuple(x.manual_axis_type.varying)
    return lax.pcast(zeros, varying, to="varying") if varying else zeros


class Beside:
    """What a function with a derivative of its own returns although it has none, handed on beside it.

    A `custom_vjp` hands on everything as if it were differentiated, as soon as one of its inputs is, and what cannot be
    differentiated then takes none of it. So its rule notes what is not, and the caller takes that in place of results.
    Both are traced in one place: where the function is only traced when it is called, nothing is taken.

    Attributes:
      moved: Of each result, whether it has a derivative; empty until that is known.
    """

    def __init__(self) -> None:
        self.moved: list[bool] = []
        self._values: dict[int, Any] = {}
        self._is_called = False

    def noting(self, values: list[Any]) -> list[Any]:
        """Returns values as they are; notes which of them the `jax.vjp` around this differentiates."""

        @jax.custom_vjp
        def same(values: list[Any]) -> list[Any]:
            return values

        def forward(values: list[Any]) -> tuple[list[Any], None]:
            self.moved = [x.perturbed for x in values]
            return [x.value for x in values], None

        def backward(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
            return ([instantiated(x) for x in cotangents],)

        same.defvjp(forward, backward, symbolic_zeros=True)
        self.moved = [False] * len(values)
        return same(values)

    def put(self, results: list[Any]) -> list[Any]:
        """Takes from the rule what it returns; returns that."""
        if not self._is_called:
            self._values = {i: x for i, x in enumerate(results) if not self.moved[i]}
        return results

    def instead(self, results: list[Any]) -> list[Any]:
        """Returns what the function returned, as it is to be handed on."""
        values, self._values, self._is_called = self._values, {}, True
        return [values.get(i, x) for i, x in enumerate(results)]
