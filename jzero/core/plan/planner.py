"""Makes a plan from a train state: lists its leaves, finds the parameter of each optimizer leaf, and cuts each leaf."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree, TrainStateLike
from jzero.core.config.precision import DynamicLossScale, is_key
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import (
    AnyMesh,
    axis_size,
    batch_axes,
    check_host_memory,
    check_mesh,
    explicit_axes,
    with_explicit_axes,
)
from jzero.core.plan.opt_leaves import find_owners, initial_dtypes, owners_by_flow, plan_opt_leaf
from jzero.core.plan.opt_state import DiskState, ZeroOptState, host_array, initial_loss_scale
from jzero.core.plan.param_leaves import (
    as_seen,
    check_rules_match,
    describe_leaf,
    dtype_of,
    far_memory,
    freeze,
    plan_frozen_field,
    plan_other_field,
    plan_params,
    unzip,
)
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.planned_matrices import warn_of_matrices, with_matrices
from jzero.core.plan.state_fields import frozen_fields, other_fields
from jzero.core.plan.trainable import OptimizerUpdate, find_frozen

OVERWRITTEN = "_overwrite_with_gradient"  # as `flax.linen.fp8_ops` names it


def make_plan(state: TrainStateLike, config: ZeroConfig, mesh: AnyMesh) -> ZeroPlan:
    """Returns the plan of a train state in natural shapes, concrete or abstract; touches no device.

    Args:
      state: Anything with the fields of Flax's `TrainState`; plain, with its own optax transformation and without the
        state that a precision policy adds.
      config: The configuration.
      mesh: The mesh; may be abstract.
    """
    check_mesh(mesh, config)
    explicit, mesh = explicit_axes(mesh), with_explicit_axes(mesh)
    _check_not_overwritten(state.params)
    offload = config.offload
    if "host" in (offload.optimizer, offload.params):
        check_host_memory(mesh)
    update = OptimizerUpdate(state.tx, as_seen(state.params, config))
    plan = with_matrices(_choose_plan(state, update, config, mesh), update)
    if config.offload.delays_updates and not plan.has_records:
        name, off = ("delay=1", "delay=0") if config.offload.delay else ("zenflow", "zenflow=None")
        raise ValueError(
            f"`Offload.{name}` lets the update of what is on the host or on disk run beside the next step, but here is "
            "nothing: the optimizer keeps nothing of a parameter's shape, or rules keep all of it on the devices. "
            f"Set `{off}`."
        )
    if config.offload.params == "disk":
        _check_rows(plan)
    warn_of_matrices(plan)
    return _first_of_equal(dataclasses.replace(plan, explicit_axes=explicit))


def _check_rows(plan: ZeroPlan) -> None:
    """Raises unless programs can read the rows of some stack from disk."""
    if set(plan.mesh.axis_names) != set(batch_axes(plan.config)):
        raise ValueError(
            f"`Offload(params='disk')` needs a mesh of ZeRO's axes {batch_axes(plan.config)} alone, since jax has no "
            f"callbacks beside others: got {tuple(plan.mesh.axis_names)}. Use such a mesh, or `params='host'`."
        )
    if not plan.params_on_disk:
        raise ValueError(
            "`Offload(params='disk')` keeps the rows of stacks of matrices that a scan runs over on disk, but here is "
            "none that is trained and cut. Scan over the layers and say so (`rules={'layers/.*': "
            "jzero.LeafRule(scan_dim=0)}`), or keep parameters in the host's memory (`params='host'`)."
        )


def _choose_plan(state: TrainStateLike, update: OptimizerUpdate, config: ZeroConfig, mesh: AnyMesh) -> ZeroPlan:
    """Chooses what goes to the host."""
    offload = config.offload
    if offload.optimizer == "none":
        return _make_plan(state, update, config, mesh, ())
    if offload.ratio == 1 and offload.device_budget_bytes is None:  # whether a parameter is trained does not matter
        order, _, _ = _offload_order(state.params, config, [True] * len(jax.tree.leaves(state.params)))
        return _make_plan(state, update, config, mesh, order)
    unoffloaded = _make_plan(state, update, config, mesh, ())
    order, sizes, least = _offload_order(state.params, config, [leaf.trained for leaf in unoffloaded.leaves])
    if offload.device_budget_bytes is None:
        num_elements = offload.ratio * sum(leaf.param.size for leaf in unoffloaded.leaves if leaf.trained)
        sums = itertools.accumulate(sizes, initial=0)
        count = next((k for k, moved in enumerate(sums) if moved >= num_elements), len(order))
        return _make_plan(state, update, config, mesh, order[: max(count, least)])
    budget = offload.device_budget_bytes

    def excess(count: int) -> int:
        num_bytes = _make_plan(state, update, config, mesh, order[:count]).bytes_per_device
        return num_bytes.params + num_bytes.opt_state - budget

    too_much = excess(len(order))
    if too_much > 0:
        raise ValueError(
            f"`Offload.device_budget_bytes={budget}` cannot be met: with the optimizer state of "
            f"every parameter on the host that may go there, parameters and the rest still take {too_much} bytes more "
            "on each device. Raise the budget, use more devices or a higher stage."
        )
    count = bisect.bisect_left(range(len(order)), True, lo=least, key=lambda count: excess(count) <= 0)
    return _make_plan(state, update, config, mesh, order[:count])


def _offload_order(params: PyTree, config: ZeroConfig, trained: Sequence[bool]) -> tuple[list[int], list[int], int]:
    """Orders the parameters whose optimizer state may go to the host.

    Parameters that a rule sends there come first, then the largest. Scalars are not worth the transfer.

    Returns:
      Their indices and sizes, and how many a rule sends to the host.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rules = [config.rule_for(path_str(path)).offload for path, _ in leaves]
    pairs = zip(leaves, trained, strict=True)
    sizes = [
        math.prod(np.shape(x)) if np.ndim(x) and is_trained and not is_key(jax.dtypes.result_type(x)) else 0
        for (_, x), is_trained in pairs
    ]
    able = [i for i, (rule, size) in enumerate(zip(rules, sizes, strict=True)) if rule is not False and size]
    order = sorted(able, key=lambda i: (rules[i] is None, -sizes[i]))
    return order, [sizes[i] for i in order], sum(rules[i] is True for i in order)


