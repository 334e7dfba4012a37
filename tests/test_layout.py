"""Layout arithmetic: properties of every cut that can be chosen, and where scanned stacks are seen."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

from jzero import LeafRule
from jzero.core.base.text import key_names
from jzero.core.layout.cut import Cut
from jzero.core.plan.choice import MAX_PADDING, choose_cut, find_scan_dims

PRIMES = [2, 3, 5, 7, 11, 13, 31, 61, 127, 257, 509, 1009]
pure = settings(max_examples=150, derandomize=True)  # no device: thousands a second


@st.composite
def leaves(draw, *, max_shards=512):
    """Draws `(shape, num_shards)`: rank 0-4; sizes 0, 1, primes, multiples of N and their neighbours, anything."""
    num_shards = draw(st.integers(1, max_shards))
    multiples = st.integers(1, 4).map(lambda k: k * num_shards)
    near = st.tuples(multiples, st.sampled_from([-1, 1])).map(lambda pair: max(0, sum(pair)))
    sizes = st.one_of(st.integers(0, 2), st.sampled_from(PRIMES), multiples, near, st.integers(1, 2048))
    return tuple(draw(st.lists(sizes, max_size=4))), num_shards


@st.composite
def constrained_leaves(draw):
    """Draws `(shape, num_shards, scan_dim, taken_dims)`."""
    shape, num_shards = draw(leaves())
    dims = range(len(shape))
    scan_dim = draw(st.sampled_from([None, *dims]))
    taken = draw(st.sets(st.sampled_from(list(dims)), max_size=2)) if shape else set()
    return shape, num_shards, scan_dim, frozenset(taken)


def choose(shape, num_shards, scan_dim=None, taken_dims=frozenset(), dim=None):
    return choose_cut(shape, num_shards, scan_dim=scan_dim, taken_dims=taken_dims, dim=dim)


def swallowed_dims(cut: Cut) -> set[int]:
    """Natural dimensions that do not lie whole in a shard."""
    return set(range(cut.dim, len(cut.shape))) if cut.flat else {cut.dim}


CONSTRAINED, FREE = [], []
"""What holds for leaves with dimensions that must not be cut, and what for all others."""
constrained, free = CONSTRAINED.append, FREE.append


@constrained
def every_device_holds_an_equal_part_and_together_they_hold_the_leaf(leaf):
    shape, num_shards, scan_dim, taken = leaf
    cut, reason = choose(shape, num_shards, scan_dim, taken)
    assert (cut is None) == bool(reason), "a leaf that stays whole says why, and no other does"
    if cut is None:
        return
    assert cut.shape == shape
    assert cut.stored_shape[cut.stored_dim] % num_shards == 0
    parts = list(cut.stored_shape)
    parts[cut.stored_dim] //= num_shards
    assert cut.shard_shape == tuple(parts)
    assert math.prod(cut.shard_shape) * num_shards == math.prod(cut.stored_shape) >= math.prod(shape)
    assert cut.padding == math.prod(cut.stored_shape) - math.prod(shape)
    assert cut.is_padded == (cut.padding > 0)
    assert cut.is_stored_naturally == (cut.stored_shape == shape and not cut.flat)


@constrained
def natural_shape_is_the_stored_one_without_padding_and_flattening(leaf):
    cut, _ = choose(*leaf)
    if cut is None:
        return
    sliced = list(cut.stored_shape)
    sliced[cut.stored_dim] = cut.natural_size
    assert cut.natural_size <= cut.stored_size < cut.natural_size + cut.num_shards
    assert math.prod(sliced) == math.prod(leaf[0])
    assert tuple(sliced[: cut.dim]) == leaf[0][: cut.dim]
    if not cut.flat:
        assert tuple(sliced) == leaf[0]


@constrained
def scanned_dimensions_and_those_of_other_axes_are_never_cut(leaf):
    shape, num_shards, scan_dim, taken = leaf
    cut, _ = choose(shape, num_shards, scan_dim, taken)
    if cut is not None:
        assert scan_dim not in swallowed_dims(cut)
        assert not taken & swallowed_dims(cut)


@constrained
def largest_dimension_that_divides_or_the_first_of_a_stack_is_cut_without_padding(leaf):
    shape, num_shards, scan_dim, taken = leaf
    even = [d for d, size in enumerate(shape) if size % num_shards == 0 and d != scan_dim and d not in taken]
    if num_shards == 1 or not even or math.prod(shape) < num_shards:
        return
    cut, _ = choose(shape, num_shards, scan_dim, taken)
    assert cut is not None
    assert cut.is_stored_naturally
    largest = max(even, key=lambda d: (shape[d], -d))  # the earliest among equals
    assert cut.dim == (largest if scan_dim is None else even[0])


@constrained
def no_other_layout_wastes_less_than_one_that_wastes_much(leaf):
    shape, num_shards, scan_dim, taken = leaf
    cut, _ = choose(shape, num_shards, scan_dim, taken)
    if cut is None or cut.padding <= MAX_PADDING * math.prod(shape):
        return
    free = [d for d in range(len(shape)) if d != scan_dim and d not in taken]
    others = [Cut(d, shape, num_shards) for d in free]
    behind_scan = 0 if scan_dim is None else scan_dim + 1
    if behind_scan < len(shape) and not any(d in taken for d in range(behind_scan, len(shape))):
        others.append(Cut(behind_scan, shape, num_shards, flat=True))
    assert cut.padding == min(other.padding for other in others)


@free
def unconstrained_leaf_is_cut_fairly(leaf):
    shape, num_shards = leaf
    size = math.prod(shape)
    cut, reason = choose(shape, num_shards)
    if num_shards == 1 or size < num_shards:
        assert cut is None, "some devices would hold nothing but padding"
        assert reason
    else:
        assert cut is not None
        assert cut.padding <= 0.125 * size or cut.padding < num_shards, "less than an element a device"
        assert math.prod(cut.shard_shape) <= max(1.125 * size / num_shards, math.ceil(size / num_shards))


@constrained
def constrained_leaf_is_cut_only_if_that_saves_memory(leaf):
    cut, _ = choose(*leaf)
    if cut is not None:
        assert math.prod(cut.shard_shape) < math.prod(leaf[0])


@free
def rule_decides_the_dimension(leaf):
    shape, num_shards = leaf
    if not shape or num_shards == 1 or math.prod(shape) == 0:
        return
    for dim in range(len(shape)):
        assert choose(shape, num_shards, dim=dim) == (Cut(dim, shape, num_shards), "")


@pytest.mark.smoke
@pure
@given(constrained_leaves())
def test_every_cut(leaf):
    for holds in CONSTRAINED:
        holds(leaf)


@pure
@given(leaves())
def test_every_cut_of_a_leaf_without_constraints(leaf):
    for holds in FREE:
        holds(leaf)


@pytest.mark.parametrize(
    ("shape", "num_shards", "scan_dim", "taken_dims", "stored_shape"),
    [
        ((512, 128), 8, None, {}, (512, 128)),
        ((500, 128), 8, None, {}, (500, 128)),  # the second dimension divides
        ((31, 127), 8, None, {}, (31, 128)),  # 127 wastes less than 31
        ((257, 3), 64, None, {}, (1, 832)),  # either dimension would waste more than an eighth
        ((6, 9, 11), 8, 0, {}, (6, 1, 104)),  # the same, behind a scanned one
        ((9, 11, 6), 8, 2, {}, (9, 16, 6)),  # nothing behind the scanned one to flatten
        ((9, 11, 64), 8, None, {2}, (9, 16, 64)),  # another axis has the last: no flattening over it
        ((50257, 768), 512, None, {}, (50688, 768)),  # GPT-2's embedding
    ],
)
def test_known_leaves(shape, num_shards, scan_dim, taken_dims, stored_shape):
    cut, _ = choose(shape, num_shards, scan_dim, frozenset(taken_dims))
    assert cut is not None
    assert cut.stored_shape == stored_shape
    assert len(stored_shape) == len(shape), "functions of `x.ndim` see that of the parameter"


def scan_dims(params, rules=None):
    """Returns the scanned dimension of each leaf, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [key_names(path) for path, _ in leaves]
    rules = [(rules or {}).get("/".join(path), LeafRule()) for path in paths]
    found = find_scan_dims(paths, [tuple(x.shape) for _, x in leaves], rules)
    return {"/".join(path): dim for path, dim in zip(paths, found, strict=True)}


