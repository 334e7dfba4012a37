"""The optax wrapper: the inner transformation sees natural shapes, the state stays cut.

[Note: Optimizers that mix the elements of a matrix]
Elementwise updates run on each device's part without communication, and reductions (norms, Adafactor's means)
cost a scalar or a vector. A matrix product such as Muon's Newton-Schulz iteration would make GSPMD communicate in
every product. Such equations are found in the jaxpr of the update and run in a `shard_map` over whole operands:
each matrix is gathered once, every device computes the same, and the result is cut again for free.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero import _compat
from jzero._collectives import to_natural, to_stored
from jzero._mesh import batch_axes
from jzero._plan import StateLeaf, ZeroPlan

__all__ = ["ZeroTransformation", "natural_leaf", "stored_leaf"]

PyTree = Any

MIXING = frozenset(
    "dot_general conv_general_dilated cholesky eig eigh lu qr geqrf householder_product svd schur triangular_solve "
    "tridiagonal_solve fft sort cumsum cumprod cummax cummin".split()
)


def natural_leaf(x: jax.Array, leaf: StateLeaf, plan: ZeroPlan) -> jax.Array:
    """Returns a leaf in its natural shape (given that or the stored one), cut where it can be. Inside `jit`."""
    cut = leaf.cut
    if cut is None:
        return x
    if tuple(x.shape) == cut.stored_shape:
        x = to_natural(x, cut)
    elif tuple(x.shape) != cut.shape:
        raise ValueError(
            f"{leaf.path!r} has shape {tuple(x.shape)}; the plan knows it as {cut.shape} (natural) or "
            f"{cut.stored_shape} (stored). Hand over "
            "gradients of `jzero.natural_params(state)` or those that `value_and_grad` returns."
        )
    # A flattened leaf has no natural dimension to cut: its layout is the compiler's choice.
    return x if cut.flat else lax.with_sharding_constraint(x, plan.sharding(leaf))


def stored_leaf(x: jax.Array, leaf: StateLeaf, plan: ZeroPlan) -> jax.Array:
    """Returns a leaf in natural (or stored) shape as the plan stores it. Inside `jit`."""
    if leaf.cut is not None and tuple(x.shape) == leaf.cut.shape and not leaf.cut.is_stored_naturally:
        x = to_stored(x, leaf.cut)
    return lax.with_sharding_constraint(x, plan.sharding(leaf))


@dataclasses.dataclass(frozen=True)
class ZeroTransformation:
    """An optax transformation over a partitioned state; takes the place of `tx` in the train state.

    A frozen value: two wrappers of the same optax object under equal plans are equal, so that wrapping again
    neither recompiles nor breaks `jax.tree.map` over two states.

    Attributes:
      inner: The user's transformation.
      plan: The plan of the state.
    """

    inner: Any
    plan: ZeroPlan

    def init(self, params: PyTree) -> PyTree:
        """Returns the inner transformation's initial state for stored `params`, laid out as planned."""
        return _init(self, params)

    def update(self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any) -> Any:
        """Applies the inner transformation.

        Args:
          updates: Gradients, each in its natural or its stored shape.
          state: The optimizer state as stored.
          params: The parameters as stored.
          **extra_args: Handed to the inner transformation.

        Returns:
          `(updates, state)`, both as the plan stores parameters and optimizer state.
        """
        in_trace = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((updates, state, params)))
        arrays = {k: v for k, v in extra_args.items() if not callable(v)}
        functions = tuple((k, v) for k, v in sorted(extra_args.items()) if callable(v))
        update = _update if in_trace else _update_jit
        return update(self, updates, state, params, arrays, functions)

    def natural_params(self, params: PyTree) -> PyTree:
        """Returns stored parameters in their natural shapes."""
        leaves = self.plan.params_treedef.flatten_up_to(params)
        natural = [natural_leaf(x, leaf.param, self.plan) for x, leaf in zip(leaves, self.plan.leaves, strict=True)]
        return self.plan.params_treedef.unflatten(natural)

    def constrain_state(self, opt_state: PyTree) -> PyTree:
        """Returns an optimizer state in natural shapes as the plan stores it."""
        leaves = self.plan.opt_treedef.flatten_up_to(opt_state)
        stored = [stored_leaf(x, leaf, self.plan) for x, leaf in zip(leaves, self.plan.opt_leaves, strict=True)]
        return self.plan.opt_treedef.unflatten(stored)


