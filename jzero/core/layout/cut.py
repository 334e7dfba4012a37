"""How one leaf is cut over devices, padded or packed: arithmetic on shapes, and conversions.

[Note: Collectives beside other mesh axes]
If other mesh axes cut a parameter (tensor parallelism), the compiler handles that in the loss. But it does not split an
`all_gather` or `psum_scatter` over other axes: it gathers the operand over those first, so every device would send and
hold the whole parameter. So these two run in a `shard_map` over the other axes, each device on its own part. So does
the packing of blocks, which would join parts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jzero.core.base.types import AxisNames, DType
from jzero.core.layout.blocks import Blocks, pack, packed_size, unpack

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Cut:
    """One leaf cut over `num_shards` devices.

    Attributes:
      dim: The cut dimension; if `flat`, the first of those flattened into one.
      shape: The natural shape of the leaf.
      num_shards: N.
      flat: Whether dimensions `dim` and up are stored as one; ones stand before it, so that the array keeps its `ndim`.
        (Behind it, TPUs would pad each one to a row of 128.)
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
    other_axes: Axes = ()
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
        """Elements along the cut dimension that shards do not split: the bytes of one row of blocks, else one."""
        if self.blocks is None:
            return 1
        return self.blocks.parts * packed_size(self.size_beside // self.blocks.parts, self.blocks.kind)

    @property
    def stored_dim(self) -> int:
        """The cut dimension of the stored array."""
        return len(self.shape) - 1 if self.flat and self.blocks is None else self.dim

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

    def in_blocks(self, kind: str, dtype: DType, sizes: Mapping[str, int]) -> Cut:
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

    def dtype_sent(self, dtype: DType) -> DType:
        """Returns the dtype in which shards of values of a dtype travel."""
        return dtype if self.blocks is None else jnp.dtype(jnp.int8)

    def axes_beside(self) -> Axes:
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

    def _with_size(self, size: int) -> tuple[int, ...]:
        """Returns the shape of an array that is cut like this one and has so many elements along the cut dimension."""
        if self.flat:
            return (*self.shape[: self.dim], *(1,) * (self.stored_dim - self.dim), size)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored (global) array, whose shards all have the same size."""
        return self._with_size(self.stored_size)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one device's part."""
        return self._with_size(self.stored_size // self.num_shards)

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
        axes = tuple(other_axes) if any(other_axes) else ()
        stacked = len(list(itertools.takewhile(lambda d: d < self.num_stacked, dims)))
        dim = list(dims).index(self.dim)
        return dataclasses.replace(self, dim=dim, shape=tuple(shape), other_axes=axes, num_stacked=stacked)

    def for_shard(self, values: Sequence[T], of_cut: Callable[[int], T]) -> list[T]:
        """Returns values per dimension of a shard, given those per natural one: `of_cut(d)` if that is cut."""
        return [of_cut(d) if self.cuts(d) else value for d, value in enumerate(values[: len(self.stored_shape)])]

    def with_other_axes(self, spec: Iterable[AxisNames], sizes: Mapping[str, int]) -> Cut:
        """Returns the cut of a leaf that other mesh axes shard, too.

        Args:
          spec: The axes of each dimension of the natural shape, as in a `PartitionSpec`. Axes of the cut dimension, and
            axes that do not divide their dimension, are dropped.
          sizes: The size of each mesh axis.
        """

        def remaining(d: int, names: AxisNames) -> AxisNames:
            if not isinstance(names, str | tuple) or d == self.dim or (self.flat and d > self.dim):
                return None
            names = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if sizes[n] > 1)
            return names if names and self.shape[d] % math.prod(sizes[n] for n in names) == 0 else None

        axes = tuple(spec)
        if not any(axes) and not self.other_axes:
            return self
        entries = [*axes, *[None] * len(self.shape)][: len(self.shape)]
        other_axes = tuple(remaining(d, names) for d, names in enumerate(entries))
        return dataclasses.replace(self, other_axes=other_axes if any(other_axes) else ())

    def spec(self, base: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec of the stored array: `base` plus ZeRO's mesh axes on the cut dimension."""
        entries = [*base, *[None] * (len(self.shape) - len(base))][: len(self.stored_shape)]
        entries[self.stored_dim] = axes[0] if len(axes) == 1 else axes
        while entries[-1] is None:  # as the compiler writes it, so that the outputs of a user's `jit` compare equal
            entries.pop()
        return PartitionSpec(*entries)

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """Shape of the stored array without its padding."""
        return self._with_size(self.natural_size)

    def to_stored(self, x: jax.Array) -> jax.Array:
        """Returns a natural array as it is stored: flattened, packed, zero-padded. [..., D] -> [..., P]."""
        if self.blocks is not None:
            x = pack(x, self.packed_dim, self.num_stacked, self.blocks.kind)  # [*stacked, D, K]
        if self.flat:
            x = x.reshape(self.unpadded_shape)
        if not self.is_padded:
            return x
        widths = [(0, 0, 0)] * x.ndim
        widths[self.stored_dim] = (0, self.stored_size - self.natural_size, 0)
        return lax.pad(x, jnp.zeros((), x.dtype), widths)

    def to_natural(self, x: jax.Array) -> jax.Array:
        """Returns a stored array in its natural shape. [..., P] -> [..., D]."""
        if self.blocks is not None:
            return apply_to_parts(self._unpack_part, x, self.axes_beside(), self.other_axes)
        if self.is_padded:
            x = lax.slice_in_dim(x, 0, self.natural_size, axis=self.stored_dim)
        return x.reshape(self.shape) if self.flat else x

    def join(self, shards: jax.Array) -> jax.Array:
        """Returns the natural array of all shards, one behind the other. [N, ..., P/N] -> [..., D]."""
        return self.to_natural(jnp.moveaxis(shards, 0, self.stored_dim).reshape(self.stored_shape))

    def divide(self, x: jax.Array) -> jax.Array:
        """Returns the shards of a natural array, one behind the other. [..., D] -> [N, ..., P/N]."""
        stored, dim = self.to_stored(x.reshape(self.shape)), self.stored_dim
        apart = stored.reshape(*stored.shape[:dim], self.num_shards, -1, *stored.shape[dim + 1 :])
        return jnp.moveaxis(apart, dim, 0)

    def _unpack_part(self, x: jax.Array) -> jax.Array:
        """Returns the values of one device's part in blocks. Bytes [*stacked, P · K] -> [..., D, ...]."""
        lead, blocks = self.dim, self.blocks
        assert blocks is not None
        part = self.of_part(jax.sharding.get_abstract_mesh().shape)
        beside = [n for d, n in enumerate(part.shape) if d >= lead and d != self.packed_dim]
        size = part.size_beside
        rows = x.reshape(*x.shape[:lead], -1, packed_size(size, blocks.kind))[..., : self.shape[self.packed_dim], :]
        y = unpack(rows, size, blocks.kind).astype(blocks.dtype)  # [*stacked, D, S]
        return jnp.moveaxis(y.reshape(*y.shape[: lead + 1], *beside), lead, self.packed_dim)

    def pack_shard(self, shard: jax.Array) -> jax.Array:
        """Returns a shard of numbers in blocks. [..., P/N, ...] -> bytes [*stacked, P/N · K]."""
        blocks, numbers = self.blocks, self.unpacked()
        assert blocks is not None

        def rounded(x: jax.Array) -> jax.Array:
            x = pack(x, numbers.dim, numbers.num_stacked, blocks.kind)
            return x.reshape(*x.shape[: self.dim], -1)

        return apply_to_parts(rounded, shard, numbers.axes_beside(), self.axes_beside())


Axes: TypeAlias = tuple[AxisNames, ...]
"""The mesh axes of each dimension."""


def apply_to_parts(fn: Callable[[jax.Array], jax.Array], x: jax.Array, before: Axes, after: Axes) -> jax.Array:
    """Applies a function to each device's part of an array.

    Args:
      fn: Takes one device's part of `x`, and returns that of the result.
      x: The array, whole.
      before: The other mesh axes that cut each dimension of `x`, if any.
      after: Those of the result.
    """
    if not before:
        return fn(x)
    axes = set(jax.tree.leaves(before))
    mapped = jax.shard_map(
        fn, in_specs=PartitionSpec(*before), out_specs=PartitionSpec(*after), axis_names=axes, check_vma=False
    )
    result: jax.Array = mapped(x)
    return result
