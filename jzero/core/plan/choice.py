"""Chooses where each leaf is cut or padded, or keeps it whole. Pure arithmetic on shapes; touches no device.

[Note: Choosing the cut dimension]
A leaf is cut on the largest dimension that N divides (the earliest among equals), a stack of layers on the earliest, a
table on its features. Dimensions that another mesh axis already shards, and the dimension that a scan runs over, are
excluded. A leaf with fewer elements than devices stays whole: some devices would hold nothing but padding. If N divides
no dimension, a leaf of few elements (`ZeroConfig.padding_threshold`) stays whole, too: at N=8 and 64 that adds at most
0.04 % to the bytes of the models in `benchmarks`, and other programs never see its padding. A larger one is padded on
the dimension that wastes least. If that wastes more than `MAX_PADDING` of the leaf, all of its dimensions (those after
a scan dimension) are flattened into one, and the flat one is padded. Every other leaf is cut, however small: at N=512,
whole biases and norms would cost as much as a model's cut matrices, and the compiler merges their small collectives
into a few.

A leaf of many more rows than features is most likely a table, of which a loss looks up few rows. So it is cut along its
features: a lookup then sends each row once, whatever N is, but N times if the table is cut along its rows
(`jzero.core.layout.lookups`). A plan does not know the loss, and need not: what reads the whole table gathers as much
in either cut.

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
import math
import re
from collections.abc import Iterable, Sequence

from jzero.core.base.types import KeyPath
from jzero.core.config.zero import LeafRule
from jzero.core.layout.cut import Cut

MAX_PADDING = 0.125
"""Largest share of a leaf that padding one dimension may add before the leaf is flattened."""
TALL = 8
"""Rows per feature beyond which a leaf is a table: the layers of a perceptron have up to 8."""
WIDE = 1024
"""Indices of a dimension that up to 128 devices pad by an eighth at most."""


def choose_even_cut(shape: Sequence[int], num_shards: int, dims: Iterable[int]) -> Cut | None:
    """Returns a cut of the first of `dims` that `num_shards` divides; `None` if there is none, or the leaf is tiny."""
    if num_shards == 1 or math.prod(shape) < num_shards:
        return None
    dim = next((d for d in dims if shape[d] % num_shards == 0), None)
    return None if dim is None else Cut(dim, tuple(shape), num_shards)


def choose_cut(
    shape: Sequence[int],
    num_shards: int,
    *,
    scan_dim: int | None,
    taken_dims: frozenset[int],
    dim: int | None = None,
    most_unpadded: int = 0,
) -> tuple[Cut | None, str]:
    """Chooses where to cut one leaf, see [Note: Choosing the cut dimension].

    Args:
      shape: Natural shape of the leaf.
      num_shards: N, the size of the ZeRO axis.
      scan_dim: The dimension that a scan runs over, if any.
      taken_dims: Dimensions that other mesh axes shard.
      dim: The dimension that a rule asks for.
      most_unpadded: Most elements of a leaf that is rather kept whole than padded.

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
    if size <= most_unpadded:
        return None, f"small, and {num_shards} divides no dimension (padding_threshold)"
    cut = min((Cut(d, shape, num_shards) for d in by_size), key=lambda c: c.padding)
    start = 0 if scan_dim is None else scan_dim + 1
    if cut.padding > MAX_PADDING * size and not any(d in taken_dims for d in range(start, len(shape))):
        flat = Cut(start, shape, num_shards, flat=True) if start < len(shape) else cut
        cut = min(cut, flat, key=lambda c: c.padding)
    if math.prod(cut.shard_shape) > 0.75 * size:
        return None, "padding would undo the cut"
    return _beside_stack(cut, scan_dim), ""


def features_of_table(shape: Sequence[int], num_shards: int, least: int) -> int | None:
    """Returns the dimension in which a leaf that looks like a table is cut; `None` for another leaf.

    Args:
      shape: Its natural shape.
      num_shards: N, the size of the ZeRO axis.
      least: Least features of a shard.
    """
    is_table = len(shape) == 2 and shape[0] > TALL * shape[1] and shape[1] >= least * num_shards
    return 1 if is_table and shape[1] % num_shards == 0 else None


def choose_packed_cut(cut: Cut) -> Cut:
    """Returns a cut for storage in blocks. Its dimension follows from the shape alone, since that decides the blocks.

    So a base that moves to another number of devices keeps its bits. The dimension is one that any number pads little:
    the largest, of a stack the earliest of `WIDE` or more.

    Args:
      cut: The cut of the same leaf as numbers.
    """
    dims = range(cut.num_stacked, len(cut.shape))
    largest = max(dims, key=lambda d: cut.shape[d])
    dim = next((d for d in dims if cut.num_stacked and cut.shape[d] >= WIDE), largest)
    return dataclasses.replace(cut, dim=dim, flat=False)


def _beside_stack(cut: Cut, scan_dim: int | None) -> Cut:
    """Returns a cut that knows which dimensions are those of a stack of layers."""
    return cut if scan_dim is None else dataclasses.replace(cut, num_stacked=scan_dim + 1)


def find_scan_dims(
    paths: Sequence[KeyPath], shapes: Sequence[tuple[int, ...]], rules: Sequence[LeafRule]
) -> list[int | None]:
    """Returns for each leaf the dimension that a scan runs over, see [Note: Scanned stacks].

    Args:
      paths: Key path of each leaf, as a tuple of keys.
      shapes: Natural shape of each leaf.
      rules: The rule of each leaf; its `scan_dim` overrides the signs in the tree.
    """
    groups: dict[KeyPath, list[tuple[int, ...]]] = {}
    for path, shape in zip(paths, shapes, strict=True):
        for depth in range(len(path)):
            groups.setdefault(path[:depth], []).append(shape)
    stacks = {prefix for prefix, members in groups.items() if _is_stack(members)}
    copies = collections.Counter(zip(map(_unnumbered, paths), shapes, strict=True))

    def scan_dim(path: KeyPath, shape: tuple[int, ...], rule: LeafRule) -> int | None:
        if rule.scan_dim is not None:
            return None if rule.scan_dim == -1 else rule.scan_dim
        in_stack = any(path[:depth] in stacks for depth in range(len(path)))
        is_single = copies[_unnumbered(path), shape] == 1
        return 0 if in_stack or (is_single and _is_stack([shape, shape])) else None

    return [scan_dim(*leaf) for leaf in zip(paths, shapes, rules, strict=True)]


def _unnumbered(path: KeyPath) -> tuple[str, ...]:
    """Returns a path without the numbers in the names of its nodes; the last name keeps its own."""
    return (*(re.sub(r"\d+", "#", str(name)) for name in path[:-1]), *map(str, path[-1:]))


def _is_stack(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether leaves of these shapes look like the parameters of one scanned layer."""
    if len(shapes) < 2 or min(len(s) for s in shapes) < 2 or max(len(s) for s in shapes) < 3:
        return False
    leading = shapes[0][0]
    return all(s[0] == leading for s in shapes) and leading <= max(max(s[1:]) for s in shapes)
