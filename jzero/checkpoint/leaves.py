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
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero._text import key_names
from jzero.arrays.placement import (
    device_sharding,
    edit_master,
    memory_of,
    natural_leaf,
    on_device,
    pack_leaf,
    place_array,
    place_leaf,
    plain_leaf,
    stored_leaf,
    unpack_leaf,
)
from jzero.layout.casts import apply_edits, round_to
from jzero.layout.cut import Cut
from jzero.layout.leaves import LeafPlan, StateLeaf
from jzero.layout.on_disk import ChangedFiles, OnDisk
from jzero.layout.padded import to_natural, to_stored
from jzero.plan.plan import ZeroPlan
from jzero.state.train_state import map_state, plain_state

Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class WantedLeaf:
    """One leaf of a state on disk.

    Attributes:
      keys: The keys of its path, from the root of the state.
      leaf: Its layout in memory.
      cut: How it is cut and padded while it is read or written; `None` if it is stored in its natural shape.
      sharding: Its sharding while it is read or written.
    """

    keys: Keys
    leaf: StateLeaf
    cut: Cut | None
    sharding: NamedSharding

    @property
    def path(self) -> str:
        """The keys as text, such as `"params/decoder/kernel"`."""
        return "/".join(self.keys)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array to read or write."""
        return self.leaf.shape if self.cut is None else self.cut.stored_shape


def wanted_leaves(plain: Any, plan: ZeroPlan) -> list[WantedLeaf]:
    """Returns the leaves of a plain state, concrete or abstract, in the order of `map_state`.

    Args:
      plain: The result of `plain_state`.
      plan: The plan of the state.
    """
    layout = plan.plain
    found: list[StateLeaf] = []
    map_state(lambda x, leaf: found.append(leaf), layout, plain, with_disk=True)
    keys: dict[int, Keys] = {}
    for path, number in jax.tree_util.tree_leaves_with_path(number_leaves(plain, plan)):
        keys[number.index] = key_names(path)
    leaves = [_make_wanted(keys[i], leaf, layout) for i, leaf in enumerate(found)]
    _check_paths(leaves)
    return leaves


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for a leaf of a plain state. Not a pytree, so a leaf itself."""

    index: int


def number_leaves(plain: Any, plan: ZeroPlan) -> Any:
    """Returns a plain state with numbers instead of leaves, in the order of `map_state`."""
    numbers = itertools.count()
    return map_state(lambda x, leaf: Number(next(numbers)), plan.plain, plain, with_disk=True)


def _check_paths(leaves: Sequence[WantedLeaf]) -> None:
    """Raises if two leaves would have one name on disk, or could not be told apart by their paths."""
    for separator in ("/", "."):
        names = collections.Counter(separator.join(leaf.keys) for leaf in leaves)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(
                f"Leaves of the state cannot be told apart on disk, since keys that are joined by {separator!r} give "
                f"the same name: {twice[:5]}. Rename keys that hold {separator!r}."
            )


def _make_wanted(keys: Keys, leaf: StateLeaf, plan: ZeroPlan) -> WantedLeaf:
    cut = leaf.cut
    if cut is None or cut.is_stored_naturally:
        return WantedLeaf(keys, leaf, None, leaf.sharding)
    cut = cut.unpacked() if cut.blocks else along_one_dim(leaf, cut) if cut.flat else cut
    return WantedLeaf(keys, leaf, cut, dataclasses.replace(leaf, cut=cut).sharding)


def along_one_dim(leaf: StateLeaf, cut: Cut) -> Cut:
    """Returns the cut along one dimension that wastes least, for a flattened leaf."""
    free = [d for d in range(cut.dim, len(cut.shape)) if d >= len(leaf.base) or leaf.base[d] is None]
    return min((Cut(d, cut.shape, cut.num_shards) for d in free), key=lambda c: c.padding)


