"""Evaluates an optimizer's update: equations that mix elements run on whole operands, others can be streamed.

[Note: Optimizers that mix the elements of a matrix]
Elementwise updates run on each device's part without communication, and reductions (norms, Adafactor's means)
cost a scalar or a vector. With matrix products, such as those of Muon's Newton-Schulz iteration, GSPMD would
communicate in every product. The walk finds such equations in the update's jaxpr and runs them in a `shard_map` over
whole operands: the devices gather each matrix once, all compute the same, and cut the result again for free.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero import _compat
from jzero.arrays.placement import natural_leaf, stored_leaf
from jzero.arrays.streamed import StreamedValue, apply, constant, same_layout, source, streamed_sum
from jzero.jaxpr.primitives import RUNS, Trait, called_jaxpr, primitives_with
from jzero.plan.mesh import batch_axes
from jzero.plan.plan import ZeroPlan

__all__ = ["UpdateWalk", "evaluate_update"]

PyTree = Any


class UpdateWalk:
    """Evaluates the jaxpr of an update.

    See [Note: Optimizers that mix the elements of a matrix]. If state is on the host, inputs and outputs may be
    streamed values; see [Note: Streaming an update].

    Attributes:
      fetched_whole: Paths of the parameters whose offloaded state the optimizer needed whole.
    """

    def __init__(self, plan: ZeroPlan) -> None:
        self.plan = plan
        self.known: dict[int, bool] = {}
        self.arrays: dict[int, tuple[StreamedValue, Any]] = {}
        self.fetched_whole: set[str] = set()

    def __call__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a jaxpr."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        whole: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if _compat.is_literal(atom) else env[atom]

        def read_whole(atom: Any, x: Any) -> Any:
            if _compat.is_literal(atom) or not atom.aval.shape:
                return x
            if atom not in whole:
                whole[atom] = lax.with_sharding_constraint(x, NamedSharding(self.plan.mesh, PartitionSpec()))
            return whole[atom]

        for eqn in jaxpr.eqns:
            with _compat.equation_context(eqn):
                inputs = [read(v) for v in eqn.invars]
                outputs = self._stream(eqn, inputs) if self.plan.offloaded else None
                if outputs is None:
                    inputs = [self.compute(x) for x in inputs]
                    name = eqn.primitive.name
                    if not self._mixes(eqn):
                        outputs = _compat.bind(eqn, inputs)
                    elif name in RUNS:
                        outputs = self._inline(called_jaxpr(eqn), *inputs)
                    elif name == "cond":
                        branches = [functools.partial(self._branch, branch) for branch in eqn.params["branches"]]
                        outputs = lax.switch(inputs[0], branches, *inputs[1:])
                    else:
                        outputs = self._bind_whole(
                            eqn, [read_whole(v, x) for v, x in zip(eqn.invars, inputs, strict=True)]
                        )
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def compute(self, x: Any) -> Any:
        """Returns a value as an array in its natural shape on the devices."""
        if not isinstance(x, StreamedValue):
            return x
        if id(x) not in self.arrays:
            if x.fn is not None:
                array = x.fn(*(self.compute(y) for y in x.operands))
            elif x.leaf is None:
                array = jnp.broadcast_to(x.array, x.shape)
            else:
                array = natural_leaf(x.array, x.leaf, self.plan)
                if x.on_host and self.plan.config.offload.compute == "host":
                    raise ValueError(
                        f"`Offload(compute='host')` updates {x.leaf.path!r} where it lies, element by element, but the "
                        "optimizer needs more of it than elements and their sums (Muon's products, Adafactor's rows). "
                        "Use `compute='device'`, or keep the leaf on the devices (`LeafRule(offload=False)`)."
                    )
                self.fetched_whole |= {x.leaf.path} if x.on_host else set()
            self.arrays[id(x)] = (x, array)  # keep the value alive: its id is the key
        return self.arrays[id(x)][1]

    def _stream(self, eqn: Any, inputs: Sequence[Any]) -> list[Any] | None:
        """Returns the outputs of an equation that can be streamed; `None` for any other."""
        name, shape = eqn.primitive.name, tuple(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else ()
        streamed = [x for x in inputs if isinstance(x, StreamedValue)]
        if not streamed:
            is_constant = name == "broadcast_in_dim" and len(inputs) == 1 and jnp.ndim(inputs[0]) == 0 and shape
            if not is_constant:
                return None
            return [constant(jnp.asarray(inputs[0], eqn.outvars[0].aval.dtype), shape)]
        if name in RUNS and not eqn.effects:
            return self._inline(called_jaxpr(eqn), *inputs)
        if name == "cond" and not eqn.effects:
            results = [self._inline(branch, *inputs[1:]) for branch in eqn.params["branches"]]
            return [self._choose(inputs[0], values) for values in zip(*results, strict=True)]
        if name == "optimization_barrier":
            return [x.map(lax.optimization_barrier) if isinstance(x, StreamedValue) else x for x in inputs]
        if name == "reduce_sum" and shape == () and streamed[0].on_host:
            return [streamed_sum(self.plan, streamed[0])]
        if name not in primitives_with(Trait.ELEMENTWISE) or shape != streamed[0].shape:
            return None
        if name in ("sharding_constraint", "copy"):
            return list(inputs)
        operands = self._to_streamed(inputs, shape)
        return None if operands is None else [apply(functools.partial(_bind_one, eqn), operands)]

    def _to_streamed(self, values: Sequence[Any], shape: tuple[int, ...]) -> list[Any] | None:
        """Returns values to compute in one loop, with numbers unchanged; `None` if their shapes or layouts differ."""
        streamed = [x for x in values if isinstance(x, StreamedValue)]
        leaf = next((x.leaf for x in streamed if x.leaf is not None), None)
        arrays = [x for x in values if not isinstance(x, StreamedValue) and jnp.ndim(x)]
        if any(x.shape != shape for x in (*streamed, *arrays)) or not same_layout(streamed):
            return None
        if leaf is None:
            return None if arrays else list(values)

        def as_streamed(x: Any) -> Any:
            if isinstance(x, StreamedValue) or not jnp.ndim(x):
                return x
            return source(stored_leaf(x, leaf, self.plan), leaf, shape)

        return [as_streamed(x) for x in values]

    def _choose(self, index: Any, values: Sequence[Any]) -> Any:
        """Returns the result of the chosen branch; all branches were evaluated."""
        streamed = [x for x in values if isinstance(x, StreamedValue)]
        operands = self._to_streamed(values, streamed[0].shape) if streamed else None
        if operands is None:
            return lax.select_n(index, *map(self.compute, values))
        return apply(lax.select_n, [index, *operands])

    def _branch(self, jaxpr: Any, *inputs: Any) -> list[Any]:
        return [self.compute(x) for x in self._inline(jaxpr, *inputs)]

    def _inline(self, jaxpr: Any, *inputs: Any) -> list[Any]:
        return self(*_compat.open_jaxpr(jaxpr), inputs)

    def _bind_whole(self, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        fn = jax.shard_map(
            lambda *xs: tuple(_compat.bind(eqn, xs)),
            mesh=self.plan.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(batch_axes(self.plan.config)),
            check_vma=False,
        )
        return list(fn(*inputs))

    def _mixes(self, eqn: Any) -> bool:
        if eqn.primitive.name in primitives_with(Trait.MIXING):
            # An inner product communicates one scalar, and empty operands nothing.
            return eqn.outvars[0].aval.shape != () and all(math.prod(v.aval.shape) for v in eqn.invars)
        return any(self.mixes(jaxpr) for jaxpr in _compat.contained_jaxprs(eqn))

    def mixes(self, jaxpr: Any) -> bool:
        """Whether an open jaxpr has equations that need whole operands."""
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = any(self._mixes(eqn) for eqn in jaxpr.eqns)
        return self.known[id(jaxpr)]


def evaluate_update(plan: ZeroPlan, optimize: Any, args: tuple[PyTree, ...]) -> Any:
    """Evaluates `optimize(grads, opt_state, params, **extra)` with arrays and streamed values; see `UpdateWalk`."""

    def call(grads: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]) -> Any:
        return optimize(grads, opt_state, params, **extra)

    if plan.num_shards == 1 and not plan.offloaded:
        return call(*args)
    leaves, treedef = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, StreamedValue))
    shapes = treedef.unflatten([x.aval() if isinstance(x, StreamedValue) else x for x in leaves])
    # What `value_fn` closes over are constants of this jaxpr; of `jit(call).trace` they would be further inputs.
    jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*shapes)
    opened, consts = _compat.open_jaxpr(jaxpr)
    walk = UpdateWalk(plan)
    if not plan.offloaded and not walk.mixes(opened):  # already traced: call it
        return jax.jit(call)(*args)
    outputs = walk(opened, consts, leaves)
    new_updates, new_inner = jax.tree.unflatten(jax.tree.structure(out), outputs)
    updates = [x if i in plan.offloaded else walk.compute(x) for i, x in enumerate(plan.flat_params(new_updates))]
    inner = [
        x if leaf.on_host else walk.compute(x)
        for x, leaf in zip(plan.inner_treedef.flatten_up_to(new_inner), plan.inner_leaves, strict=True)
    ]
    if walk.fetched_whole:
        warnings.warn(
            "The optimizer needs more than single elements, or their sum, of what is on the host, so each step brings "
            f"these leaves to the devices as a whole: {sorted(walk.fetched_whole)}. Their memory is needed once more "
            "there; keep them on the devices (`LeafRule(offload=False)`) if that is too much.",
            stacklevel=2,
        )
    return plan.params_treedef.unflatten(updates), plan.inner_treedef.unflatten(inner)


def _bind_one(eqn: Any, *inputs: Any) -> Any:
    with _compat.equation_context(eqn):
        return _compat.bind(eqn, inputs)[0]
