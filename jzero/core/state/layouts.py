"""Where gathered parameters go: checks the layout that a user asks for, and lays out one leaf after another."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.core.base.types import DType, PyTree
from jzero.core.config.precision import cast_dtype
from jzero.core.config.settings import Setting, optional
from jzero.core.layout.casts import round_without_derivative
from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import AnyMesh
from jzero.core.layout.placement import on_device
from jzero.core.layout.stored import Stored
from jzero.core.plan.plan import ZeroPlan

Target: TypeAlias = PartitionSpec | NamedSharding
"""Where a parameter is to go."""

KINDS = "a dictionary from regular expressions to a `PartitionSpec` or `NamedSharding` each, or a tree of these"
RULE = (
    "The axes of a spec must be of its mesh, whose devices must be the state's, and their sizes must divide the "
    "dimensions. Write None for a dimension that does not divide; the first rule that matches a path counts."
)


def _float_dtype(value: object) -> DType:
    if not isinstance(value, str | jnp.dtype | type) or not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise ValueError
    return jnp.dtype(value)


FLOAT = optional(Setting("a floating-point dtype, such as 'bfloat16'", _float_dtype))


def find_shardings(shardings: PyTree, plan: ZeroPlan, chosen: Sequence[bool]) -> list[NamedSharding]:
    """Returns the sharding of each chosen parameter, as `shardings` of `gather_params` says."""
    asked = _by_rules(shardings, plan) if _are_rules(shardings) else _by_tree(shardings, plan)
    mesh = next((x.mesh for x, _ in asked if isinstance(x, NamedSharding)), plan.mesh)
    checked, wrong = [], []
    for leaf, take, (x, rule) in zip(plan.leaves, chosen, asked, strict=True):
        try:
            checked += [_checked(x, leaf.param, mesh, plan)] if take else []
        except (TypeError, ValueError) as error:
            spec, by = getattr(x, "spec", x), "" if rule is None else f" (by {rule!r})"
            wrong.append(f"  {leaf.path} {list(leaf.param.shape)}: {spec}{by}: {str(error).partition(chr(10))[0]}")
    if wrong:
        raise ValueError("`shardings` do not fit these parameters:\n" + "\n".join(wrong) + f"\n{RULE}")
    return checked


def lay_out(x: Stored, leaf: StateLeaf, dtype: DType | None, sharding: NamedSharding) -> jax.Array:
    """Returns a stored leaf in natural shape, cast and laid out; nothing else of it is on the devices afterwards."""
    on_devices = on_device(x)
    natural = _natural(on_devices, leaf.cut, cast_dtype(leaf.dtype, dtype), on_devices.sharding)
    return jax.block_until_ready(jax.device_put(natural, sharding))


def _are_rules(shardings: object) -> TypeGuard[dict[str, Target]]:
    return isinstance(shardings, dict) and all(
        isinstance(rule, str) and isinstance(x, PartitionSpec | NamedSharding) for rule, x in shardings.items()
    )


def _by_rules(rules: dict[str, Target], plan: ZeroPlan) -> list[tuple[Target, str | None]]:
    """Returns what the rules give each parameter, and the rule that does."""
    unused = [rule for rule in rules if not any(re.fullmatch(rule, leaf.path) for leaf in plan.leaves)]
    if unused:
        some = ", ".join(repr(leaf.path) for leaf in plan.leaves[:5])
        raise ValueError(
            f"These rules of `shardings` match no parameter: {unused}. A rule must match a whole path; the first paths "
            f"are {some}."
        )
    first = [next((rule for rule in rules if re.fullmatch(rule, leaf.path)), None) for leaf in plan.leaves]
    return [(PartitionSpec() if rule is None else rules[rule], rule) for rule in first]


def _by_tree(tree: PyTree, plan: ZeroPlan) -> list[tuple[Target, None]]:
    try:
        return [(x, None) for x in plan.view.params.nodes(tree)]
    except ValueError as error:
        raise ValueError(f"`shardings` must be {KINDS} with the structure of the parameters: {error}") from error


def _checked(x: Target, leaf: StateLeaf, mesh: AnyMesh, plan: ZeroPlan) -> NamedSharding:
    """Returns the sharding of one parameter; raises if it does not fit."""
    if not isinstance(x, PartitionSpec | NamedSharding):
        raise TypeError(f"not a `PartitionSpec` or a `NamedSharding`: a {type(x).__name__}")
    sharding = NamedSharding(mesh, x) if isinstance(x, PartitionSpec) else x
    if set(sharding.mesh.devices.flat) != set(plan.mesh.devices.flat):
        raise ValueError("its mesh is of other devices than the state's")
    sharding.shard_shape(leaf.shape)
    return sharding


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _natural(x: jax.Array, cut: Cut | None, dtype: DType, sharding: NamedSharding) -> jax.Array:
    """Returns a stored leaf in its natural shape, cast, cut as it is stored where that cuts natural shapes."""
    in_blocks = cut is not None and cut.blocks is not None  # integers, which are not the values
    x = x if in_blocks else round_without_derivative(x, dtype)
    if cut is None or cut.is_stored_naturally:
        return lax.with_sharding_constraint(x, sharding)  # so that the result shares no buffer with the state
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    x = lax.with_sharding_constraint(x, replicated)  # before the slice: an uneven array cannot leave `jit`
    return lax.with_sharding_constraint(round_without_derivative(cut.to_natural(x), dtype), replicated)
