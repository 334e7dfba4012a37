"""Lays out the parameters of a state and the leaves of its other fields."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jzero.core.base.text import key_names, path_str
from jzero.core.base.types import AxisNames, DType, KeyPath, PyTree
from jzero.core.config.precision import Precision, cast_dtype, is_key, wide_dtype
from jzero.core.config.zero import LeafRule, ZeroConfig
from jzero.core.jaxpr.sizes import itemsize
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.mesh import AnyMesh, axis_size, batch_axes, shard_axes
from jzero.core.layout.placement import Memory
from jzero.core.layout.platform import platform_facts
from jzero.core.plan.choice import choose_cut, choose_packed_cut, features_of_table, find_scan_dims
from jzero.core.plan.traffic import why_not_stored

T = TypeVar("T")


def describe_leaf(path: str, x: object, config: ZeroConfig, mesh: AnyMesh) -> StateLeaf:
    """Describes an input leaf: natural shape, dtype, and its spec over other mesh axes."""
    shape = tuple(getattr(x, "shape", ()))
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    ours = batch_axes(config)

    def keep(names: AxisNames) -> AxisNames:
        each = names if isinstance(names, tuple) else (names,)
        others = tuple(n for n in each if n is not None and n in mesh.axis_names and n not in ours)
        return None if not others else others[0] if len(others) == 1 else others

    entries = [keep(names) for names in spec]
    base = PartitionSpec(*entries) if any(e is not None for e in entries) else PartitionSpec()
    return StateLeaf(path, shape, dtype_of(x), mesh, shard_axes(config), base)


def dtype_of(x: object) -> DType:
    """Returns the dtype that an array or a number has on the device, where NumPy's float64 becomes float32."""
    dtype = x.dtype if hasattr(x, "dtype") else np.result_type(type(x))
    return dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def plan_params(
    params: PyTree, config: ZeroConfig, mesh: AnyMesh, offloaded: frozenset[int] = frozenset()
) -> list[LeafPlan]:
    """Returns the layout of each parameter; `offloaded` has the indices of those whose state leaves the devices."""
    paths, values = unzip(jax.tree_util.tree_leaves_with_path(params))
    described = [describe_leaf(path_str(path), x, config, mesh) for path, x in zip(paths, values, strict=True)]
    rules = [config.rule_for(leaf.path) for leaf in described]
    _check_rules(config, described, rules)
    scan_dims = find_scan_dims([key_names(p) for p in paths], [leaf.shape for leaf in described], rules)
    persistent = _find_persistent(described, rules, config)
    plans = []
    for i, (leaf, rule, scan_dim, keep) in enumerate(zip(described, rules, scan_dims, persistent, strict=True)):
        if config.stage == 0 or rule.replicated or is_key(leaf.dtype):
            cut, reason = None, "by rule" if rule.replicated else "random keys" if config.stage else "stage 0"
        else:
            num_shards, least = axis_size(mesh, config), platform_facts(mesh).least_features
            is_free = rule.dim is None and scan_dim is None and not leaf.taken
            cut, reason = choose_cut(
                leaf.shape,
                num_shards,
                scan_dim=scan_dim,
                taken_dims=leaf.taken,
                dim=features_of_table(leaf.shape, num_shards, least) if is_free else rule.dim,
                most_unpadded=0 if rule.persistent is False else config.most_unpadded,
            )
        why = reason or (keep if config.stage == 3 else f"stage {config.stage} keeps parameters whole")
        # Vectors, even in a scanned layer, are not worth the transfer, and TPUs cannot slice 16-bit stacks of them.
        is_matrix = len(leaf.shape) - (scan_dim is not None) > 1
        to_host = config.offload.params == "host" and is_matrix and rule.offload is not False and not why
        # A row is read as a scan gathers it, and updated with its optimizer state.
        is_read = scan_dim == 0 and is_matrix and not why and jnp.issubdtype(leaf.dtype, jnp.floating)
        to_disk = config.offload.params == "disk" and is_read and i in offloaded
        memory: Memory = "host" if to_host else "records" if to_disk else "device"
        compute, master_dtype, update = _dtypes(leaf.dtype, rule, config.policy)
        # A parameter that is whole on every device, or offloaded, is stored in the compute dtype; its master is cut.
        separate = bool(why or cut is None or i in offloaded) and compute != master_dtype
        grad_dtype = update if is_key(leaf.dtype) else cast_dtype(compute, config.policy.accumulate)
        described_by = functools.partial(dataclasses.replace, leaf)
        state = far_memory(config) if i in offloaded else "device"
        plans.append(
            LeafPlan(
                param=described_by(
                    dtype=compute if separate else master_dtype, cut=None if why else cut, reason=why, memory=memory
                ),
                grad=described_by(dtype=grad_dtype, cut=cut, reason=reason),
                scan_dim=scan_dim,
                compute_dtype=compute,
                update_dtype=update,
                master=described_by(dtype=master_dtype, cut=cut, reason=reason, memory=state) if separate else None,
            )
        )
    return plans


