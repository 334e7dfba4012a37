"""Stands for a leaf whose values are in records: an empty node, which programs and `tree.map` skip.

`flatten_up_to` of a plan's structure hands the node out as a leaf. It knows the records, but two nodes of one leaf and
layout have equal structure only if their records are the same; programs see nodes without records (`detached`), so that
what jax caches keeps no records.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias

import jax

from jzero.core.base import flax_types
from jzero.core.base.types import DType


class LeafReader(Protocol):
    """Reads the leaves of one state from its records."""

    def read_leaf(self, path: str) -> jax.Array:
        """Returns a leaf as stored, in the devices' memory."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class InRecords:
    """Stands for a leaf of a state that is in records.

    Attributes:
      path: The leaf's path in the optimizer state, as in the plan.
      shape: The shape of the stored array.
      dtype: Its dtype.
      records: Where its values are; `None` for shapes, and inside of programs.
    """

    path: str
    shape: tuple[int, ...]
    dtype: DType
    records: LeafReader | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return math.prod(self.shape)

    @property
    def detached(self) -> InRecords:
        """The node without its records."""
        return dataclasses.replace(self, records=None)

    def read(self) -> jax.Array:
        """Returns the array as stored, in the devices' memory."""
        if self.records is None:
            raise ValueError(f"{self.path!r} is on disk, and a program cannot read it. {INSTEAD}")
        return self.records.read_leaf(self.path)

    def __jax_array__(self) -> NoReturn:
        raise TypeError(f"{self.path!r} is on disk: it is no array to compute with. {INSTEAD}")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{self.path!r} is on disk: it is no array to compute with. {INSTEAD}")

    def __repr__(self) -> str:
        return f"InRecords({self.path!r}, shape={self.shape}, dtype={self.dtype})"


Stored: TypeAlias = jax.Array | InRecords
"""A leaf as a state stores it: an array, or the place of one in records."""
Like: TypeAlias = Stored | jax.ShapeDtypeStruct
"""A leaf as a state stores it, or its shape."""

flax_types.register_refusal(
    InRecords,
    lambda x: (
        f"{x.path!r} is on disk, or in records in the host's memory, so Flax cannot serialize it: use "
        "`jzero.save_checkpoint`, or bring the state to memory with `jzero.unshard_train_state`."
    ),
)


@dataclasses.dataclass(frozen=True)
class ChangedRecords:
    """Records whose leaves are changed after they are read.

    Attributes:
      records: The records.
      change: Takes a leaf as stored, and returns the changed one.
    """

    records: LeafReader
    change: Callable[[jax.Array], Any]

    def read_leaf(self, path: str) -> Any:
        """Returns the changed leaf."""
        return self.change(self.records.read_leaf(path))


def when_read(x: Stored, change: Callable[[jax.Array], Any]) -> Any:
    """Returns an array after a change; for one in records, a node that makes the change once it is read."""
    if not isinstance(x, InRecords):
        return change(x)
    return x if x.records is None else dataclasses.replace(x, records=ChangedRecords(x.records, change))


INSTEAD = (
    "Read it with `jzero.get_full_opt_state` or `jzero.get_full_param`; train with a step of `jzero.make_train_step` "
    "outside of `jax.jit`, or keep the state in memory (`Offload(optimizer='host')`)."
)
