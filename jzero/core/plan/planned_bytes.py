"""Bytes of leaves, by term and by memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import Memory

Term = Literal["params", "grads", "opt_state", "other"]


class BytesPerDevice(NamedTuple):
    """Bytes on one device, by term. `grads` is the maximum during a step."""

    params: int
    grads: int
    opt_state: int

    @property
    def total(self) -> int:
        """Sum of the terms."""
        return self.params + self.grads + self.opt_state


class WholeLeaf(NamedTuple):
    """A leaf that every device of the ZeRO axis holds whole."""

    term: Term
    path: str
    shape: tuple[int, ...]
    num_bytes: int
    reason: str


def whole_leaves(terms: Mapping[Term, Sequence[StateLeaf]]) -> Iterator[WholeLeaf]:
    """Yields the leaves that are not cut."""
    for term, leaves in terms.items():
        for x in leaves:
            if x.cut is None:
                yield WholeLeaf(term, x.path, x.shape, x.bytes_per_device, x.reason)


def sum_bytes(leaves: Sequence[StateLeaf], memory: Memory = "device") -> int:
    """Returns the bytes on one device of those leaves that are in a memory."""
    return sum(leaf.bytes_per_device for leaf in leaves if leaf.memory == memory)
