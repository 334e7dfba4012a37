"""Types that every room uses and jax does not name."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

PyTree: TypeAlias = Any
"""A tree of arrays, or of whatever stands for them: no type checker knows its structure."""

DType: TypeAlias = np.dtype[Any]
"""A dtype, including those that NumPy does not know by itself (bfloat16, PRNG keys)."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation, by name, each of a type of its own."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys from the root of a tree to a leaf, of jax's types of keys."""

AxisNames: TypeAlias = str | tuple[str, ...] | None
"""The mesh axes that cut one dimension: an entry of a `PartitionSpec`."""
