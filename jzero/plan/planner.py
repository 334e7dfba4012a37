"""Makes a plan from a train state: lists its leaves, finds the parameter of each optimizer leaf, and cuts each leaf."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jzero._text import key_names, path_str
from jzero.config.precision import DynamicLossScale, cast_dtype, is_key, wide_dtype
from jzero.config.zero import LeafRule, ZeroConfig
from jzero.jaxpr.sizes import itemsize
from jzero.layout.leaves import LeafPlan, StateLeaf
from jzero.layout.mesh import AnyMesh, axis_size, batch_axes, check_host_memory, check_mesh, shard_axes
from jzero.layout.placement import Memory
from jzero.plan.choice import choose_cut, find_scan_dims
from jzero.plan.matrices import warn_of_matrices, with_matrices
from jzero.plan.opt_leaves import check_opt_state, find_owners, owners_by_flow, plan_opt_leaf
from jzero.plan.opt_state import DiskState, ZeroOptState, host_array, initial_loss_scale
from jzero.plan.plan import ZeroPlan
from jzero.plan.state_fields import check_arrays, frozen_fields, other_fields
from jzero.plan.trainable import find_frozen, trace_update
from jzero.plan.ways import why_not_stored

PyTree = Any
OVERWRITTEN = "_overwrite_with_gradient"  # as `flax.linen.fp8_ops` names it


def make_plan(state: Any, tx: optax.GradientTransformation, config: ZeroConfig, mesh: AnyMesh) -> ZeroPlan:
    """Returns the plan of a train state in natural shapes, concrete or abstract; touches no device.

    Args:
      state: Anything with the fields of Flax's `TrainState`; plain, without the state that a precision policy adds.
      tx: Its optax transformation, unwrapped.
      config: The configuration.
      mesh: The mesh; may be abstract.
    """
    check_mesh(mesh, config)
    check_arrays(state)
    _check_not_overwritten(state.params)
    offload = config.offload
    if "host" in (offload.optimizer, offload.params):
        check_host_memory(mesh)
    seen = _as_seen(state.params, _plan_params(state.params, config, mesh))
    made = jax.eval_shape(tx.init, seen)
    update = _Update(tx, made, trace_update(tx, seen, made))
    plan = with_matrices(_choose_plan(state, update, config, mesh), update.jaxpr)
    if config.offload.is_late and not plan.has_files:
        late, off = ("delay=1", "delay=0") if config.offload.delay else ("zenflow", "zenflow=None")
        raise ValueError(
            f"`Offload.{late}` lets the update of what is on the host or on disk run beside the next step, but here is "
            "nothing: the optimizer keeps nothing of a parameter's shape, or rules keep all of it on the devices. "
            f"Set `{off}`."
        )
    if config.offload.params == "disk":
        _check_rows(plan)
    warn_of_matrices(plan)
    return _first_of_equal(plan)


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


class _Update(NamedTuple):
    """An optimizer.

    Attributes:
      tx: The optax transformation.
      made: The state that it makes, as shapes.
      jaxpr: The closed jaxpr of its update; `None` if that needs further arguments.
    """

    tx: Any
    made: PyTree
    jaxpr: Any


def _as_seen(params: PyTree, leaves: Sequence[LeafPlan]) -> PyTree:
    """Returns the parameters as the optimizer sees them, as shapes."""
    shapes = [jax.ShapeDtypeStruct(leaf.param.shape, leaf.update_dtype) for leaf in leaves]
    return jax.tree.structure(params).unflatten(shapes)


def _choose_plan(state: Any, update: _Update, config: ZeroConfig, mesh: AnyMesh) -> ZeroPlan:
    """Chooses what goes to the host."""
    offload = config.offload
    if offload.optimizer == "none":
        return _make_plan(state, update, config, mesh, ())
    if offload.ratio == 1 and offload.device_budget_bytes is None:  # whether a parameter is trained does not matter
        order, _, _ = _offload_order(state.params, config, [True] * len(jax.tree.leaves(state.params)))
        return _make_plan(state, update, config, mesh, order)
    near = _make_plan(state, update, config, mesh, ())
    order, sizes, least = _offload_order(state.params, config, [leaf.trained for leaf in near.leaves])
    if offload.device_budget_bytes is None:
        wanted = offload.ratio * sum(leaf.param.size for leaf in near.leaves if leaf.trained)
        sums = itertools.accumulate(sizes, initial=0)
        count = next((k for k, moved in enumerate(sums) if moved >= wanted), len(order))
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


def _make_plan(state: Any, update: _Update, config: ZeroConfig, mesh: AnyMesh, offloaded: Sequence[int]) -> ZeroPlan:
    others = other_fields(state)
    if config.offload.zenflow is not None and axis_size(mesh, config) > 1:  # whole leaves have no columns of a device
        cuts = [leaf.grad.cut for leaf in _plan_params(state.params, config, mesh)]
        offloaded = [i for i in offloaded if cuts[i]]
    leaves = _plan_params(state.params, config, mesh, frozenset(offloaded))
    trees = (state.params, *(others[name] for name in frozen_fields(state)))
    _check_rules_match(
        config, [path_str(path) for tree in trees for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    )
    made_leaves = jax.tree_util.tree_leaves_with_path(update.made)
    made_dtypes = {path_str(path): x.dtype for path, x in made_leaves}
    paths, values = _unzip(jax.tree_util.tree_leaves_with_path(state.opt_state))
    check_opt_state(made_leaves, paths, values)
    owners = find_owners(update.tx, state.params, state.opt_state, paths)
    owners = owners_by_flow(update.jaxpr, owners, len(leaves))
    shaped = {i for i, x in zip(owners, values, strict=True) if i is not None and np.shape(x) == leaves[i].param.shape}
    frozen = find_frozen(update.tx, update.jaxpr, [i in shaped for i in range(len(leaves))])
    given = [_dtype_of(x) for x in jax.tree.leaves(state.params)]
    leaves = [_freeze(leaf, dtype, config) if f else leaf for leaf, dtype, f in zip(leaves, given, frozen, strict=True)]
    inner = [
        plan_opt_leaf(_describe(path, x, config, mesh), owner, made_dtypes[path_str(path)], leaves, config, mesh)
        for path, x, owner in zip(paths, values, owners, strict=True)
    ]
    shaped_like = {i: leaf.param.shape for i, leaf in enumerate(leaves) if i in offloaded and leaf.trained}
    far = [x.owner is not None and shaped_like.get(x.owner) == x.shape for x in inner]
    inner = [dataclasses.replace(x, memory=_far(config)) if f else x for x, f in zip(inner, far, strict=True)]
    params_treedef = jax.tree.structure(state.params)
    other_leaves: list[StateLeaf] = []
    for name, value in others.items():
        if name in frozen_fields(state):
            other_leaves += _plan_frozen(name, value, config, mesh)
        else:
            other_leaves += _plan_other(name, value, params_treedef, leaves, config, mesh)
    inner_treedef = jax.tree.structure(state.opt_state)
    plan = ZeroPlan(
        config, mesh, tuple(leaves), tuple(inner), tuple(other_leaves), params_treedef, inner_treedef, inner_treedef
    )
    return _with_own_state(plan)


_PLANS: weakref.WeakKeyDictionary[ZeroPlan, weakref.ref[ZeroPlan]] = weakref.WeakKeyDictionary()


def _first_of_equal(plan: ZeroPlan) -> ZeroPlan:
    """Returns the first of all equal plans: jax compares plans in each call of a step, and identity is fast."""
    first = _PLANS.get(plan)
    known = None if first is None else first()
    if known is None:
        _PLANS[plan] = weakref.ref(plan)
    return known or plan


def _with_own_state(plan: ZeroPlan) -> ZeroPlan:
    """Returns `plan` with the optimizer state that the precision policy adds: masters, loss scale, a counter."""
    masters = [
        None if leaf.master is None else dataclasses.replace(leaf.master, owner=i) for i, leaf in enumerate(plan.leaves)
    ]
    own = own_opt_state(plan, masters)
    if own is None:
        return plan
    prefix = jax.tree_util.GetAttrKey("inner")
    wrapped = dataclasses.replace(own, inner=plan.opt_treedef.unflatten(plan.opt_leaves))
    leaves = []
    for path, x in jax.tree_util.tree_leaves_with_path(wrapped):
        if isinstance(x, StateLeaf):
            leaves.append(dataclasses.replace(x, path=path_str(path)) if path[0] != prefix else x)
        else:
            leaves.append(plan.whole_leaf(path_str(path), np.shape(x), np.asarray(x).dtype, "kept by jzero"))
    return dataclasses.replace(plan, opt_leaves=tuple(leaves), opt_treedef=jax.tree.structure(wrapped))


def own_opt_state(plan: ZeroPlan, masters: Sequence[Any]) -> ZeroOptState | None:
    """Returns the initial state that jzero adds to the optimizer's own; `None` if it adds none.

    Args:
      plan: The plan.
      masters: The entry for each parameter's master copy; used only if it has one.
    """
    dynamic = plan.config.policy.loss_scale
    has_masters = any(leaf.master is not None for leaf in plan.leaves)
    keeps = (has_masters, plan.rounds_stochastically, isinstance(dynamic, DynamicLossScale), plan.has_files)
    if not any(keeps):
        return None
    waiting = host_array(False, np.bool_) if plan.config.offload.is_late else None
    kept = [x if leaf.master is not None else None for x, leaf in zip(masters, plan.leaves, strict=True)]
    return ZeroOptState(
        inner=None,
        masters=plan.params_treedef.unflatten(kept),
        loss_scale=initial_loss_scale(dynamic, len(plan.leaves)) if isinstance(dynamic, DynamicLossScale) else None,
        num_updates=host_array(0, np.int32) if plan.rounds_stochastically else None,
        disk=DiskState(host_array(0, np.int32), waiting) if plan.has_files else None,
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


def _describe(path: tuple[Any, ...], x: Any, config: ZeroConfig, mesh: AnyMesh) -> StateLeaf:
    """Describes an input leaf: natural shape, dtype, and its spec over other mesh axes."""
    shape = tuple(getattr(x, "shape", ()))
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    ours = batch_axes(config)

    def keep(names: Any) -> Any:
        names = names if isinstance(names, tuple) else (names,)
        kept = tuple(n for n in names if n in mesh.axis_names and n not in ours)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    entries = [keep(names) for names in spec]
    base = PartitionSpec(*entries) if any(e is not None for e in entries) else PartitionSpec()
    return StateLeaf(path_str(path), shape, _dtype_of(x), mesh, shard_axes(config), base)


def _dtype_of(x: Any) -> Any:
    """Returns the dtype that an array or a number has on the device, where NumPy's float64 becomes float32."""
    dtype = x.dtype if hasattr(x, "dtype") else np.result_type(type(x))
    return dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def _plan_params(
    params: PyTree, config: ZeroConfig, mesh: AnyMesh, offloaded: frozenset[int] = frozenset()
) -> list[LeafPlan]:
    paths, values = _unzip(jax.tree_util.tree_leaves_with_path(params))
    described = [_describe(path, x, config, mesh) for path, x in zip(paths, values, strict=True)]
    rules = [config.rule_for(leaf.path) for leaf in described]
    _check_rules(config, described, rules)
    scan_dims = find_scan_dims([key_names(p) for p in paths], [leaf.shape for leaf in described], rules)
    persistent = _find_persistent(described, rules, config)
    plans = []
    for i, (leaf, rule, scan_dim, keep) in enumerate(zip(described, rules, scan_dims, persistent, strict=True)):
        if config.stage == 0 or rule.replicated or is_key(leaf.dtype):
            cut, reason = None, "by rule" if rule.replicated else "random keys" if config.stage else "stage 0"
        else:
            cut, reason = choose_cut(
                leaf.shape, axis_size(mesh, config), scan_dim=scan_dim, taken_dims=leaf.taken, dim=rule.dim
            )
        grad = dataclasses.replace(leaf, cut=cut, reason=reason)
        why = reason or (keep if config.stage == 3 else f"stage {config.stage} keeps parameters whole")
        # Vectors, even in a scanned layer, are not worth the transfer, and TPUs cannot slice 16-bit stacks of them.
        is_matrix = len(leaf.shape) - (scan_dim is not None) > 1
        to_host = config.offload.params == "host" and is_matrix and rule.offload is not False and not why
        # A row is read as a scan gathers it, and updated with its optimizer state.
        is_read = scan_dim == 0 and is_matrix and not why and jnp.issubdtype(leaf.dtype, jnp.floating)
        to_disk = config.offload.params == "disk" and is_read and i in offloaded
        memory: Memory = "host" if to_host else "disk" if to_disk else "device"
        param = dataclasses.replace(leaf, cut=None if why else cut, reason=why, memory=memory)
        plan = LeafPlan(param, grad, scan_dim, leaf.dtype, leaf.dtype)
        plans.append(_with_dtypes(plan, rule, config, i in offloaded))
    return plans


