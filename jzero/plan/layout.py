"""Chooses where each leaf is cut or padded, or keeps it whole. Pure arithmetic on shapes; touches no device.

[Note: Choosing the cut dimension]
A leaf is cut on the largest dimension that N divides (the earliest among equals), a stack of layers on the earliest.
Dimensions that another mesh axis already shards, and the dimension that a scan runs over, are excluded. If N divides
none, the leaf is padded on the dimension that wastes least. If that wastes more than `MAX_PADDING` of the leaf, all of
its dimensions (those after a scan dimension) are flattened into one, and the flat one is padded. A leaf with fewer
elements than devices stays whole: some devices would hold nothing but padding, and a whole leaf costs each device at
most N elements. Every larger leaf is cut: at N=512, whole biases and norms would cost as much as a model's cut
matrices, and the compiler merges their small collectives into a few.

Stacks differ for a reason. If a stack is cut on a layer's first dimension, the shard of one layer is contiguous, as
collectives on GPUs want it. If it is cut on another dimension, XLA transposes whole stacks of fp32 masters before the
loop: GPTs of 1.4B and 7B on 8 H200 took 5205 and 17194 MiB instead of 4869 and 15402. Other leaves gain nothing from
the earliest dimension, and a stack of vectors that was not recognized would be cut across its layers.

[Note: Scanned stacks]
A scan slices its inputs on one dimension. If that is cut, each iteration needs another device's data, and the compiler
gathers the whole stack. Trees do not say which leaves are stacks, so either of two signs counts, and
`LeafRule(scan_dim=...)` overrides both: (1) all leaves below one node have two or more dimensions, one of them has
three or more, and they share a leading size that is not larger than every other; (2) a leaf has three or more
dimensions, its leading one is not its largest, and no other leaf has its shape and its path but for a number before the
last name: `layers_0/out/kernel` and `layers_1/out/kernel` are layers that no scan runs over. What remains are models of
one layer. Mistaking a dense leaf for a stack costs little (it is cut on another dimension). The engine, which sees the
loops, warns about a stack that was missed.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.config.zero import LeafRule
from jzero.plan.blocks import Blocks, packed_size

MAX_PADDING = 0.125
"""Largest share of a leaf that padding one dimension may add before the leaf is flattened."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """One leaf cut over `num_shards` devices.

    Attributes:
      dim: The cut dimension; if `flat`, the first of those flattened into one.
      shape: The natural shape of the leaf.
      num_shards: N.
      flat: Whether dimensions `dim` and up are stored as one.
      other_axes: The other mesh axes that shard each dimension, if collectives must know them; else empty.
      parts: How many parts of equal size each shard has.
      num_stacked: How many leading dimensions are those of a stack of layers, which blocks do not cross.
      blocks: If the shards are bytes, how they are packed. A packed array is a flat one: `dim` is `num_stacked`, and
        rows of K bytes take the place of all dimensions from there.
    """

    dim: int
    shape: tuple[int, ...]
    num_shards: int
    flat: bool = False
    other_axes: tuple[Any, ...] = ()
    parts: int = 1
    num_stacked: int = 0
    blocks: Blocks | None = None

    def __str__(self) -> str:
        text = f"{self.dim}{'+' * self.flat}/{self.num_shards}" + (
            f" beside {self.other_axes}" if self.other_axes else ""
        )
        return text if self.blocks is None else f"{text} {self.blocks.kind}"

    @property
    def unit(self) -> int:
        """Elements along the cut dimension that no two shards divide: the bytes of one row of blocks, else one."""
        if self.blocks is None:
            return 1
        return self.blocks.parts * packed_size(self.size_beside // self.blocks.parts, self.blocks.kind)

    @property
    def packed_dim(self) -> int:
        """Of a packed array, the natural dimension whose indices are packed one by one; else the cut dimension."""
        return self.dim if self.blocks is None else self.dim + self.blocks.offset

    @property
    def size_beside(self) -> int:
        """Elements at one index of the cut dimension of one layer, on all devices of other mesh axes."""
        return math.prod(n for d, n in enumerate(self.shape) if d >= self.num_stacked and d != self.packed_dim)

    @property
    def natural_size(self) -> int:
        """Elements along the cut dimension before padding."""
        if self.blocks is not None:
            return self.shape[self.packed_dim] * self.unit
        return math.prod(self.shape[self.dim :]) if self.flat else self.shape[self.dim]

    @property
    def stored_size(self) -> int:
        """Elements along the cut dimension, padding included."""
        number = self.num_shards * self.parts * self.unit
        return -(-self.natural_size // number) * number

    def in_blocks(self, kind: str, dtype: Any, sizes: Mapping[str, int]) -> Cut:
        """Returns the cut of the same leaf packed into bytes; `sizes` has the size of each mesh axis."""
        assert not self.flat
        parts = math.prod(int(sizes[name]) for name in jax.tree.leaves(self.other_axes[self.num_stacked :]))
        blocks = Blocks(kind, jnp.dtype(dtype), self.dim - self.num_stacked, parts)
        return dataclasses.replace(self, dim=self.num_stacked, flat=True, blocks=blocks)

    def for_one_shard(self) -> Cut:
        """Returns the layout of one shard by itself, padding included."""
        shape = list(self.shape)
        shape[self.packed_dim] = self.unpacked().stored_size // self.num_shards
        return dataclasses.replace(self, shape=tuple(shape), num_shards=1)

    def unpacked(self) -> Cut:
        """Returns the cut of the same leaf as numbers, if it is packed."""
        return self if self.blocks is None else dataclasses.replace(self, dim=self.packed_dim, flat=False, blocks=None)

    def dtype_sent(self, dtype: Any) -> Any:
        """Returns the dtype in which shards of values of a dtype travel."""
        return dtype if self.blocks is None else jnp.dtype(jnp.int8)

    def axes_beside(self) -> tuple[Any, ...]:
        """Returns the other mesh axes of each dimension of a shard."""
        if self.blocks is None:
            return self.other_axes[: len(self.stored_shape)]
        if not self.other_axes:
            return ()
        return (*self.other_axes[: self.dim], tuple(jax.tree.leaves(self.other_axes[self.dim :])))

    def of_part(self, sizes: Mapping[str, int]) -> Cut:
        """Returns the cut of the part of a leaf that one device has along the other mesh axes, of these sizes."""
        if not self.other_axes:
            return self
        over = [math.prod(int(sizes[name]) for name in jax.tree.leaves(names)) for names in self.other_axes]
        shape = tuple(n // parts for n, parts in zip(self.shape, over, strict=False))
        blocks = None if self.blocks is None else self.blocks._replace(parts=1)
        return dataclasses.replace(self, shape=shape, other_axes=(), blocks=blocks)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored (global) array, whose shards all have the same size."""
        tail = () if self.flat else self.shape[self.dim + 1 :]
        return (*self.shape[: self.dim], self.stored_size, *tail)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one device's part."""
        tail = () if self.flat else self.shape[self.dim + 1 :]
        return (*self.shape[: self.dim], self.stored_size // self.num_shards, *tail)

    @property
    def is_padded(self) -> bool:
        """Whether the stored array has padding."""
        return self.stored_size != self.natural_size

    @property
    def is_stored_naturally(self) -> bool:
        """Whether the stored array has the natural shape."""
        return not self.flat and not self.is_padded

    @property
    def padding(self) -> int:
        """Elements that padding adds, over all devices."""
        return math.prod(self.stored_shape) - math.prod(self.shape)

    def drop_leading(self) -> Cut:
        """Returns the cut of one slice of a stack (one iteration of a scan over dimension 0)."""
        assert self.dim > 0
        other_axes = self.other_axes[1:] if any(self.other_axes[1:]) else ()
        stacked = max(self.num_stacked - 1, 0)
        return dataclasses.replace(
            self, dim=self.dim - 1, shape=self.shape[1:], other_axes=other_axes, num_stacked=stacked
        )

    def add_leading(self, size: int) -> Cut:
        """Returns the cut of a stack of `size` such leaves."""
        other_axes = (None, *self.other_axes) if self.other_axes else ()
        shape, stacked = (size, *self.shape), self.num_stacked + 1
        return dataclasses.replace(self, dim=self.dim + 1, shape=shape, other_axes=other_axes, num_stacked=stacked)

    def cuts(self, dim: int) -> bool:
        """Whether a shard holds only a part of natural dimension `dim`."""
        return dim >= self.dim if self.flat else dim == self.dim

    def for_shape(self, shape: Sequence[int], dims: Sequence[int]) -> Cut:
        """Returns the cut of an array of another shape, whose dimension `i` was `dims[i]` here."""
        # A dimension of another size is not cut over other mesh axes any more.
        other_axes = [
            self.other_axes[d] if self.other_axes and shape[i] == self.shape[d] else None for i, d in enumerate(dims)
        ]
        kept = tuple(other_axes) if any(other_axes) else ()
        stacked = len(list(itertools.takewhile(lambda d: d < self.num_stacked, dims)))
        dim = list(dims).index(self.dim)
        return dataclasses.replace(self, dim=dim, shape=tuple(shape), other_axes=kept, num_stacked=stacked)

    def for_shard(self, values: Sequence[Any], of_cut: Any) -> list[Any]:
        """Returns values per dimension of a shard, given those per natural dimension: `of_cut` for the cut one."""
        return [*values[: self.dim], of_cut, *(() if self.flat else values[self.dim + 1 :])]

    def with_other_axes(self, spec: Iterable[Any], sizes: Mapping[str, int]) -> Cut:
        """Returns the cut of a leaf that other mesh axes shard, too.

        Args:
          spec: The axes of each dimension of the natural shape, as in a `PartitionSpec`. Axes of the cut dimension, and
            axes that do not divide their dimension, are dropped.
          sizes: The size of each mesh axis.
        """

        def kept(d: int, names: Any) -> Any:
            if not isinstance(names, str | tuple) or d == self.dim or (self.flat and d > self.dim):
                return None
            names = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if sizes[n] > 1)
            return names if names and self.shape[d] % math.prod(sizes[n] for n in names) == 0 else None

        given = tuple(spec)
        if not any(given) and not self.other_axes:
            return self
        entries = [*given, *[None] * len(self.shape)][: len(self.shape)]
        other_axes = tuple(kept(d, names) for d, names in enumerate(entries))
        return dataclasses.replace(self, other_axes=other_axes if any(other_axes) else ())

    def spec(self, base: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec of the stored array: `base` plus ZeRO's mesh axes on the cut dimension."""
        entries = [*base, *[None] * (len(self.shape) - len(base))][: len(self.stored_shape)]
        entries[self.dim] = axes[0] if len(axes) == 1 else axes
        while entries[-1] is None:  # as the compiler writes it, so that the outputs of a user's `jit` compare equal
            entries.pop()
        return PartitionSpec(*entries)


def choose_even_cut(shape: Sequence[int], num_shards: int, dims: Iterable[int]) -> Cut | None:
    """Returns a cut of the first of `dims` that `num_shards` divides; `None` if there is none, or the leaf is tiny."""
    if num_shards == 1 or math.prod(shape) < num_shards:
        return None
    dim = next((d for d in dims if shape[d] % num_shards == 0), None)
    return None if dim is None else Cut(dim, tuple(shape), num_shards)


def choose_cut(
    shape: Sequence[int], num_shards: int, *, scan_dim: int | None, taken_dims: frozenset[int], dim: int | None = None
) -> tuple[Cut | None, str]:
    """Chooses where to cut one leaf, see [Note: Choosing the cut dimension].

    Args:
      shape: Natural shape of the leaf.
      num_shards: N, the size of the ZeRO axis.
      scan_dim: The dimension that a scan runs over, if any.
      taken_dims: Dimensions that other mesh axes shard.
      dim: The dimension that a rule asks for.

    Returns:
      The cut, or `None` with the reason for keeping the leaf whole.
    """
    shape = tuple(shape)
    size = math.prod(shape)
    free = [d for d in range(len(shape)) if d != scan_dim and d not in taken_dims]
    if num_shards == 1:
        return None, "one device"
    if dim is not None and size > 0:
        return _beside_stack(Cut(dim, shape, num_shards), scan_dim), ""
    if not shape:
        return None, "scalar"
    if size < num_shards:
        return None, f"fewer elements than the {num_shards} devices"
    if not free:
        return None, "no free dimension"
    # Largest first, and the earliest among equals, since Python's sort is stable.
    by_size = sorted(free, key=lambda d: -shape[d])
    even = choose_even_cut(shape, num_shards, by_size if scan_dim is None else free)
    if even is not None:
        return _beside_stack(even, scan_dim), ""
    cut = min((Cut(d, shape, num_shards) for d in by_size), key=lambda c: c.padding)
    start = 0 if scan_dim is None else scan_dim + 1
    if cut.padding > MAX_PADDING * size and not any(d in taken_dims for d in range(start, len(shape))):
        flat = Cut(start, shape, num_shards, flat=True) if start < len(shape) else cut
        cut = min(cut, flat, key=lambda c: c.padding)
    if math.prod(cut.shard_shape) > 0.75 * size:
        return None, "padding would undo the cut"
    return _beside_stack(cut, scan_dim), ""


def _beside_stack(cut: Cut, scan_dim: int | None) -> Cut:
    """Returns a cut that knows which dimensions are those of a stack of layers."""
    return cut if scan_dim is None else dataclasses.replace(cut, num_stacked=scan_dim + 1)


def find_scan_dims(
    paths: Sequence[tuple[Any, ...]], shapes: Sequence[tuple[int, ...]], rules: Sequence[LeafRule]
) -> list[int | None]:
    """Returns for each leaf the dimension that a scan runs over, see [Note: Scanned stacks].

    Args:
      paths: Key path of each leaf, as a tuple of keys.
      shapes: Natural shape of each leaf.
      rules: The rule of each leaf; its `scan_dim` overrides the signs in the tree.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for path, shape in zip(paths, shapes, strict=True):
        for depth in range(len(path)):
            groups.setdefault(path[:depth], []).append(shape)
    stacks = {prefix for prefix, members in groups.items() if _is_stack(members)}
    copies = collections.Counter(zip(map(_unnumbered, paths), shapes, strict=True))

    def scan_dim(path: tuple[Any, ...], shape: tuple[int, ...], rule: LeafRule) -> int | None:
        if rule.scan_dim is not None:
            return None if rule.scan_dim == -1 else rule.scan_dim
        in_stack = any(path[:depth] in stacks for depth in range(len(path)))
        is_single = copies[_unnumbered(path), shape] == 1
        return 0 if in_stack or (is_single and _is_stack([shape, shape])) else None

    return [scan_dim(*leaf) for leaf in zip(paths, shapes, rules, strict=True)]


def _unnumbered(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns a path without the numbers in the names of its nodes; the last name keeps its own."""
    return (*(re.sub(r"\d+", "#", str(name)) for name in path[:-1]), *map(str, path[-1:]))


def _is_stack(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether leaves of these shapes look like the parameters of one scanned layer."""
    if len(shapes) < 2 or min(len(s) for s in shapes) < 2 or max(len(s) for s in shapes) < 3:
        return False
    leading = shapes[0][0]
    return all(s[0] == leading for s in shapes) and leading <= max(max(s[1:]) for s in shapes)