def _make_plan(
    state: TrainStateLike, update: OptimizerUpdate, config: ZeroConfig, mesh: AnyMesh, offloaded: Sequence[int]
) -> ZeroPlan:
    others = other_fields(state)
    if config.offload.zenflow is not None and axis_size(mesh, config) > 1:  # whole leaves have no columns of a device
        cuts = [leaf.grad.cut for leaf in plan_params(state.params, config, mesh)]
        offloaded = [i for i in offloaded if cuts[i]]
    leaves = plan_params(state.params, config, mesh, frozenset(offloaded))
    frozen_trees = [others[name] for name in frozen_fields(state)]
    frozen_paths = [path_str(path) for x in frozen_trees for path, _ in jax.tree_util.tree_leaves_with_path(x)]
    check_rules_match(config, [*(leaf.path for leaf in leaves), *frozen_paths])
    paths, values = unzip(jax.tree_util.tree_leaves_with_path(state.opt_state))
    names = list(map(path_str, paths))
    owners = find_owners(update.tx.init, state.params, state.opt_state, paths)
    given = dict(zip(names, values, strict=True))
    initialised = initial_dtypes(update, [leaf.path for leaf in leaves], given, owners)
    owners = owners_by_flow(update, owners, values, len(leaves))
    shaped = {i for i, x in zip(owners, values, strict=True) if i is not None and np.shape(x) == leaves[i].param.shape}
    frozen = find_frozen(update, [i in shaped for i in range(len(leaves))])
    dtypes = [dtype_of(x) for x in jax.tree.leaves(state.params)]
    leaves = [freeze(leaf, dtype, config) if f else leaf for leaf, dtype, f in zip(leaves, dtypes, frozen, strict=True)]
    inner = [
        plan_opt_leaf(describe_leaf(name, x, config, mesh), owner, initialised[name], leaves, config, mesh)
        for name, x, owner in zip(names, values, owners, strict=True)
    ]
    shaped_like = {i: leaf.param.shape for i, leaf in enumerate(leaves) if i in offloaded and leaf.trained}
    is_offloaded = [x.owner is not None and shaped_like.get(x.owner) == x.shape for x in inner]
    inner = [
        dataclasses.replace(x, memory=far_memory(config)) if f else x for x, f in zip(inner, is_offloaded, strict=True)
    ]
    params_treedef = jax.tree.structure(state.params)
    other_leaves: list[StateLeaf] = []
    for name, value in others.items():
        if name in frozen_fields(state):
            other_leaves += plan_frozen_field(name, value, config, mesh)
        else:
            other_leaves += plan_other_field(name, value, params_treedef, leaves, config, mesh)
    inner_treedef = jax.tree.structure(state.opt_state)
    plan = ZeroPlan(
        config, mesh, tuple(leaves), tuple(inner), tuple(other_leaves), params_treedef, inner_treedef, inner_treedef
    )
    return _with_own_state(plan)