def _with_dtypes(plan: LeafPlan, rule: LeafRule, config: ZeroConfig, offloaded: bool) -> LeafPlan:
    """Returns the plan of a parameter with the dtypes that the precision policy gives it."""
    policy, given = config.policy, plan.param.dtype
    if is_key(given):  # its gradient and update are never used
        grad = dataclasses.replace(plan.grad, dtype=jnp.dtype(jnp.float32))
        return dataclasses.replace(plan, grad=grad, update_dtype=grad.dtype)
    compute = cast_dtype(given, policy.compute if rule.compute_dtype is None else jnp.dtype(rule.compute_dtype))
    kept = cast_dtype(given, policy.master)
    if policy.master is not None and itemsize(compute) > itemsize(kept):
        kept = compute  # a rule asks for more than the master's dtype
    update = cast_dtype(given, wide_dtype(kept) if policy.master is not None else None)
    grad = dataclasses.replace(plan.grad, dtype=cast_dtype(compute, policy.accumulate))
    # A parameter that is whole on every device, or offloaded, is stored in the compute dtype; its master is cut.
    separate = (plan.param.cut is None or offloaded) and compute != kept
    memory = _far(config) if offloaded else "device"
    master = dataclasses.replace(plan.grad, dtype=kept, memory=memory) if separate else None
    param = dataclasses.replace(plan.param, dtype=compute if separate else kept)
    return dataclasses.replace(plan, param=param, grad=grad, compute_dtype=compute, update_dtype=update, master=master)


