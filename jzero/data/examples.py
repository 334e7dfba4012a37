"""Checks the structure of examples, and stacks them into rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.base.text import path_str

WEIGHTS = "weights"
"""Key of a batch under which each row has weight 1, or 0 if it is padding."""

Example = tuple[np.ndarray, ...]
"""The leaves of an example."""


@dataclasses.dataclass(frozen=True)
class ExampleSpec:
    """The structure, shapes and dtypes that all examples of a source share.

    Attributes:
      treedef: Their structure.
      paths: Key path of each leaf.
      shapes: Shape of each leaf.
      dtypes: Its dtype in the source.
      jax_dtypes: Its dtype on devices: 32 bits instead of 64, unless jax enables 64.
    """

    treedef: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    jax_dtypes: tuple[np.dtype, ...]

    def __str__(self) -> str:
        leaves = zip(self.paths, self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{path}: {dtype}{list(shape)}" for path, dtype, shape in leaves)

    def leaves(self, example: Any, index: int) -> Example:
        """Returns the leaves of an example as arrays.

        Raises:
          ValueError: It differs from the first example; the message names its index and the leaves.
        """
        treedef = jax.tree.structure(example)
        if treedef != self.treedef:
            raise ValueError(
                f"Example {index} has the structure {treedef}, but example 0 has {self.treedef}. All examples of a "
                "source must have the same keys."
            )
        leaves = tuple(np.asarray(x) for x in jax.tree.leaves(example))
        expected = zip(self.paths, leaves, self.shapes, self.dtypes, strict=True)
        bad = [
            f"  {path}: {x.dtype}{list(x.shape)}, but example 0 has {dtype}{list(shape)}"
            for path, x, shape, dtype in expected
            if x.shape != shape or x.dtype != dtype
        ]
        if bad:
            raise ValueError(
                f"Example {index} cannot be stacked with the others:\n" + "\n".join(bad) + "\nPad or cut examples to "
                "one shape and cast them to one dtype, in the source or in `transform`."
            )
        return leaves


def example_spec(example: Any) -> ExampleSpec:
    """Returns the spec of all examples, read off the first.

    Raises:
      TypeError: It is not a dict of arrays of numbers; the message names the leaves.
      ValueError: It has a reserved key, or no leaves.
    """
    if not isinstance(example, dict):
        raise TypeError(
            f"Examples must be dicts of arrays and numbers, such as {{'x': ..., 'y': ...}}: got "
            f"{type(example).__name__}. Make one in the source, or with `transform=lambda x, rng: {{'x': x}}`."
        )
    if WEIGHTS in example:
        raise ValueError(
            f"Examples have a key {WEIGHTS!r}, under which batches say which rows are padding. Give it another name, "
            "and multiply the two in the loss."
        )
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(example)
    leaves = [(path_str(path), np.asarray(x)) for path, x in with_paths]
    bad = [f"  {path}: {x.dtype}" for path, x in leaves if not _is_numeric(x.dtype)]
    if bad:
        raise TypeError(
            "Devices hold numbers only, which these leaves of an example are not:\n" + "\n".join(bad) + "\nTokenize "
            "text, turn bytes into numbers (`np.frombuffer(x, np.uint8)`), or drop the leaves, in the source or in "
            "`transform`."
        )
    if not leaves:
        raise ValueError("Examples have no leaves: a batch of them would be empty.")
    dtypes = tuple(x.dtype for _, x in leaves)
    return ExampleSpec(
        treedef=treedef,
        paths=tuple(path for path, _ in leaves),
        shapes=tuple(x.shape for _, x in leaves),
        dtypes=dtypes,
        jax_dtypes=tuple(np.dtype(jax.dtypes.canonicalize_dtype(dtype)) for dtype in dtypes),
    )


def stack(examples: Sequence[Example], indices: Sequence[int], spec: ExampleSpec) -> list[np.ndarray]:
    """Returns the leaves of many examples, one row each, in their dtypes on devices.

    Raises:
      ValueError: An integer does not fit; the message names the example and the leaf.
    """
    stacked = []
    for i, (path, dtype) in enumerate(zip(spec.paths, spec.jax_dtypes, strict=True)):
        rows = np.stack([example[i] for example in examples])
        if dtype != rows.dtype and dtype.kind in "iu" and rows.size:
            _check_fits(rows, dtype, path, indices)
        stacked.append(rows.astype(dtype, copy=False))
    return stacked


def _check_fits(rows: np.ndarray, dtype: np.dtype, path: str, indices: Sequence[int]) -> None:
    limits = np.iinfo(dtype)
    bad = ((rows < limits.min) | (rows > limits.max)).reshape(len(rows), -1).any(1)
    if bad.any():
        raise ValueError(
            f"Leaf {path!r} of example {indices[int(bad.argmax())]} holds a {rows.dtype} that is out of the range of "
            f"{dtype}, which it is on devices. Make it smaller, or set `jax.config.update('jax_enable_x64', True)`."
        )


def _is_numeric(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_))
