"""The optax wrapper: the inner transformation sees natural shapes, the state stays cut.

[Note: Optimizers that mix the elements of a matrix]
Elementwise updates run on each device's part without communication, and reductions (norms, Adafactor's means)
cost a scalar or a vector. A matrix product such as Muon's Newton-Schulz iteration would make GSPMD communicate in
every product. Such equations are found in the jaxpr of the update and run in a `shard_map` over whole operands:
each matrix is gathered once, every device computes the same, and the result is cut again for free.

[Note: Masters]
Where parameters are held in 16 bits, the optimizer updates a wider master copy, cut like the gradient. The new
parameter is rounded on the shard and gathered in 16 bits; what the wrapper returns is the fp32 difference between new
and old parameter, so that `optax.apply_updates` arrives at the rounded master to the bit (unless one step makes an
element 2^16 times smaller: then the fp32 sum itself rounds). A parameter that no longer is the rounded master was
edited (`state.replace(params=...)`): the edit is taken over into the master, element by element, before the update.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero import _compat
from jzero._collectives import to_natural, to_stored
from jzero._mesh import batch_axes
from jzero._opt_state import ZeroOptState, next_loss_scale
from jzero._plan import LeafPlan, StateLeaf, ZeroPlan
from jzero._planner import own_opt_state
from jzero._precision import DynamicLossScale, Precision
from jzero._rounding import narrow, round_stochastically, with_edits

__all__ = ["ZeroTransformation", "edited_masters", "natural_leaf", "stored_leaf", "with_next_loss_scale"]

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
      guarded: Whether `update` itself skips gradients that are not finite, where the precision policy asks for it. The
        train step decides for the whole state and takes the wrapper unguarded.
    """

    inner: Any
    plan: ZeroPlan
    guarded: bool = True

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial optimizer state for stored `params`, laid out as planned."""
        return _init(self, params)

    def update(self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any) -> Any:
        """Applies the inner transformation.

        Args:
          updates: Gradients, each in its natural or its stored shape; of frozen parameters anything.
          state: The optimizer state as stored.
          params: The parameters as stored.
          **extra_args: Handed to the inner transformation.

        Returns:
          `(updates, state)`, both as the plan stores parameters and optimizer state. The update of a frozen parameter
          is a scalar zero.
        """
        if params is None and self.plan.config.policy.compute is not None:
            raise ValueError("A precision policy needs the parameters: call `tx.update(grads, opt_state, params)`.")
        in_trace = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((updates, state, params)))
        arrays = {k: v for k, v in extra_args.items() if not callable(v)}
        functions = tuple((k, v) for k, v in sorted(extra_args.items()) if callable(v))
        update = _update if in_trace else _update_jit
        return update(self, updates, state, params, arrays, functions)

    def loss_scale(self, opt_state: PyTree) -> jax.Array | None:
        """Returns what the loss is multiplied with, float32; `None` without a loss scale."""
        scale = self.plan.config.policy.loss_scale
        if isinstance(scale, DynamicLossScale):
            return opt_state.loss_scale.scale
        return None if scale is None else jnp.asarray(scale, jnp.float32)

    def natural_params(self, params: PyTree) -> PyTree:
        """Returns stored parameters in their natural shapes, in the dtype that the loss sees."""
        leaves = self.plan.params_treedef.flatten_up_to(params)
        natural = [
            natural_leaf(narrow(x, leaf.compute_dtype), leaf.param, self.plan)
            for x, leaf in zip(leaves, self.plan.leaves, strict=True)
        ]
        return self.plan.params_treedef.unflatten(natural)


@functools.partial(jax.jit, static_argnums=0)
def _init(tx: ZeroTransformation, params: PyTree) -> PyTree:
    plan = tx.plan
    leaves = plan.params_treedef.flatten_up_to(params)
    seen = [
        natural_leaf(x, leaf.param, plan).astype(leaf.update_dtype) for x, leaf in zip(leaves, plan.leaves, strict=True)
    ]
    inner = _store_inner(tx, tx.inner.init(plan.params_treedef.unflatten(seen)), None)
    masters = [
        None if leaf.master is None else stored_leaf(x.astype(leaf.master.dtype), leaf.master, plan)
        for x, leaf in zip(seen, plan.leaves, strict=True)
    ]
    own = own_opt_state(plan, masters)
    if own is None:
        return inner
    return jax.tree.map(jnp.asarray, dataclasses.replace(own, inner=inner))


def _update(
    tx: ZeroTransformation,
    updates: PyTree,
    state: PyTree,
    params: PyTree | None,
    arrays: dict[str, Any],
    functions: tuple[tuple[str, Any], ...],
) -> Any:
    plan = tx.plan
    own = state if plan.has_opt_state else ZeroOptState(state, None, None, None)

    def as_cut(tree: PyTree) -> PyTree:
        """A tree of the parameters' structure in natural shapes, each device's part at hand."""
        leaves = plan.params_treedef.flatten_up_to(tree)
        cut = [x if x is None else _as_cut(x, leaf, plan) for x, leaf in zip(leaves, plan.leaves, strict=True)]
        return plan.params_treedef.unflatten(cut)

    with jax.named_scope("zero_update"):
        grads = as_cut(updates)
        masters = None if params is None else _masters(plan, params, own.masters)
        inner = plan.inner_treedef.flatten_up_to(own.inner)
        inner = [
            natural_leaf(x, leaf, plan).astype(leaf.wide or x.dtype)
            for x, leaf in zip(inner, plan.inner_leaves, strict=True)
        ]
        # Trees of the parameters' structure (`grad=` of a line search) come as stored, like the gradients.
        like_params = {k: as_cut(v) for k, v in arrays.items() if jax.tree.structure(v) == plan.params_treedef}
        seen = (grads, plan.inner_treedef.unflatten(inner), masters, {**arrays, **like_params})
        new_updates, new_inner = _apply_inner(tx, seen, dict(functions))
        key = None if own.num_updates is None else jax.random.fold_in(jax.random.key(0), own.num_updates)
        stored, new_masters = _apply_updates(plan, params, masters, as_cut(new_updates), key)
        new = dataclasses.replace(
            own,
            inner=_store_inner(tx, new_inner, key),
            masters=None if own.masters is None else plan.params_treedef.unflatten(new_masters),
            num_updates=None if own.num_updates is None else own.num_updates + 1,
        )
        if tx.guarded and plan.config.policy.skips:
            stored, new = _unless_overflowed(plan, grads, stored, (own, new))
        return plan.params_treedef.unflatten(stored), new if plan.has_opt_state else new.inner


def _as_cut(x: jax.Array, leaf: LeafPlan, plan: ZeroPlan) -> jax.Array:
    if not leaf.trained:  # never read, see `_trained`
        return jnp.zeros(leaf.param.shape, leaf.update_dtype)
    x = natural_leaf(x, leaf.grad, plan)
    return x if plan.config.policy == Precision() else x.astype(leaf.update_dtype)


def _masters(plan: ZeroPlan, params: PyTree, masters: PyTree) -> PyTree:
    """Returns what the optimizer sees of the parameters: natural shapes, cut, edits of the parameters included."""
    leaves = plan.params_treedef.flatten_up_to(params)
    kept = [None] * len(leaves) if masters is None else plan.params_treedef.flatten_up_to(masters)

    def master(param: jax.Array, kept: jax.Array | None, leaf: LeafPlan) -> jax.Array:
        cut = natural_leaf(param, leaf.grad if leaf.trained else leaf.param, plan)
        if kept is None:
            return cut.astype(leaf.update_dtype)
        return with_edits(natural_leaf(kept, leaf.grad, plan), cut).astype(leaf.update_dtype)

    return plan.params_treedef.unflatten([master(*x) for x in zip(leaves, kept, plan.leaves, strict=True)])


@functools.partial(jax.jit, static_argnums=0)
def edited_masters(plan: ZeroPlan, params: PyTree, masters: PyTree) -> PyTree:
    """Returns the masters as stored, with what was edited in the parameters, see [Note: Masters]."""
    current = plan.params_treedef.flatten_up_to(_masters(plan, params, masters))
    kept = [
        None if leaf.master is None else stored_leaf(x.astype(leaf.master.dtype), leaf.master, plan)
        for x, leaf in zip(current, plan.leaves, strict=True)
    ]
    return plan.params_treedef.unflatten(kept)


def _apply_updates(
    plan: ZeroPlan, params: PyTree | None, masters: PyTree | None, updates: PyTree, key: jax.Array | None
) -> tuple[list[Any], list[Any]]:
    """Returns the updates of the stored parameters and the new masters as stored, see [Note: Masters]."""
    num = len(plan.leaves)
    old = [None] * num if params is None else plan.params_treedef.flatten_up_to(params)
    wide = [None] * num if masters is None else plan.params_treedef.flatten_up_to(masters)
    new = plan.params_treedef.flatten_up_to(updates)
    stored: list[Any] = []
    kept: list[Any] = []
    for i, (leaf, param, master, update) in enumerate(zip(plan.leaves, old, wide, new, strict=True)):
        kept.append(None)
        if not leaf.trained:
            stored.append(jnp.asarray(-0.0).astype(leaf.param.dtype))  # x + -0.0 is x to the bit
        elif update is None or leaf.param.dtype == leaf.update_dtype or param is None or master is None:
            stored.append(update if update is None else stored_leaf(update, leaf.param, plan))
        else:
            moved = master + update
            if leaf.master is not None:
                rounded = _round(moved, leaf.master.dtype, key, i)
                kept[-1] = stored_leaf(rounded, leaf.master, plan)
                rounded = narrow(rounded, leaf.param.dtype)
            else:
                rounded = _round(moved, leaf.param.dtype, key, i)
            rounded = stored_leaf(rounded, leaf.param, plan)
            new_wide, old_wide = rounded.astype(leaf.update_dtype), param.astype(leaf.update_dtype)
            stored.append(jnp.where(rounded == param, 0, new_wide - old_wide))  # infinities included
    return stored, kept


def _store_inner(tx: ZeroTransformation, inner: PyTree, key: jax.Array | None) -> PyTree:
    """Returns the inner optimizer state, given in natural shapes and its own dtypes, as the plan stores it."""
    plan = tx.plan
    leaves = plan.inner_treedef.flatten_up_to(inner)
    start = len(plan.leaves)
    stored = [
        stored_leaf(x if leaf.wide is None else _round(x, leaf.dtype, key, start + i), leaf, plan)
        for i, (x, leaf) in enumerate(zip(leaves, plan.inner_leaves, strict=True))
    ]
    return plan.inner_treedef.unflatten(stored)


def _round(x: jax.Array, dtype: Any, key: jax.Array | None, index: int) -> jax.Array:
    if x.dtype == dtype:
        return x
    if key is None or dtype != jnp.bfloat16:
        return narrow(x, dtype)
    return round_stochastically(x, jax.random.fold_in(key, index))


def _unless_overflowed(
    plan: ZeroPlan, grads: PyTree, updates: list[Any], states: tuple[ZeroOptState, ZeroOptState]
) -> tuple[list[Any], ZeroOptState]:
    """Returns no updates and the old state, its loss scale apart, if a gradient is not finite."""
    old, new = states
    leaves = plan.params_treedef.flatten_up_to(grads)
    overflowed = jnp.stack([_not_finite(x) for x in leaves])
    applied = ~jnp.any(overflowed)
    updates = [x if x is None else jnp.where(applied, x, jnp.asarray(-0.0).astype(x.dtype)) for x in updates]
    new = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)
    return updates, with_next_loss_scale(plan, old, new, overflowed)


def with_next_loss_scale(plan: ZeroPlan, old: Any, new: Any, overflowed: jax.Array) -> Any:
    """Returns the optimizer state `new` with the loss scale that follows `old`'s."""
    rules = plan.config.policy.loss_scale
    if not isinstance(rules, DynamicLossScale):
        return new
    return dataclasses.replace(new, loss_scale=next_loss_scale(old.loss_scale, rules, overflowed))


def _not_finite(x: jax.Array | None) -> jax.Array:
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros((), jnp.bool_)
    return ~jnp.all(jnp.isfinite(x))


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