def _far(config: ZeroConfig) -> Memory:
    """Returns where the optimizer state of a chosen parameter goes."""
    where = config.offload.optimizer
    return "device" if where == "none" else "ram" if where == "host" and config.offload.is_late else where


def _freeze(plan: LeafPlan, given: Any, config: ZeroConfig) -> LeafPlan:
    """Returns the plan of a parameter that is not trained: no gradient, no master, its own dtype, perhaps in blocks."""
    memory = "device" if plan.param.in_records else plan.param.memory  # records are what an update writes
    param = dataclasses.replace(plan.param, dtype=given, memory=memory)
    if config.quantization.frozen != "none" and not why_not_stored(param, config.rule_for(param.path)):
        assert param.cut is not None
        param = dataclasses.replace(param, cut=param.cut.in_blocks(config.quantization.frozen, given, {}))
    grad = dataclasses.replace(plan.grad, shape=(), base=PartitionSpec(), cut=None, reason="not trained")
    update = grad.dtype if is_key(given) else given
    return dataclasses.replace(plan, param=param, grad=grad, update_dtype=update, master=None, trained=False)


def _check_rules(config: ZeroConfig, leaves: Sequence[StateLeaf], rules: Sequence[LeafRule]) -> None:
    bad = []
    for leaf, rule in zip(leaves, rules, strict=True):
        for name in ("dim", "scan_dim"):
            value = getattr(rule, name)
            if value is not None and value >= len(leaf.shape):
                bad.append(f"  {leaf.path}: shape {leaf.shape}, but the rule has {name}={value}")
        if rule.dim is not None and rule.dim in leaf.taken:
            bad.append(f"  {leaf.path}: the rule has dim={rule.dim}, which {leaf.base} shards already")
    if bad:
        raise ValueError("`rules` must name free dimensions of the leaves that they match:\n" + "\n".join(bad))


