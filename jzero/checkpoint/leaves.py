"""A training state on disk: natural shapes, masters instead of parameters, the optimizer's own state.

[Note: The format on disk]
A checkpoint has the tree of a plain Flax and optax program. It does not show stage, padding, world size or precision,
so any layout can restore any other's checkpoint, and so can plain Orbax. Each process writes its parts of a padded leaf
without the padding. The parts of a flattened leaf are not slices of its natural shape, so the leaf is first cut along
one dimension instead (`along_one_dim`); reading does the reverse. Orbax writes no `uint4`, which is `uint8` on disk; a
state that wants 4 bits makes them of bytes that fit.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from jzero.core.base.text import key_names
from jzero.core.base.types import TrainStateLike
from jzero.core.layout.casts import apply_edits
from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.placement import memory_of, on_device, place_array
from jzero.core.layout.stored import Stored, when_read
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.access import readable
from jzero.core.state.train_state import plain_state

Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TargetLeaf:
    """One leaf of a state on disk.

    Attributes:
      keys: The keys of its path, from the root of the state.
      leaf: Its layout in memory.
      form: Its layout while it is read or written: numbers, padded along one dimension at most.
    """

    keys: Keys
    leaf: StateLeaf
    form: StateLeaf

    @property
    def path(self) -> str:
        """The keys as text, such as `"params/decoder/kernel"`."""
        return "/".join(self.keys)

    @property
    def cut(self) -> Cut | None:
        """How the array to read or write is padded; `None` if it has the natural shape."""
        return self.form.padded_cut

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array to read or write."""
        return self.form.stored_shape

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of the array to read or write."""
        return self.form.sharding


def target_leaves(plain: TrainStateLike, plan: ZeroPlan) -> list[TargetLeaf]:
    """Returns the leaves of a plain state, concrete or abstract, in the order of `plan.view`.

    Args:
      plain: The result of `plain_state`.
      plan: The plan of the state.
    """
    keys: dict[int, Keys] = {}
    for path, number in jax.tree_util.tree_leaves_with_path(number_leaves(plain, plan)):
        keys[number.index] = key_names(path)
    leaves = [TargetLeaf(keys[i], leaf, form_of(leaf)) for i, leaf in enumerate(plan.plain.view.leaves)]
    _check_paths(leaves)
    return leaves


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for a leaf of a plain state. Not a pytree, so a leaf itself."""

    index: int


def number_leaves(plain: TrainStateLike, plan: ZeroPlan) -> TrainStateLike:
    """Returns a plain state with numbers instead of leaves, in the order of `plan.view`."""
    layout = plan.plain
    return layout.view.rebuilt(plain, map(Number, range(len(layout.view.leaves))))


def _check_paths(leaves: Sequence[TargetLeaf]) -> None:
    """Raises if two leaves would have one name on disk, or could not be told apart by their paths."""
    for separator in ("/", "."):
        names = collections.Counter(separator.join(leaf.keys) for leaf in leaves)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(
                f"Leaves of the state cannot be told apart on disk, since keys that are joined by {separator!r} give "
                f"the same name: {twice[:5]}. Rename keys that hold {separator!r}."
            )


def form_of(leaf: StateLeaf) -> StateLeaf:
    """Returns the layout in which a leaf is read and written."""
    numbers = leaf if leaf.as_numbers is leaf else dataclasses.replace(leaf.as_numbers, memory=leaf.memory)
    cut = numbers.cut
    return numbers if cut is None or not cut.flat else dataclasses.replace(numbers, cut=along_one_dim(numbers, cut))


def along_one_dim(leaf: StateLeaf, cut: Cut) -> Cut:
    """Returns the cut along one dimension that wastes least, for a flattened leaf."""
    free = [d for d in range(cut.dim, len(cut.shape)) if d >= len(leaf.base) or leaf.base[d] is None]
    return min((Cut(d, cut.shape, cut.num_shards) for d in free), key=lambda c: c.padding)


def natural_state(state: TrainStateLike, plan: ZeroPlan) -> tuple[TrainStateLike, list[TargetLeaf], list[Stored]]:
    """Returns the plain state, a description of its leaves, and the arrays to write.

    Copies edits of 16-bit parameters to the masters, as the optimizer would. What is on disk stays there until it is
    read.

    Args:
      state: A sharded train state.
      plan: Its plan.
    """
    state = plan.view.map(functools.partial(_move_to_plan, plan=plan), readable(state))
    plain, layout = plain_state(state, plan), plan.plain
    leaves = target_leaves(plain, plan)
    arrays = layout.view.flat(plain)
    params = plan.view.params.flat(state.params)
    for i, (leaf, param) in enumerate(zip(plan.leaves, params, strict=True)):
        master = arrays[i]  # one at a time, so that at most one offloaded leaf is on the devices
        is_here = isinstance(master, jax.Array)
        if leaf.master is not None and (not is_here or _is_edited(on_device(master), on_device(param), leaf)):
            arrays[i] = leaf.edited_master(param, master)
    arrays = [_in_form(x, target_leaf) for x, target_leaf in zip(arrays, leaves, strict=True)]
    return plain, leaves, arrays


def _move_to_plan(x: ArrayLike, leaf: StateLeaf, *, plan: ZeroPlan) -> jax.Array:
    """Returns a leaf in the plan's place, even if the user replaced it by one elsewhere."""
    sharding = leaf.sharding
    if isinstance(x, jax.Array) and (memory_of(x) == "host" or x.sharding == sharding):
        return x
    if np.shape(x) == leaf.stored_shape:
        return place_array(x, leaf.stored_dtype, sharding)
    if np.shape(x) == leaf.shape:
        return leaf.place(x)
    raise ValueError(f"{leaf.path} has shape {np.shape(x)}, but the plan stores it as {leaf.stored_shape}.")


def _in_form(x: Stored, target_leaf: TargetLeaf) -> Stored:
    """Returns a stored array in the form that is written; itself if that is the same."""
    if target_leaf.leaf.padded_cut == target_leaf.cut:
        return x
    return when_read(x, lambda x: target_leaf.leaf.convert(x, target_leaf.form))


@functools.partial(jax.jit, static_argnums=2)
def _is_edited(master: jax.Array, param: jax.Array, leaf: LeafPlan) -> jax.Array:
    return jnp.any(apply_edits(master, leaf.param_as_gradient(param)) != master)
