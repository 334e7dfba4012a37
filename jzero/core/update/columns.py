"""Updates the chosen columns of parameters in records, on the devices, in the program that updates everything else.

A *column* is a slice of one device's part of a parameter along the dimension that ZeRO cuts, so choosing columns needs
no communication.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.plan.plan import ZeroPlan
from jzero.core.update.chunks import first_index
from jzero.core.update.kernels import Part, PartKernel
from jzero.core.update.run import Operands


def _specs(leaf: StateLeaf) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the specs of arrays laid out like a leaf, and of one entry per chosen column of each part."""
    spec = leaf.device_sharding.spec
    names = tuple(jax.tree.leaves(tuple(spec)))
    return spec, PartitionSpec(names or None)


def update_columns(  # noqa: PLR0913  # operands of a kernel, by kind
    plan: ZeroPlan,
    kernel: PartKernel,
    operands: Operands,
    grad: jax.Array,
    param: jax.Array,
    chosen: jax.Array,
    fields: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the new fields of chosen columns, and the parameter with these columns new; inside `jit`.

    Args:
      plan: The plan.
      kernel: What is computed from each element.
      operands: What it reads beside its fields.
      grad: The gradient, as stored.
      param: The parameter, as stored.
      chosen: The indices that each device has chosen in its part, int32 [parts · K].
      fields: The fields of these columns, as in the records, [..., N · K, ...].
    """
    leaf = plan.leaves[kernel.param].grad
    arrays = {"grads": [grad], "params": [param], "array": operands.arrays}
    parts = [arrays[x.kind][x.number] for x in kernel.sources if x.kind in arrays]
    dim, (like, entries) = leaf.column_dim, _specs(leaf)

    def local(
        fields: list[jax.Array], chosen: jax.Array, parts: list[jax.Array], scalars: list[jax.Array], old: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        first = first_index(leaf, old.shape)
        taken = iter([jnp.take(x, chosen, dim) for x in parts])
        shape = fields[0].shape

        def along(d: int) -> jax.Array:
            spread = [-1 if axis == dim else 1 for axis in range(len(shape))]
            index = chosen.reshape(spread) if d == dim else lax.broadcasted_iota(jnp.int32, shape, d)
            return jnp.broadcast_to(first[d] + index, shape)

        at_hand = {"record": fields, "scalar": scalars}
        done = kernel.on(
            Part(leaf, along), lambda x: at_hand[x.kind][x.number] if x.kind in at_hand else next(taken), shape
        )
        new, result = list(fields), old
        for target, x in zip(kernel.targets, done, strict=True):
            if isinstance(target, int):
                new[target] = x.astype(fields[target].dtype)
            else:
                place = (*[slice(None)] * dim, chosen)
                result = old.at[place].set(x.astype(old.dtype), unique_indices=True)
        return new, result

    specs = ([like] * len(fields), entries, [like] * len(parts), PartitionSpec(), like)
    mapped = jax.shard_map(
        local, mesh=plan.mesh, in_specs=specs, out_specs=([like] * len(fields), like), check_vma=False
    )
    old = plan.leaves[kernel.param].param.relayout(param, leaf)
    new, result = mapped(list(fields), chosen, parts, operands.scalars, old)
    return new, result


@functools.partial(jax.jit, static_argnums=0)
def choose_columns(plan: ZeroPlan, grads: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    """Returns the columns with the largest gradients of each device's part, int32 [parts · K] by parameter."""

    def of(i: int, grad: jax.Array) -> jax.Array:
        leaf = plan.leaves[i].grad
        dim, count, (like, entries) = leaf.column_dim, plan.num_chosen(leaf), _specs(leaf)

        def local(part: jax.Array) -> jax.Array:
            others = [d for d in range(part.ndim) if d != dim]
            norms = jnp.square(part.astype(jnp.float32)).sum(others)
            return jnp.sort(lax.top_k(norms, count)[1]).astype(jnp.int32)

        chosen: jax.Array = jax.shard_map(local, mesh=plan.mesh, in_specs=like, out_specs=entries, check_vma=False)(
            grad
        )
        return lax.with_sharding_constraint(chosen, NamedSharding(plan.mesh, entries))

    return {i: of(i, grad) for i, grad in grads.items()}


def with_others(plan: ZeroPlan, leaf: LeafPlan, old: jax.Array, new: jax.Array, chosen: jax.Array | None) -> jax.Array:
    """Returns a parameter with new values in all columns but the chosen ones, in its layout; inside `jit`.

    Args:
      plan: The plan.
      leaf: The parameter.
      old: Its value as stored.
      new: The new values of all columns, laid out like the gradient.
      chosen: The columns that keep theirs; `None` if none do.
    """
    if chosen is None:
        return new
    (like, entries), dim = _specs(leaf.grad), leaf.grad.column_dim

    def local(new: jax.Array, stored: jax.Array, chosen: jax.Array) -> jax.Array:
        place = (*[slice(None)] * dim, chosen)
        return new.at[place].set(jnp.take(stored, chosen, dim), unique_indices=True)

    mapped = jax.shard_map(local, mesh=plan.mesh, in_specs=(like, like, entries), out_specs=like, check_vma=False)
    return mapped(new, leaf.param.relayout(old, leaf.grad), chosen)
