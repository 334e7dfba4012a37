"""Finds the parameter of each leaf of an optimizer's state, and lays the leaf out.

Moments follow the gradient of their parameter. The structure tells which parameter a leaf belongs to: optax maps a
function over the leaves that are shaped like parameters. Of other leaves, such as the bases of SOAP and the statistics
of Shampoo, the jaxpr of the update decides: they belong to the only parameter that they are computed from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jzero.core.base import compat
from jzero.core.base.text import path_str
from jzero.core.base.types import DType, KeyPath, PyTree
from jzero.core.config.precision import cast_dtype, is_key
from jzero.core.config.zero import ZeroConfig
from jzero.core.jaxpr.flat import flattened
from jzero.core.jaxpr.regions import flow_of
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.mesh import AnyMesh, axis_size
from jzero.core.plan.choice import choose_cut, choose_even_cut
from jzero.core.plan.trainable import OptimizerUpdate


class _Owned:
    """An optimizer leaf with the index of the parameter that it belongs to. Not a pytree, so a leaf."""

    def __init__(self, owner: int | None) -> None:
        self.owner = owner


def plan_opt_leaf(
    leaf: StateLeaf, owner: int | None, init_dtype: DType, plans: Sequence[LeafPlan], config: ZeroConfig, mesh: AnyMesh
) -> StateLeaf:
    """Returns the layout of an optimizer leaf; `init_dtype` is its dtype in `tx.init`."""
    policy = config.policy
    dtype, update_dtype = leaf.dtype if policy.compute is None else init_dtype, None
    if owner is not None and leaf.shape == plans[owner].param.shape:
        stored = config.rule_for(plans[owner].path).state_dtype or policy.state_dtype
        kept = cast_dtype(dtype, None if stored is None else jnp.dtype(stored))
        dtype, update_dtype = kept, dtype if kept != dtype else None
    laid_out = functools.partial(dataclasses.replace, leaf, owner=owner, dtype=dtype, update_dtype=update_dtype)
    if config.stage == 0:
        return laid_out(reason="stage 0")
    if owner is None:
        return laid_out(reason="scalar" if not leaf.shape else "belongs to no parameter")
    grad = plans[owner].grad
    if leaf.shape == grad.shape:
        return laid_out(base=grad.base, cut=grad.cut, reason=grad.reason)
    num_shards, free = axis_size(mesh, config), [d for d in range(len(leaf.shape)) if d not in leaf.taken]
    cut = choose_even_cut(leaf.shape, num_shards, free) if grad.cut else None
    if grad.cut and cut is None and len(leaf.shape) > 1:  # factors of a matrix of odd size are as large as it
        least = config.most_unpadded
        cut, _ = choose_cut(leaf.shape, num_shards, scan_dim=None, taken_dims=leaf.taken, most_unpadded=least)
    return laid_out(cut=cut, reason="" if cut else f"not of its parameter's shape {grad.shape}")


def initial_dtypes(
    update: OptimizerUpdate, params: Sequence[str], values: Mapping[str, ArrayLike], owners: Sequence[int | None]
) -> dict[str, DType]:
    """Returns the dtype of each optimizer leaf in `tx.init`, which is traced for one parameter of each kind.

    Parameters of one shape and dtype are of one kind if the optimizer keeps the same of them. If that is not what
    `tx.init` makes of the first of each, all of it is traced, and tells what is wrong.

    Args:
      update: The update of the optimizer.
      params: The path of each parameter.
      values: The optimizer's leaves by path.
      owners: The parameter of each of them.

    Raises:
      ValueError: The leaves are not those that `tx.init` makes.
    """
    seen: list[jax.ShapeDtypeStruct] = jax.tree.leaves(update.params)
    kept: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in params]
    for (path, x), i in zip(values.items(), owners, strict=True):
        if i is not None:
            kept[i].append((path.removesuffix(params[i]), np.shape(x)))
    kinds: dict[Hashable, int] = {}
    first = [kinds.setdefault((x.shape, x.dtype, *kept[i]), i) for i, x in enumerate(seen)]
    same = {
        path: path if i is None else path.removesuffix(params[i]) + params[first[i]] * path.endswith(params[i])
        for path, i in zip(values, owners, strict=True)
    }
    some = update.restricted(list(kinds.values())) if len(kinds) < len(seen) else None
    made = {} if some is None else _by_path(some.opt_state)
    if {(name, np.shape(values[path])) for path, name in same.items()} != {(n, x.shape) for n, x in made.items()}:
        made, same = _by_path(update.opt_state), {path: path for path in values}
        check_opt_state(made, values)
    return {path: made[name].dtype for path, name in same.items()}


def _by_path(opt_state: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    return {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(opt_state)}


def check_opt_state(initialised: Mapping[str, jax.ShapeDtypeStruct], values: Mapping[str, ArrayLike]) -> None:
    """Raises unless `opt_state` has the structure and shapes of `tx.init(params)`; lists every leaf that differs."""
    want = {path: tuple(x.shape) for path, x in initialised.items()}
    have = {path: tuple(np.shape(x)) for path, x in values.items()}
    bad = [f"  {path}: missing, the optimizer needs shape {want[path]}" for path in want if path not in have]
    bad += [f"  {path}: shape {have[path]}, which the optimizer has no use for" for path in have if path not in want]
    bad += [
        f"  {path}: shape {have[path]}, but {want[path]} is needed"
        for path in want
        if path in have and have[path] != want[path]
    ]
    if bad:
        raise ValueError(
            "`opt_state` does not belong to `params`: `tx.init(params)` gives another tree.\n"
            + "\n".join(bad)
            + "\nMake it again with `tx.init(params)`; for parameters of a sharded state with "
            "`tx.init(jzero.natural_params(state))`."
        )


def find_owners(
    init: Callable[[PyTree], PyTree], params: PyTree, opt_state: PyTree, paths: Sequence[KeyPath]
) -> list[int | None]:
    """Returns for each optimizer leaf the index of its parameter, found by structure."""
    indices = jax.tree.structure(params).unflatten(range(jax.tree.structure(params).num_leaves))

    def masked(x: object) -> TypeGuard[optax.MaskedNode]:
        return isinstance(x, optax.MaskedNode)

    try:
        owned = optax.tree_utils.tree_map_params(
            init,
            lambda x, i: x if masked(x) else _Owned(i),
            opt_state,
            indices,
            transform_non_params=lambda x: x if masked(x) else _Owned(None),
            is_leaf=masked,
        )
        owners = [x.owner for x in jax.tree.leaves(owned)]
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        # A mask or label function that reads the parameters fails on optax's placeholders; then key paths decide.
        return _owners_by_path(params, opt_state, paths)
    return owners if len(owners) == len(paths) else _owners_by_path(params, opt_state, paths)


def owners_by_flow(
    update: OptimizerUpdate, owners: Sequence[int | None], state: Sequence[ArrayLike], num_params: int
) -> list[int | None]:
    """Returns `owners`, completed by the parameters whose gradient and state alone move an optimizer leaf."""
    unknown = [j for j, (x, i) in enumerate(zip(state, owners, strict=True)) if i is None and _is_array(x)]
    if not unknown or (jaxpr := update.jaxpr) is None:
        return list(owners)
    params: list[int | None] = list(range(num_params))
    flat, _ = compat.open_jaxpr(flattened(jaxpr))
    before, owners_now = None, list(owners)
    while owners_now != before:  # what belongs to a parameter may move further leaves
        before = list(owners_now)
        of_inputs = [frozenset(() if i is None else (i,)) for i in (*params, *before, *params)]
        flow = flow_of(flat, dict(zip(flat.invars, of_inputs, strict=True)))
        for j in unknown:
            v = flat.outvars[num_params + j]
            reached = frozenset() if compat.is_literal(v) else flow.get(v, frozenset())
            owners_now[j] = next(iter(reached)) if len(reached) == 1 else None
    return owners_now


def _is_array(x: ArrayLike) -> bool:
    return math.prod(np.shape(x)) > 1 and not is_key(jax.dtypes.result_type(x))


def _owners_by_path(params: PyTree, opt_state: PyTree, paths: Sequence[KeyPath]) -> list[int | None]:
    """Finds owners by subtrees with the structure of `params`, else by the parameter path that ends a leaf's path."""
    treedef = jax.tree.structure(params)
    index = {path: i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}

    def is_copy(node: PyTree) -> bool:
        return jax.tree.structure(node) == treedef

    def by_tail(path: KeyPath) -> int | None:
        tails = (path[start:] for start in range(1, len(path)))
        return next((index[tail] for tail in tails if tail in index), None)

    owners: list[int | None] = []
    for node in jax.tree.leaves(opt_state, is_leaf=is_copy):
        owners += range(treedef.num_leaves) if is_copy(node) else [by_tail(paths[len(owners)])]
    return owners