def as_seen(params: PyTree, config: ZeroConfig) -> PyTree:
    """Returns the parameters as the optimizer sees them, as shapes."""

    def shape(path: KeyPath, x: ArrayLike) -> jax.ShapeDtypeStruct:
        *_, update = _dtypes(dtype_of(x), config.rule_for(path_str(path)), config.policy)
        return jax.ShapeDtypeStruct(np.shape(x), update)

    return jax.tree_util.tree_map_with_path(shape, params)


@functools.lru_cache(maxsize=256)
def _dtypes(dtype: DType, rule: LeafRule, policy: Precision) -> tuple[DType, DType, DType]:
    """Returns the dtypes in which the loss has a parameter, in which its master is, and in which it is updated."""
    if is_key(dtype):  # its gradient and update are never used
        return dtype, dtype, jnp.dtype(jnp.float32)
    compute = cast_dtype(dtype, policy.compute if rule.compute_dtype is None else jnp.dtype(rule.compute_dtype))
    master = cast_dtype(dtype, policy.master)
    if policy.master is not None and itemsize(compute) > itemsize(master):
        master = compute  # a rule asks for more than the master's dtype
    return compute, master, cast_dtype(dtype, wide_dtype(master) if policy.master is not None else None)


def far_memory(config: ZeroConfig) -> Memory:
    """Returns the memory of offloaded optimizer state."""
    offload = config.offload
    if offload.optimizer == "none":
        return "device"
    return "records" if offload.uses_records else "host"


def freeze(plan: LeafPlan, dtype: DType, config: ZeroConfig) -> LeafPlan:
    """Returns the plan of a parameter that is not trained: no gradient, no master, its own dtype, perhaps in blocks."""
    memory = "device" if plan.param.in_records else plan.param.memory  # records are what an update writes
    param = dataclasses.replace(plan.param, dtype=dtype, memory=memory)
    rule = config.rule_for(param.path)
    if config.quantization.frozen != "none" and param.cut is not None:
        cut = choose_packed_cut(param.cut) if rule.dim is None and not any(param.base) else param.cut
        if not why_not_stored(dataclasses.replace(param, cut=cut), rule):
            param = dataclasses.replace(param, cut=cut.in_blocks(config.quantization.frozen, dtype, {}))
    grad = dataclasses.replace(plan.grad, shape=(), base=PartitionSpec(), cut=None, reason="not trained")
    update = grad.dtype if is_key(dtype) else dtype
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


def check_rules_match(config: ZeroConfig, paths: Sequence[str]) -> None:
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
    total = 0
    for i in sorted(range(len(leaves)), key=lambda i: leaves[i].size):
        size, rule = leaves[i].size, rules[i]
        if rule.persistent is not None or size > config.persistence_threshold:
            continue
        total += size
        if config.model_persistence_threshold is not None and total > config.model_persistence_threshold:
            break
        reasons[i] = f"up to {config.persistence_threshold} elements (persistence_threshold)"
    return reasons


def plan_other_field(
    name: str, value: PyTree, params_treedef: PyTreeDef, plans: Sequence[LeafPlan], config: ZeroConfig, mesh: AnyMesh
) -> list[StateLeaf]:
    """Lays out copies of the parameters (such as moving averages) like them; keeps everything else whole."""
    shapes = [p.param.shape for p in plans]

    def is_copy(tree: PyTree) -> bool:
        leaves, treedef = jax.tree.flatten(tree)
        return bool(leaves) and treedef == params_treedef and [np.shape(x) for x in leaves] == shapes

    laid_out: list[StateLeaf] = []
    for above, tree in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_copy):
        copies = range(len(plans)) if is_copy(tree) else [None]
        for i, (path, x) in zip(copies, jax.tree_util.tree_leaves_with_path(tree), strict=True):
            leaf = describe_leaf(path_str((jax.tree_util.GetAttrKey(name), *above, *path)), x, config, mesh)
            laid_out.append(_like_param(leaf, i, plans[i].param) if i is not None else _kept_whole(leaf, name))
    return laid_out


def _like_param(leaf: StateLeaf, i: int, param: StateLeaf) -> StateLeaf:
    """Returns a leaf laid out like parameter `i`."""
    cut = param.cut and param.cut.unpacked()
    return dataclasses.replace(leaf, base=param.base, cut=cut, reason=param.reason, owner=i)


def _kept_whole(leaf: StateLeaf, name: str) -> StateLeaf:
    return dataclasses.replace(leaf, reason="scalar" if not leaf.shape else f"field {name!r}, not shaped like params")


def plan_frozen_field(name: str, value: PyTree, config: ZeroConfig, mesh: AnyMesh) -> list[StateLeaf]:
    """Lays out a field of parameters outside the optimizer: like parameters, but without gradients."""
    prefix = jax.tree_util.GetAttrKey(name)
    return [
        dataclasses.replace(
            freeze(plan, dtype_of(x), config).param,
            path=f"{path_str((prefix,))}/{plan.path}",
            compute_dtype=plan.compute_dtype,
        )
        for x, plan in zip(jax.tree.leaves(value), plan_params(value, config, mesh), strict=True)
    ]


def unzip(pairs: Sequence[tuple[KeyPath, T]]) -> tuple[list[KeyPath], list[T]]:
    """Returns paths and leaves apart."""
    return [path for path, _ in pairs], [x for _, x in pairs]
