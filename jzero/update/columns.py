"""Updates the chosen columns of parameters in records, on the devices, in the program that updates everything else.

A *column* is a slice of one device's part of a parameter along the dimension that ZeRO cuts, so choosing columns needs
no communication. In: which columns each device has chosen, and their masters and optimizer state. Out: their new state,
and parameters whose chosen columns are new.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.layout.leaves import LeafPlan, StateLeaf
from jzero.layout.on_disk import OnDisk, Stored
from jzero.plan.plan import ZeroPlan
from jzero.update.chunks import Part, first_index
from jzero.update.fields import Input, grad_field, param_field
from jzero.update.find_visits import result_visit
from jzero.update.run import Run, Targets
from jzero.update.whole import Before


def _specs(leaf: StateLeaf) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the specs of arrays laid out like a leaf, and of one entry per chosen column of each part."""
    spec = leaf.device_sharding.spec
    names = tuple(jax.tree.leaves(tuple(spec)))
    return spec, PartitionSpec(names or None)


class Columns:
    """The chosen columns in one program.

    Args:
      plan: The plan.
      chosen: By parameter, the indices that each device has chosen in its part, int32 [parts · K].
      near: By parameter, the fields of these columns, as in the records, [..., N · K, ...].

    Attributes:
      new: The same after `update`; filled while the program is traced.
    """

    def __init__(
        self, plan: ZeroPlan, chosen: Mapping[int, jax.Array], near: Mapping[int, Sequence[jax.Array]]
    ) -> None:
        self.plan, self.chosen, self.near = plan, chosen, near
        self.new = {i: list(fields) for i, fields in near.items()}

    def update(self, run: Run, i: int, inputs: Before[Input], targets: Targets) -> dict[int, Stored]:
        """Returns the results of a parameter, by their numbers among all: its state stays in the records."""
        plan, leaf, param = self.plan, self.plan.leaves[i].grad, param_field(inputs, i).in_memory
        visit, operands = result_visit(run, i, targets)
        arrays = {"grads": [grad_field(inputs, i).in_memory], "params": [param], "near": operands.near}
        parts = [arrays[x.kind][x.number] for x in visit.sources if x.kind in arrays]
        dim, (like, entries) = leaf.column_dim, _specs(leaf)

        def local(
            fields: list[jax.Array], chosen: jax.Array, parts: list[jax.Array], numbers: list[jax.Array], old: jax.Array
        ) -> tuple[list[jax.Array], jax.Array]:
            first = first_index(leaf, old.shape)
            taken = iter([jnp.take(x, chosen, dim) for x in parts])
            shape = fields[0].shape

            def along(d: int) -> jax.Array:
                spread = [-1 if axis == dim else 1 for axis in range(len(shape))]
                index = chosen.reshape(spread) if d == dim else lax.broadcasted_iota(jnp.int32, shape, d)
                return jnp.broadcast_to(first[d] + index, shape)

            part = Part(leaf, along)
            readers = {"disk": lambda x: fields[x.number], "number": lambda x: numbers[x.number]}
            readers |= {"positions": lambda x: part.positions()}
            values = [readers[x.kind](x) if x.kind in readers else next(taken) for x in visit.sources]
            outs = zip(visit.targets, visit.kernel(values, shape), strict=True)
            new, result = list(fields), old
            for target, x in outs:
                x = part.without_padding(x, 0)  # noqa: PLW2901
                if isinstance(target, int):
                    new[target] = x.astype(fields[target].dtype)
                else:
                    place = (*[slice(None)] * dim, chosen)
                    result = old.at[place].set(x.astype(old.dtype), unique_indices=True)
            return new, result

        specs = ([like] * len(self.near[i]), entries, [like] * len(parts), PartitionSpec(), like)
        mapped = jax.shard_map(
            local, mesh=plan.mesh, in_specs=specs, out_specs=([like] * len(self.near[i]), like), check_vma=False
        )
        self.new[i], result = mapped(list(self.near[i]), self.chosen[i], parts, operands.numbers, param)
        near = leaf.load(result)
        return {k: x if isinstance(x, OnDisk) else near for k, x in targets.items()}


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