def shapes(tree):
    """Turns a tree of tuples into one of abstract arrays."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple))


def stack_of_lora():
    layer = {"w": (12, 64, 64), "lora_a": (12, 64, 8), "lora_b": (12, 8, 64), "scale": (12, 64)}
    return shapes({"embed": (1000, 64), "layers": layer, "head": {"w": (64, 1000), "b": (1000,)}})


def test_scanned_stack_is_seen_and_only_that():
    found = scan_dims(stack_of_lora())
    assert len(found) == 7
    assert found == {path: 0 if path.startswith("layers/") else None for path in found}


@pytest.mark.parametrize("names", [("layers_0", "layers_1"), ("0", "1", "2"), ("block1", "block2")])
def test_layers_of_a_loop_are_no_stacks(names):
    """Nor are their projections by heads and convolutions. A scanned stack beside them is one."""
    layer = {"o_proj": {"w": (8, 8, 64)}, "conv": {"kernel": (3, 3, 64, 64)}}
    found = scan_dims(shapes({"model": dict.fromkeys(names, layer), "scanned": {"w": (8, 8, 64)}}))
    assert {path for path, dim in found.items() if dim == 0} == {"scanned/w"}
    assert set(scan_dims(shapes({"b": (64,), "w1": (6, 64, 64), "w2": (6, 64, 64)})).values()) == {None, 0}
    lists = scan_dims(shapes({"layers": [{"w": (6, 64, 64), "scale": (6, 64)}] * 2}))
    assert set(lists.values()) == {0}, "two scanned stages"


@pytest.mark.parametrize(
    ("tree", "path", "scan_dim"),
    [
        ({"w": (6, 64, 256), "b": (64,)}, "w", 0),
        ({"w": (12, 12, 12), "b": (64,)}, "w", 0),
        ({"q": {"kernel": (256, 8, 32), "bias": (8, 32)}}, "q/kernel", None),
        ({"q": (256, 8, 32), "k": (256, 2, 32)}, "q", None),
        ({"w": (64, 64), "lora_a": (64, 8), "lora_b": (8, 64)}, "lora_b", None),
        ({"norm": {"scale": (12, 64)}, "gate": {"scale": (12, 64)}}, "norm/scale", None),
        ({"kernel": (512, 3, 3)}, "kernel", None),
    ],
)
def test_single_leaf_of_many_dimensions_may_be_a_stack_and_others_without_its_signs_are_none(tree, path, scan_dim):
    assert scan_dims(shapes(tree))[path] == scan_dim


def test_rule_overrules_what_the_tree_suggests():
    params = stack_of_lora()
    assert scan_dims(params, {"layers/w": LeafRule(scan_dim=-1)})["layers/w"] is None
    assert scan_dims(params, {"layers/w": LeafRule(scan_dim=1)})["layers/w"] == 1
    assert scan_dims(params, {"embed": LeafRule(scan_dim=0)})["embed"] == 0
    assert scan_dims(params, {"layers/w": LeafRule(dim=1)})["layers/w"] == 0, "other rules do not"
