"""Differentiates the loss: loss and gradients become one program, over whole parameters.

    differentiate(traced, differentiable, *, sums, steps, loss_scale, axis_env) -> Joint

The *joint* jaxpr is forward and backward pass, with the gradients among its outputs. Parameters are still whole. For
`loss = (x @ w).sum()` it is

    { lambda ; w:f32[512,64] x:f32[4,512]. let
        b:f32[4,64] = dot_general[...] x w
        c:f32[] = reduce_sum b
        d:f32[4,64] = broadcast_in_dim 1.0
        e:f32[512,64] = dot_general[...] x d
      in (c, e) }

Like the loss, it is traced outside the step's `shard_map`, under the names of ZeRO's axes. So sharding constraints on
other mesh axes, and meshes in types, come out as in any other program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from jzero.core.arrays.collectives import mean, sum_over
from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.types import PyTree
from jzero.core.config.precision import widen
from jzero.core.engine.outputs import Weighted
from jzero.core.engine.recompute import AxisEnv
from jzero.core.engine.trace import TracedLoss
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.interpret import evaluate
from jzero.core.layout.route import Sums

Note = Callable[[bool], None]


@dataclasses.dataclass(frozen=True)
class Joint:
    """The loss, differentiated or not, as one jaxpr over whole parameters and one device's part of the batch.

    Attributes:
      jaxpr: Its inputs are the leaves of `(params, carried, batch, key, divisor, loss_scale)`.
      out: The structure of its outputs, `(((sum, weight), divisor, aux), gradients by index)`.
      differentiable: Indices of the parameters that have gradients.
    """

    jaxpr: ClosedJaxpr
    out: jax.tree_util.PyTreeDef
    differentiable: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """The number of outputs before the gradients."""
        return int(self.out.num_leaves) - len(self.differentiable)


def differentiate(
    traced: TracedLoss,
    differentiable: Sequence[int],
    *,
    sums: Sums,
    steps: int,
    loss_scale: Sequence[jax.Array],
    axis_env: AxisEnv,
) -> Joint:
    """Differentiates a traced loss.

    Args:
      traced: The loss.
      differentiable: Indices of the parameters that have gradients; if there are none, the loss is not differentiated.
      sums: How values are summed over devices.
      steps: The number of micro-batches.
      loss_scale: The loss scale, as a list of one or no element.
      axis_env: The names and sizes of the mesh axes that the loss may name.

    Raises:
      ValueError: The weight of a `Weighted` loss depends on parameters, and there are several micro-batches; or a
        derivative rule closes over a traced value.

    Example:
      >>> from jzero.core.engine.differentiate import differentiate
      >>> from jzero.core.engine.trace import TracedLoss
      >>> from jzero.core.layout.route import Sums
      >>> jaxpr = jax.make_jaxpr(lambda w, x: (x @ w).sum())(jnp.ones((8, 4)), jnp.ones((2, 8)))
      >>> traced = TracedLoss(jaxpr, (jax.ShapeDtypeStruct((), jnp.float32), {}), (1, 0, 1, 0), [], "as_written")
      >>> joint = differentiate(traced, [0], sums=Sums(("data",)), steps=1, loss_scale=[], axis_env=[])
      >>> [tuple(x.shape) for x in joint.jaxpr.out_avals]  # the loss, its weight, the divisor, the gradient of w
      [(), (), (), (8, 4)]
    """
    weights: list[bool] = []  # filled while jax differentiates: whether the weight had a tangent
    objective = _Objective(traced, sums, steps)
    program = functools.partial(_program, traced, tuple(differentiable), loss_scale, axis_env)
    joint = program(functools.partial(objective, note=weights.append))
    if not any(weights):
        return joint
    if steps > 1:
        raise ValueError(
            "`Weighted.weight` depends on parameters, so that its derivative takes the loss of the whole batch, which "
            "is not known before the last micro-batch. Put `jax.lax.stop_gradient` around the weight, or set "
            "`accumulate_steps=1`."
        )
    return program(objective)  # once more, now with the derivative of the weight


def _program(
    traced: TracedLoss,
    differentiable: tuple[int, ...],
    loss_scale: Sequence[jax.Array],
    axis_env: AxisEnv,
    objective: Callable[..., PyTree],
) -> Joint:
    """Traces an objective, and its gradients with respect to the `differentiable` parameters."""

    def values_and_grads(params: list[jax.Array], *rest: PyTree) -> PyTree:
        some = {i: params[i] for i in differentiable}  # each [D, F], whole
        if not differentiable:
            return objective({}, params, *rest)[1], some  # `some` is empty: no gradients
        (_, values), grads = jax.value_and_grad(objective, has_aux=True)(some, params, *rest)  # grads: [D, F] each
        return values, grads

    kinds = list(map(compat.shape_struct_of, traced.jaxpr.in_avals))
    ends = list(itertools.accumulate(traced.num_inputs, initial=0))
    groups = [kinds[a:b] for a, b in itertools.pairwise(ends)]  # params, carried, batch, key
    divisor = jax.ShapeDtypeStruct((), jnp.float32)  # 0 until the first micro-batch has set it
    scale = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in loss_scale]
    jaxpr, out = jax.make_jaxpr(values_and_grads, axis_env=axis_env, return_shape=True)(*groups, divisor, scale)
    for value, line in compat.escaped_values(jaxpr):
        raise _captures(traced.jaxpr, value, line)
    return Joint(jaxpr, jax.tree.structure(out), differentiable)


def _captures(loss: AnyJaxpr, value: jax.Array, line: str) -> ValueError:
    """Returns the error about a derivative rule that closes over a traced value, used in a line of the loss."""
    calls = list(_custom_derivatives(loss))
    named = {name for name, at in calls if at == line} or {name for name, _ in calls}
    which = " or ".join(f"`{name}`" for name in sorted(named)) + (f", called at {line}" if line else "")
    return ValueError(
        f"A derivative rule closes over a traced value, {jax.typeof(value).str_short()}: it is a rule of {which}. "
        "Rules run after the loss was traced, when its values are gone. Pass the value to the function as an argument; "
        "a `custom_vjp` hands it to its backward rule as a residual."
    )


def _custom_derivatives(jaxpr: AnyJaxpr) -> Iterator[tuple[str, str]]:
    """Yields the functions with derivative rules of their own, such as `custom_vjp masked`, and the line of a call."""
    for eqn in equations_of(jaxpr):
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            function = next(compat.contained_jaxprs(eqn)).debug_info.func_name
            yield f"{eqn.primitive.name.removesuffix('_call')} {function}", compat.line_of(eqn)


@dataclasses.dataclass(frozen=True)
class _Objective:
    """The function to differentiate: the sum of the local losses, with two exceptions.

    With a loss scale, the sum is divided by a divisor, which makes it about a mean: fp16 can hold the gradients of a
    mean, but not those of a sum over many tokens. All devices and micro-batches use the same divisor.

    If the weight w depends on parameters, the gradient of the global loss L = sum(s) / sum(w) is that of s - L w.
    """

    traced: TracedLoss
    sums: Sums
    steps: int

    def __call__(
        self, differentiable: dict[int, jax.Array], params: list[jax.Array], *beside: PyTree, note: Note | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Returns `(objective, ((sum, weight), divisor, aux))`.

        Args:
          differentiable: The parameters to differentiate with respect to, by index.
          params: All parameters.
          *beside: Carried state, batch and key, each a list; the divisor, 0 if not yet known; the loss scale.
          note: If given, it is called with whether the weight depends on parameters, and the weight counts as fixed.
        """
        carried, batch, key, divisor, loss_scale = beside
        traced, sums = self.traced, self.sums
        inputs = [*(differentiable.get(i, x) for i, x in enumerate(params)), *carried, *batch, *key]
        outputs = evaluate(traced.jaxpr, inputs, compat.bind)
        outputs = [x if hasattr(x, "astype") else jnp.asarray(x, x.dtype) for x in outputs]  # literals
        loss, aux = jax.tree.unflatten(jax.tree.structure(traced.out_shape), outputs)
        total = objective = widen(loss.sum if isinstance(loss, Weighted) else loss)  # fp32 or wider
        weight = (loss.weight if isinstance(loss, Weighted) else jnp.ones(())).astype(total.dtype)
        fixed = lax.stop_gradient(weight if note is None else _note_derivative(weight, note))
        # The weight depends on parameters: its derivative takes the loss of the whole batch.
        if note is None and differentiable:
            objective = total - _global_loss(total, fixed, sums) * weight
        if not loss_scale:
            return objective, ((total, fixed), divisor, aux)
        # A mean over devices, so that all of them divide by the same number.
        mean_weight = mean(fixed, sums) if isinstance(loss, Weighted) else fixed
        first = jnp.where(mean_weight > 0, mean_weight, 1).astype(jnp.float32) * self.steps  # no tokens: 1
        divisor = jnp.where(divisor > 0, divisor, first)  # later micro-batches keep the first's
        return objective * (loss_scale[0] / divisor).astype(total.dtype), ((total, fixed), divisor, aux)


def _global_loss(total: jax.Array, weight: jax.Array, sums: Sums) -> jax.Array:
    weight = sum_over(weight, sums)
    # L is held fixed, so no collective is differentiated.
    return sum_over(lax.stop_gradient(total), sums) / jnp.where(weight == 0, 1, weight)


def _note_derivative(x: jax.Array, note: Note) -> jax.Array:
    """Returns `x` without a derivative, and calls `note` with whether it had one."""

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x

    def rule(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        note(not isinstance(tangents[0], SymbolicZero))
        return primals[0], jnp.zeros_like(primals[0])

    # Only a symbolic zero tells a constant weight from one whose derivative happens to be 0.
    same.defjvp(rule, symbolic_zeros=True)
    return same(x)
