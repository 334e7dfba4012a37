"""A dictionary by identity, for keys without a cheap or reliable `==`: jaxprs, equations, arrays of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class IdDict(MutableMapping[K, V]):
    """A dictionary that compares its keys by identity, and keeps them alive: no other object gets the `id` of one.

    Example:
      >>> from jzero.core.jaxpr.identity import IdDict
      >>> x, y = jnp.ones(3), jnp.ones(3)
      >>> names = IdDict([(x, "x")])
      >>> x in names, y in names
      (True, False)
    """

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        self._items: dict[int, tuple[K, V]] = {id(key): (key, value) for key, value in items}

    def __getitem__(self, key: K) -> V:
        return self._items[id(key)][1]

    def __setitem__(self, key: K, value: V) -> None:
        self._items[id(key)] = key, value

    def __delitem__(self, key: K) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)
