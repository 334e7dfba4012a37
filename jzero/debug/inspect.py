"""Reads and writes single parameters, gradients and optimizer leaves by path, whole: for debugging and edits."""

from __future__ import annotations

import difflib

import jax
import numpy as np
from jax.typing import ArrayLike

from jzero.core.base.types import PyTree, State
from jzero.core.config.precision import is_key, widen
from jzero.core.layout.casts import apply_edits, describe_misfit
from jzero.core.layout.leaves import StateLeaf, gather_leaves
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.state_fields import other_fields
from jzero.core.state.access import apply_pending, readable
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.gather import write_leaves, write_params
from jzero.core.state.train_state import check_alive

DEEPSPEED_NAMES = {"exp_avg": "mu", "exp_avg_sq": "nu"}


def get_full_param(state: State, path: str) -> jax.Array:
    """Returns one parameter as the optimizer keeps it, whole on every device.

    Peak memory per device is the shards plus this leaf. With several processes, each must call it.

    Args:
      state: A sharded train state.
      path: The key path of the parameter, such as `"decoder/layer_0/kernel"`, trained or frozen.

    Returns:
      The master copy if the precision policy keeps one, else the parameter itself, in its natural shape and stored
      dtype, replicated.

    Raises:
      ValueError: `path` names no parameter.

    Example:
      >>> w = jzero.get_full_param(state, "w")
      >>> w.shape, w.sharding.is_fully_replicated
      ((512, 512), True)

    References:
      DeepSpeed's `safe_get_full_fp32_param`.
    """
    train_state = readable(adapt_sharded(state).state)
    plan = train_state.tx.plan
    frozen = _frozen_index(plan, path)
    if frozen is not None:
        return _gather(jax.tree.leaves(other_fields(train_state))[frozen], plan.other_leaves[frozen], plan)
    i = _index(plan, path)
    leaf = plan.leaves[i]
    param = plan.view.params.flat(train_state.params)[i]
    if leaf.master is None:
        return _gather(param, leaf.param, plan)
    master = plan.view.params.flat(train_state.opt_state.masters)[i]
    return apply_edits(_gather(master, leaf.master, plan), _gather(param, leaf.param, plan))


def set_full_param(state: State, path: str, *, value: ArrayLike) -> State:
    """Replaces one parameter, its master copy included. The optimizer state does not change.

    Gradients that wait for a later step are applied first (`apply_pending`), so the other parameters may change, too.

    Args:
      state: A sharded train state.
      path: The key path of the parameter, trained or frozen.
      value: Its new value in its natural shape, cast to the dtype of the master; with several processes, each must
        pass the same.

    Returns:
      The new state, which shares its other arrays with `state`.

    Raises:
      ValueError: `path` names no parameter, or `value` has another shape, or numbers that the dtype cannot hold.
      TypeError: `value` is not an array of numbers.

    Example:
      >>> zeroed = jzero.set_full_param(state, "w", value=np.zeros((512, 512)))
      >>> float(jzero.get_full_param(zeroed, "w").max())
      0.0

    References:
      DeepSpeed's `safe_set_full_fp32_param`.
    """
    adapted = adapt_sharded(state)
    plan = adapted.state.tx.plan
    frozen = _frozen_index(plan, path)
    if frozen is not None:
        check_alive(adapted.state)
        value = _as_leaf(value, plan.other_leaves[frozen])
        number = len(plan.leaves) + len(plan.opt_leaves) + frozen
        return adapted.rebuild(write_leaves(adapted.state, {number: value}))
    i = _index(plan, path)
    check_alive(adapted.state)
    # Cast to the master's dtype first: a parameter that is not the rounded master counts as edited.
    value = _as_leaf(value, plan.leaves[i].updated)
    adapted = adapt_sharded(apply_pending(state))
    return adapted.rebuild(write_params(adapted.state, {i: value}))


