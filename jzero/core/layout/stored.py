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


class Holder(Protocol):
    """The records of a state."""

    @property
    def where(self) -> str:
        """Where they are: "host" or "disk"."""


Reader: TypeAlias = Callable[[str], Any]
"""Returns the leaf with a path as stored, in the devices' memory, or what becomes of that."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class InRecords:
    """Stands for a leaf of a state that is in records.

    Attributes:
      path: The leaf's path in the optimizer state, as in the plan.
      shape: The shape of the stored array.
      records: Where its values are; `None` for shapes, and inside of programs.
      reader: Reads it for one state; `None` in states themselves. `jzero.core.state.record_states.readable` sets it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: DType
    records: Holder | None = None
    reader: Reader | None = None

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

    @property
    def whereabouts(self) -> str:
        """Says which leaf is where."""
        known = PLACES.values() if self.records is None else [PLACES[self.records.where]]
        return f"{self.path!r} is {' or '.join(known)}"

    def read(self) -> Any:
        """Returns the array as stored, in the devices' memory, after the changes of `when_read`."""
        if self.reader is None:
            raise ValueError(f"{self.whereabouts}, and a program cannot read it. {INSTEAD}")
        return self.reader(self.path)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{self.whereabouts}: it is no array to compute with. {INSTEAD}")

    __jax_array__ = __array__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        if self.records is None:
            return type(self), (self.path, self.shape, self.dtype)
        raise TypeError(f"{self.whereabouts}, where `copy.deepcopy` and `pickle` do not reach it. {TO_COPY}")

    def __repr__(self) -> str:
        return f"InRecords({self.path!r}, shape={self.shape}, dtype={self.dtype})"


Stored: TypeAlias = jax.Array | InRecords
"""A leaf as a state stores it: an array, or the place of one in records."""
Like: TypeAlias = Stored | jax.ShapeDtypeStruct
"""A leaf as a state stores it, or its shape."""

flax_types.register_refusal(
    InRecords,
    lambda x: (
        f"{x.whereabouts}, so Flax cannot serialize it: use `jzero.save_checkpoint`, or bring the state to memory with "
        "`jzero.unshard_train_state`."
    ),
)


@dataclasses.dataclass(frozen=True)
class ChangingReader:
    """Changes leaves after they are read.

    Attributes:
      change: Takes a leaf as stored, and returns the changed one.
    """

    reader: Reader
    change: Callable[[jax.Array], Any]

    def __call__(self, path: str) -> Any:
        """Returns the changed leaf."""
        return self.change(self.reader(path))


def when_read(x: Stored, change: Callable[[jax.Array], Any]) -> Any:
    """Returns an array after a change; for one in records, a node that makes the change once it is read."""
    if not isinstance(x, InRecords):
        return change(x)
    return x if x.reader is None else dataclasses.replace(x, reader=ChangingReader(x.reader, change))


INSTEAD = (
    "Read it with `jzero.get_full_opt_state` or `jzero.get_full_param`; train with a step of `jzero.make_train_step` "
    "outside of `jax.jit`, or keep the state where programs see it (`Offload(optimizer='host')` without `delay`)."
)
TO_COPY = (
    "To keep a state while training goes on, copy it with `jzero.shard_train_state(state)`, which gives the copy "
    "records of its own, or save a checkpoint (`jzero.save_checkpoint`)."
)
PLACES = {"disk": "on disk", "host": "in records in the host's memory"}
"""By `Holder.where`."""