def natural_state(state: Any, plan: ZeroPlan) -> tuple[Any, list[WantedLeaf], list[Any]]:
    """Returns the plain state, a description of its leaves, and the arrays to write.

    Copies edits of 16-bit parameters to the masters, as the optimizer would. What is on disk stays there until it is
    read.

    Args:
      state: A sharded train state.
      plan: Its plan.
    """
    state = map_state(functools.partial(_move_to_plan, plan=plan), plan, state)
    plain, layout = plain_state(state, plan), plan.plain
    leaves = wanted_leaves(plain, plan)
    arrays: list[Any] = []
    map_state(lambda x, leaf: arrays.append(x), layout, plain, with_disk=True)
    params = plan.flat_params(state.params)
    has_master = [leaf.master is not None for leaf in plan.leaves]
    edited = [i for i, x in enumerate(params) if has_master[i] and not isinstance(x, OnDisk)]
    for i in edited:  # one at a time, so that at most one offloaded leaf is on the devices
        if isinstance(arrays[i], OnDisk):
            arrays[i] = _changed(arrays[i], functools.partial(edit_master, plan.leaves[i], plan, params[i]))
            continue
        near = on_device(arrays[i]), on_device(params[i])
        if bool(_is_edited(*near, plan.leaves[i], plan)):
            arrays[i] = edit_master(plan.leaves[i], plan, params[i], arrays[i])
    arrays = [
        _relayout(x, wanted.leaf.cut, wanted.cut, wanted.sharding) for x, wanted in zip(arrays, leaves, strict=True)
    ]
    return plain, leaves, arrays


def _move_to_plan(x: Any, leaf: StateLeaf, *, plan: ZeroPlan) -> jax.Array:
    """Returns a leaf in the plan's place, even if the user replaced it by one elsewhere."""
    sharding = leaf.sharding
    if isinstance(x, jax.Array) and (memory_of(x) == "host" or x.sharding == sharding):
        return x
    if np.shape(x) == leaf.stored_shape:
        return place_array(x, leaf.stored_dtype, sharding)
    if np.shape(x) == leaf.shape:
        return place_leaf(x, leaf, plan)
    raise ValueError(f"{leaf.path} has shape {np.shape(x)}, but the plan stores it as {leaf.stored_shape}.")


def _changed(x: OnDisk, change: Callable[[jax.Array], Any]) -> OnDisk:
    """Returns a leaf on disk that is changed once it is read."""
    assert x.files is not None
    return dataclasses.replace(x, files=ChangedFiles(x.files, change))


def _relayout(x: Any, cut: Cut | None, new: Cut | None, sharding: NamedSharding) -> Any:
    """Returns a stored array in another stored shape of the same leaf; itself if the shapes are equal."""
    same = cut == new or (new is None and (cut is None or cut.is_stored_naturally))
    if isinstance(x, OnDisk) and not same:
        return _changed(x, functools.partial(_relayout, cut=cut, new=new, sharding=sharding))
    return x if same else _back(_relaid(on_device(x), cut, new, device_sharding(sharding)), sharding)


def _back(x: jax.Array, sharding: Any) -> jax.Array:
    """Returns an array in the memory of a sharding; waits for copies to the host."""
    return x if sharding.memory_kind == x.sharding.memory_kind else jax.block_until_ready(jax.device_put(x, sharding))


def _relaid(x: jax.Array, cut: Cut | None, new: Cut | None, sharding: NamedSharding) -> jax.Array:
    if cut is not None and cut.blocks is not None and new == cut.unpacked():
        return unpack_leaf(x, cut, sharding)
    return _through_natural(x, cut, new, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _through_natural(x: jax.Array, cut: Cut | None, new: Cut | None, sharding: NamedSharding) -> jax.Array:
    natural = x if cut is None else to_natural(x, cut)
    return lax.with_sharding_constraint(natural if new is None else to_stored(natural, new), sharding)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _is_edited(master: jax.Array, param: jax.Array, leaf: LeafPlan, plan: ZeroPlan) -> jax.Array:
    param = stored_leaf(natural_leaf(param, leaf.param, plan), leaf.grad, plan)
    return jnp.any(apply_edits(master, param) != master)


def stored_from(x: jax.Array, cut: Cut | None, leaf: StateLeaf, sharding: NamedSharding) -> jax.Array:
    """Returns an array from disk in the dtype and layout of a state's leaf, in a new buffer."""
    new = leaf.cut
    if new is not None and new.blocks is not None:  # first as numbers, then each device packs its own shard
        near = device_sharding(sharding)
        spec = PartitionSpec(*[None] * new.packed_dim, near.spec[new.dim])
        exact = _stored_from(on_device(x), cut, plain_leaf(leaf), NamedSharding(near.mesh, spec))
        return _back(pack_leaf(exact, new, near), sharding)
    made = _stored_from(on_device(x), cut, leaf, device_sharding(sharding))
    return made if made.sharding == sharding else jax.device_put(made, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _stored_from(x: jax.Array, cut: Cut | None, leaf: StateLeaf, sharding: NamedSharding) -> jax.Array:
    natural = round_to(x if cut is None else to_natural(x, cut), leaf.dtype)
    new = leaf.cut
    return lax.with_sharding_constraint(
        natural if new is None or new.is_stored_naturally else to_stored(natural, new), sharding
    )