def get_full_opt_state(state: State, path: str, *, name: str) -> jax.Array:
    """Returns one leaf of the optimizer state for one parameter, whole on every device.

    Args:
      state: A sharded train state.
      path: The key path of the parameter, such as `"decoder/layer_0/kernel"`.
      name: The key before the path of the parameter: "mu" and "nu" for Adam, "trace" for momentum. If a chain has it
        twice, pass more of the keys: "0/mu". DeepSpeed's "exp_avg" and "exp_avg_sq" stand for "mu" and "nu".

    Returns:
      The leaf in its natural shape, in the optimizer's compute dtype, replicated.

    Raises:
      ValueError: `path` names no parameter, or `name` no leaf or several; the message lists the names.
      RuntimeError: The leaf is in records, and a later step overwrote it.

    Example:
      >>> mu = jzero.get_full_opt_state(state, "w", name="mu")
      >>> mu.shape, mu.sharding.is_fully_replicated
      ((512, 512), True)

    References:
      DeepSpeed's `safe_get_full_optimizer_state`.
    """
    train_state = readable(adapt_sharded(state).state)
    plan = train_state.tx.plan
    i = _opt_index(plan, path, name)
    leaf = plan.inner_leaves[i]
    value = _gather(plan.view.opt_state.flat(train_state.opt_state)[i], leaf, plan)
    return value if leaf.update_dtype is None else value.astype(leaf.update_dtype)


def set_full_opt_state(state: State, path: str, *, name: str, value: ArrayLike) -> State:
    """Replaces one leaf of the optimizer state for one parameter.

    Gradients that wait for a later step are applied first (`apply_pending`).

    Args:
      state: A sharded train state.
      path: The key path of the parameter.
      name: As for `get_full_opt_state`.
      value: Its new value in its natural shape, cast (rounded to nearest) to its stored dtype; with several processes,
        each must pass the same.

    Returns:
      The new state, which shares its other arrays with `state`.

    Raises:
      ValueError: As for `get_full_opt_state`, or `value` has another shape, or numbers that the dtype cannot hold.
      TypeError: `value` is not an array of numbers.
      RuntimeError: As for `get_full_opt_state`.

    Example:
      >>> ones = jzero.set_full_opt_state(state, "w", name="mu", value=jnp.ones((512, 512)))
      >>> float(jzero.get_full_opt_state(ones, "w", name="mu").min())
      1.0

    References:
      DeepSpeed's `safe_set_full_optimizer_state`.
    """
    train_state = adapt_sharded(state).state
    plan = train_state.tx.plan
    i = _opt_index(plan, path, name)
    check_alive(train_state)
    leaf = plan.inner_leaves[i]
    value = _as_leaf(value, leaf)
    adapted = adapt_sharded(apply_pending(state))
    return adapted.rebuild(write_leaves(adapted.state, {len(plan.leaves) + i: value}))


def get_full_grad(state: State, path: str, *, grads: PyTree) -> jax.Array:
    """Returns the gradient of one parameter, reduced over all devices, whole on every device.

    Args:
      state: A sharded train state.
      path: The key path of the parameter, such as `"decoder/layer_0/kernel"`.
      grads: The gradients that `jzero.value_and_grad` returned for `state`.

    Returns:
      The gradient in the natural shape of the parameter, in float32 or wider, replicated.

    Raises:
      ValueError: `path` names no trained parameter, or `grads` are not those of `state`.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> _, grads = jzero.value_and_grad(loss_fn)(state, jnp.ones((8, 512)))
      >>> jzero.get_full_grad(state, "w", grads=grads).shape
      (512, 512)

    References:
      DeepSpeed's `safe_get_full_grad`.
    """
    plan = adapt_sharded(state).state.tx.plan
    i = _index(plan, path)
    if not plan.leaves[i].trained:
        raise ValueError(f"{path!r} is not trained: it has no gradient.")
    leaves = jax.tree.leaves(grads)
    if len(leaves) != len(plan.leaves):
        raise ValueError(
            f"`grads` has {len(leaves)} leaves, but the state has {len(plan.leaves)} parameters: hand over what "
            "`jzero.value_and_grad` returned for this state."
        )
    leaf = plan.leaves[i].grad
    if tuple(leaves[i].shape) != leaf.stored_shape:
        raise ValueError(
            f"The gradient of {path!r} has shape {tuple(leaves[i].shape)}, but the plan stores it as "
            f"{leaf.stored_shape}: hand over what `jzero.value_and_grad` returned for this state."
        )
    value = _gather(leaves[i], leaf, plan)
    return widen(value)