@functools.partial(jax.jit, static_argnums=0)
def _init(tx: ZeroTransformation, params: PyTree) -> PyTree:
    return tx.constrain_state(tx.inner.init(tx.natural_params(params)))


def _update(
    tx: ZeroTransformation,
    updates: PyTree,
    state: PyTree,
    params: PyTree | None,
    arrays: dict[str, Any],
    functions: tuple[tuple[str, Any], ...],
) -> Any:
    plan = tx.plan

    def as_cut(tree: PyTree) -> PyTree:
        """Gradients or parameters in natural shapes, each device's part at hand."""
        leaves = plan.params_treedef.flatten_up_to(tree)
        cut = [
            x if x is None else natural_leaf(x, leaf.grad, plan) for x, leaf in zip(leaves, plan.leaves, strict=True)
        ]
        return plan.params_treedef.unflatten(cut)

    with jax.named_scope("zero_update"):
        grads = as_cut(updates)
        natural = None if params is None else as_cut(params)
        opt_leaves = plan.opt_treedef.flatten_up_to(state)
        opt_state = plan.opt_treedef.unflatten(
            [natural_leaf(x, leaf, plan) for x, leaf in zip(opt_leaves, plan.opt_leaves, strict=True)]
        )
        # Trees of the parameters' structure (`grad=` of a line search) come as stored, like the gradients.
        like_params = {k: as_cut(v) for k, v in arrays.items() if jax.tree.structure(v) == plan.params_treedef}
        arrays = {**arrays, **like_params}
        new_updates, new_state = _apply_inner(tx, (grads, opt_state, natural, arrays), dict(functions))
        leaves = plan.params_treedef.flatten_up_to(as_cut(new_updates))
        stored = [
            x if x is None else stored_leaf(x, leaf.param, plan) for x, leaf in zip(leaves, plan.leaves, strict=True)
        ]
        return plan.params_treedef.unflatten(stored), tx.constrain_state(new_state)


_update_jit = jax.jit(_update, static_argnums=(0, 5))


def _apply_inner(tx: ZeroTransformation, args: tuple[PyTree, ...], functions: dict[str, Any]) -> Any:
    def call(grads: PyTree, opt_state: PyTree, params: PyTree, arrays: dict[str, Any]) -> Any:
        return tx.inner.update(grads, opt_state, params, **arrays, **functions)

    if tx.plan.num_shards == 1:
        return call(*args)
    jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*args)
    inner, consts = _compat.open_jaxpr(jaxpr)
    outputs = _Mixed(tx.plan)(inner, consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), outputs)


class _Mixed:
    """Evaluates the jaxpr of an update, see [Note: Optimizers that mix the elements of a matrix]."""

    def __init__(self, plan: ZeroPlan) -> None:
        self.plan = plan
        self.known: dict[int, bool] = {}

    def __call__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        whole: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if _compat.is_literal(atom) else env[atom]

        def read_whole(atom: Any) -> Any:
            if _compat.is_literal(atom) or not atom.aval.shape:
                return read(atom)
            if atom not in whole:
                whole[atom] = lax.with_sharding_constraint(env[atom], NamedSharding(self.plan.mesh, PartitionSpec()))
            return whole[atom]

        for eqn in jaxpr.eqns:
            with _compat.equation_context(eqn):
                name = eqn.primitive.name
                if not self._mixes(eqn):
                    outputs = _compat.bind(eqn, [read(v) for v in eqn.invars])
                elif name in ("jit", "pjit"):
                    outputs = self._inline(eqn.params["jaxpr"], *(read(v) for v in eqn.invars))
                elif name == "cond":
                    branches = [functools.partial(self._inline, branch) for branch in eqn.params["branches"]]
                    outputs = lax.switch(read(eqn.invars[0]), branches, *(read(v) for v in eqn.invars[1:]))
                else:
                    outputs = self._on_whole(eqn, [read_whole(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _inline(self, jaxpr: Any, *inputs: Any) -> list[Any]:
        return self(*_compat.open_jaxpr(jaxpr), inputs)

    def _on_whole(self, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
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
        if eqn.primitive.name in MIXING:
            # Inner products give a scalar, which costs a scalar; of nothing there is nothing to gather.
            return eqn.outvars[0].aval.shape != () and all(math.prod(v.aval.shape) for v in eqn.invars)
        return any(self._any_mixes(jaxpr) for jaxpr in _compat.contained_jaxprs(eqn))

    def _any_mixes(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = any(self._mixes(eqn) for eqn in jaxpr.eqns)
        return self.known[id(jaxpr)]