def _check_rules_match(config: ZeroConfig, paths: Sequence[str]) -> None:
    """Raises if a rule applies to no parameter, trained or not."""
    unused = [p for p in config.rules if not any(config.rule_for(path) is config.rules[p] for path in paths)]
    if unused:
        some = ", ".join(map(repr, paths[:5]))
        raise ValueError(
            f"`rules` patterns {unused} decide nothing: each must match the whole path of a parameter that no earlier "
            f"pattern matches. The first paths are {some}."
        )


def _find_persistent(leaves: Sequence[StateLeaf], rules: Sequence[LeafRule], config: ZeroConfig) -> list[str]:
    """Returns the reason why each parameter stays whole at stage 3; an empty string if it does not."""
    reasons = ["by rule" if rule.persistent else "" for rule in rules]
    kept = 0
    for i in sorted(range(len(leaves)), key=lambda i: leaves[i].size):
        size, rule = leaves[i].size, rules[i]
        if rule.persistent is not None or size > config.persistence_threshold:
            continue
        kept += size
        if config.model_persistence_threshold is not None and kept > config.model_persistence_threshold:
            break
        reasons[i] = f"up to {config.persistence_threshold} elements (persistence_threshold)"
    return reasons


def _plan_other(
    name: str, value: PyTree, params_treedef: Any, plans: Sequence[LeafPlan], config: ZeroConfig, mesh: AnyMesh
) -> list[StateLeaf]:
    """Lays out copies of the parameters (such as moving averages) like them; keeps everything else whole."""
    shapes = [p.param.shape for p in plans]

    def is_copy(tree: PyTree) -> bool:
        leaves, treedef = jax.tree.flatten(tree)
        return bool(leaves) and treedef == params_treedef and [np.shape(x) for x in leaves] == shapes

    found: list[StateLeaf] = []
    for above, tree in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_copy):
        copies = range(len(plans)) if is_copy(tree) else [None]
        for i, (path, x) in zip(copies, jax.tree_util.tree_leaves_with_path(tree), strict=True):
            leaf = _describe((jax.tree_util.GetAttrKey(name), *above, *path), x, config, mesh)
            found.append(_like_param(leaf, i, plans[i].param) if i is not None else _kept_whole(leaf, name))
    return found


