"""Evaluates an optimizer's update: equations that mix elements run on whole operands, others can be streamed.

Of the equations that mix, those of one parameter run on one device, see [Note: Matrices on one device each]. The others
run in a `shard_map` over whole operands: the devices gather each matrix once, all compute the same, and cut the result
again for free.
"""

from __future__ import annotations

import functools
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
from jzero.jaxpr.flat import flattened
from jzero.jaxpr.primitives import RUNS, Trait, called_jaxpr, primitives_with
from jzero.jaxpr.products import mixes
from jzero.plan.matrices import find_matrices
from jzero.plan.mesh import batch_axes
from jzero.plan.plan import ZeroPlan
from jzero.update.owned import compute_owned

__all__ = ["UpdateWalk", "evaluate_update"]

PyTree = Any


class UpdateWalk:
    """Evaluates the jaxpr of an update.

    If state is on the host, inputs and outputs may be streamed values; see [Note: Streaming an update].

    Attributes:
      fetched_whole: Paths of the parameters whose offloaded state the optimizer needed whole.
    """

    def __init__(self, plan: ZeroPlan) -> None:
        self.plan = plan
        self.arrays: dict[int, tuple[StreamedValue, Any]] = {}
        self.fetched_whole: set[str] = set()

    def __call__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a jaxpr."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        self._run(jaxpr.eqns, env, {})
        return [_read(v, env) for v in jaxpr.outvars]

    def run_owned(self, jaxpr: Any, inputs: Sequence[Any], owners: Sequence[int | None]) -> list[Any]:
        """Returns the outputs of a closed jaxpr, with each matrix on one device.

        Args:
          jaxpr: The jaxpr.
          inputs: Its inputs.
          owners: For each input, the index of its parameter.
        """
        opened, consts = _compat.open_jaxpr(flattened(jaxpr))
        works = find_matrices(self.plan, opened, owners).works
        replaced = frozenset[int]().union(*(work.region.eqns for work in works))
        pending = [eqn for i, eqn in enumerate(opened.eqns) if i not in replaced]
        env: dict[Any, Any] = dict(zip([*opened.constvars, *opened.invars], [*consts, *inputs], strict=True))
        whole: dict[Any, Any] = {}

        def read(v: Any) -> Any:
            return self.compute(env[v])

        for level in sorted({work.region.level for work in works}):
            pending = self._run(pending, env, whole)
            env.update(compute_owned(self.plan, [work for work in works if work.region.level == level], read))
        assert not self._run(pending, env, whole)
        return [_read(v, env) for v in opened.outvars]

    def _run(self, eqns: Sequence[Any], env: dict[Any, Any], whole: dict[Any, Any]) -> list[Any]:
        """Adds the results of equations to `env`; returns those whose operands are not there yet."""
        waiting = []

        def read_whole(atom: Any, x: Any) -> Any:
            if _compat.is_literal(atom) or not atom.aval.shape:
                return x
            if atom not in whole:
                whole[atom] = lax.with_sharding_constraint(x, NamedSharding(self.plan.mesh, PartitionSpec()))
            return whole[atom]

        for eqn in eqns:
            if not all(_compat.is_literal(v) or v in env for v in eqn.invars):
                waiting.append(eqn)
                continue
            with _compat.equation_context(eqn):
                inputs = [_read(v, env) for v in eqn.invars]
                outputs = self._stream(eqn, inputs) if self.plan.offloaded else None
                if outputs is None:
                    inputs = [self.compute(x) for x in inputs]
                    name = eqn.primitive.name
                    if not mixes(eqn):
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
        return waiting

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
    walk, has_matrices = UpdateWalk(plan), any(map(mixes, opened.eqns))
    if not plan.offloaded and not has_matrices:  # already traced: call it
        return jax.jit(call)(*args)
    if has_matrices and plan.num_shards > 1:
        outputs = walk.run_owned(jaxpr, leaves, _owners(plan, args))
    else:
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


def _owners(plan: ZeroPlan, args: tuple[PyTree, ...]) -> list[int | None]:
    """Returns the parameter of each leaf of the gradients, the state, the parameters and further arguments."""
    _, _, params, extra = args
    numbers = list(range(len(plan.leaves)))
    rest = jax.tree.leaves(extra, is_leaf=lambda x: isinstance(x, StreamedValue))
    inner = [leaf.owner for leaf in plan.inner_leaves]
    return [*numbers, *inner, *([] if params is None else numbers), *([None] * len(rest))]


def _read(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if _compat.is_literal(atom) else env[atom]


def _bind_one(eqn: Any, *inputs: Any) -> Any:
    with _compat.equation_context(eqn):
        return _compat.bind(eqn, inputs)[0]