def _frozen_index(plan: ZeroPlan, path: str) -> int | None:
    """Returns the index of a parameter outside `params`, by its path with or without its field; `None` if none."""
    if path in plan.indices:
        return None
    return next(
        (i for i, x in enumerate(plan.other_leaves) if x.is_param and path in (x.path, x.path.partition("/")[2])), None
    )


def _index(plan: ZeroPlan, path: str) -> int:
    """Returns the index of the parameter with this path."""
    if _frozen_index(plan, path) is not None:
        raise ValueError(f"{path!r} is not trained: it has no gradient and no optimizer state.")
    if path not in plan.indices:
        paths = list(plan.indices)
        nearest = difflib.get_close_matches(path, paths, n=5, cutoff=0.5)
        listed = f"The nearest are {nearest}." if nearest else f"The first paths are {paths[:5]}."
        raise ValueError(f"`path` {path!r} names no parameter: it must be a whole key path. {listed}")
    return plan.indices[path]


def _opt_index(plan: ZeroPlan, path: str, name: str) -> int:
    """Returns the index of the leaf of the optimizer's own state for a parameter and a name."""
    owner = _index(plan, path)
    names = {leaf.path.removesuffix(path).removesuffix("/"): i for i, leaf in plan.opt_leaves_of[owner]}
    if not names:
        why = "" if plan.leaves[owner].trained else ", which is not trained"
        raise ValueError(f"The optimizer keeps nothing for {path!r}{why}.")
    *front, last = name.split("/")
    matches = _matching(name, names) or _matching("/".join([*front, DEEPSPEED_NAMES.get(last, last)]), names)
    if not matches:
        raise ValueError(f"The optimizer keeps no {name!r} for {path!r}: it has {list(names)}.")
    if len(matches) > 1:
        raise ValueError(f"`name` {name!r} stands for several things that the optimizer keeps for {path!r}: {matches}.")
    return names[matches[0]]


def _matching(name: str, names: dict[str, int]) -> list[str]:
    """Returns `name` itself if it is in `names`, else all names that end with it."""
    return [name] if name in names else [full for full in names if full.endswith(f"/{name}")]


def _gather(x: jax.Array, leaf: StateLeaf, plan: ZeroPlan) -> jax.Array:
    check_alive(x)
    return gather_leaves([x], [leaf])[0]


def _as_leaf(value: object, leaf: StateLeaf) -> jax.Array | np.ndarray:
    """Returns a value in the dtype of a leaf; raises unless it has the natural shape, and numbers that fit."""
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`value` must be an array of shape {leaf.shape} for {leaf.path!r}: got {value!r:.100}."
        ) from error
    if array.dtype == np.dtype(object):
        raise TypeError(
            f"`value` must be an array of numbers for {leaf.path!r}, which is {leaf.dtype}: got {value!r:.100}."
        )
    if array.shape != leaf.shape:
        raise ValueError(f"`value` has shape {array.shape}, but {leaf.path!r} has shape {leaf.shape}.")
    if is_key(leaf.dtype) and array.dtype != leaf.dtype:
        raise ValueError(f"{leaf.path!r} holds random keys, {leaf.dtype}: `value` is {array.dtype}.")
    if why := describe_misfit(array, leaf.dtype):
        raise ValueError(f"`value` cannot be written to {leaf.path!r}: it holds {why}. Cast or clip it first.")
    return array if array.dtype == leaf.dtype else array.astype(leaf.dtype)