def _like_param(leaf: StateLeaf, i: int, param: StateLeaf) -> StateLeaf:
    """Returns a leaf laid out like parameter `i`."""
    cut = param.cut and param.cut.unpacked()
    return dataclasses.replace(leaf, base=param.base, cut=cut, reason=param.reason, owner=i)


def _kept_whole(leaf: StateLeaf, name: str) -> StateLeaf:
    return dataclasses.replace(leaf, reason="scalar" if not leaf.shape else f"field {name!r}, not shaped like params")


def _plan_frozen(name: str, value: PyTree, config: ZeroConfig, mesh: AnyMesh) -> list[StateLeaf]:
    """Lays out a field of parameters outside the optimizer: like parameters, but without gradients."""
    prefix = jax.tree_util.GetAttrKey(name)
    return [
        dataclasses.replace(
            _freeze(plan, _dtype_of(x), config).param,
            path=f"{path_str((prefix,))}/{plan.path}",
            is_param=True,
            compute_dtype=plan.compute_dtype,
        )
        for x, plan in zip(jax.tree.leaves(value), _plan_params(value, config, mesh), strict=True)
    ]


def _unzip(pairs: Sequence[tuple[tuple[Any, ...], Any]]) -> tuple[list[tuple[Any, ...]], list[Any]]:
    return [path for path, _ in pairs], [x for _, x in pairs]