_PLANS: weakref.WeakKeyDictionary[ZeroPlan, weakref.ref[ZeroPlan]] = weakref.WeakKeyDictionary()
"""The first of equal plans, while it lives. Only `_first_of_equal` reads and writes it, for complete plans. What it
returns equals what was asked for, so a missing entry (two threads that plan at once) costs time, never a result."""


def _first_of_equal(plan: ZeroPlan) -> ZeroPlan:
    """Returns the first of all equal plans: jax compares plans in each call of a step, and identity is fast."""
    first = _PLANS.get(plan)
    earlier = None if first is None else first()
    if earlier is None:
        _PLANS[plan] = weakref.ref(plan)
    return earlier or plan


def _with_own_state(plan: ZeroPlan) -> ZeroPlan:
    """Returns `plan` with the optimizer state that the precision policy adds: masters, loss scale, a counter."""
    masters = [
        None if leaf.master is None else dataclasses.replace(leaf.master, owner=i) for i, leaf in enumerate(plan.leaves)
    ]
    own = own_opt_state(plan, masters)
    if own is None:
        return plan
    prefix = jax.tree_util.GetAttrKey("inner")
    wrapped = dataclasses.replace(own, inner=plan.view.opt_state.tree(plan.opt_leaves))
    leaves = []
    for path, x in jax.tree_util.tree_leaves_with_path(wrapped):
        if isinstance(x, StateLeaf):
            leaves.append(dataclasses.replace(x, path=path_str(path)) if path[0] != prefix else x)
        else:
            leaves.append(plan.whole_leaf(path_str(path), np.shape(x), np.asarray(x).dtype, "kept by jzero"))
    return dataclasses.replace(plan, opt_leaves=tuple(leaves), opt_treedef=jax.tree.structure(wrapped))


def own_opt_state(plan: ZeroPlan, masters: Sequence[object]) -> ZeroOptState | None:
    """Returns the initial state that jzero adds to the optimizer's own; `None` if it adds none.

    Args:
      plan: The plan.
      masters: The entry for each parameter's master copy; used only if it has one.
    """
    dynamic = plan.config.policy.loss_scale
    has_masters = any(leaf.master is not None for leaf in plan.leaves)
    is_rounded = any(leaf.update_dtype is not None for leaf in plan.opt_leaves) or any(
        leaf.trained and leaf.updated.dtype != leaf.update_dtype for leaf in plan.leaves
    )
    keeps = (has_masters, is_rounded, isinstance(dynamic, DynamicLossScale), plan.has_records)
    if not any(keeps):
        return None
    waiting = host_array(False, np.bool_) if plan.config.offload.delays_updates else None
    entries = [x if leaf.master is not None else None for x, leaf in zip(masters, plan.leaves, strict=True)]
    return ZeroOptState(
        inner=None,
        masters=plan.view.params.tree(entries),
        loss_scale=initial_loss_scale(dynamic, len(plan.leaves)) if isinstance(dynamic, DynamicLossScale) else None,
        num_updates=host_array(0, np.int32) if is_rounded else None,
        disk=DiskState(host_array(0, np.int32), waiting) if plan.has_records else None,
    )


def _check_not_overwritten(params: PyTree) -> None:
    """Refuses the collection whose leaves Flax replaces by their gradients: a mean over devices would be wrong."""
    if isinstance(params, Mapping) and OVERWRITTEN in params:
        paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params[OVERWRITTEN])]
        raise ValueError(
            f"`params` has Flax's collection {OVERWRITTEN!r}, fp8 scales and histories such as {paths[:2]}. Flax "
            "replaces them by their gradients; jzero averages gradients over devices, but a history of largest values "
            "needs the maximum. Build the model without `Fp8…DotGeneralOp`; `precision='bf16'` computes in bfloat16."
        )
