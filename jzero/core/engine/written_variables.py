"""The state that the loss writes: fields of a train state, variables of an NNX model.

    drop_unwritten(traced) -> TracedLoss

The third result of a traced loss holds a `WrittenVariable` for each variable that it may have written: its values after
and before the loss. Of those that it did write the new values remain, with a `Written` for each.

A library that runs a part of a model as a function, as `nnx.remat` does, returns all variables of that part from the
function, so each becomes a new value in the trace. The jaxpr shows that it is not new: the first result of

    c = checkpoint[jaxpr={ lambda ; a:f32[8,4] b:f32[8,4]. let ... in (a, ...) }] w x

is `w`. If jzero did not see that, each parameter of such a part would leave the step whole, and be written back
unchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.base.text import path_str
from jzero.core.base.types import DType, PyTree
from jzero.core.engine.trace import TracedLoss, Written
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import RUNS
from jzero.core.layout.casts import can_represent

Changed: TypeAlias = Mapping[str, Mapping[str, jax.Array]]
"""What the loss wrote, by field of the train state and path in the field."""

WrittenShape = Callable[[str, tuple[int, ...]], tuple[int, ...]]
"""Given a variable's path and shape, returns the shape that one device writes."""


def unchanged_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the variable itself."""
    return shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrittenVariable:
    """A variable that the loss may have written.

    Attributes:
      value: Its value after the loss.
      before: Its value before the loss.
      name: Its name in messages, which patterns for `merge` match.
    """

    value: jax.Array
    before: jax.Array
    name: str = dataclasses.field(metadata={"static": True})


def by_path(tree: PyTree) -> dict[str, PyTree]:
    """Returns the leaves of a tree by path."""
    return {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def by_field(trees: Mapping[str, PyTree]) -> dict[str, dict[str, PyTree]]:
    """Returns the leaves of fields by path, by field: what a loss writes into the trees later does not show in it."""
    return {name: by_path(tree) for name, tree in trees.items()}


def pair_written(
    before: Mapping[str, PyTree],
    after: Mapping[str, PyTree],
    dtypes: Mapping[str, DType],
    written_shape: WrittenShape,
    *,
    field: str = "",
) -> tuple[dict[str, WrittenVariable], list[str]]:
    """Returns the variables of a field that the loss may have written, and a line for each that the state cannot keep.

    Args:
      before: The field's variables before the loss, by path.
      after: Its variables after the loss, by path.
      dtypes: The dtype in which the state keeps each.
      written_shape: The shape that one device writes.
      field: The field, if it is part of the variables' names.
    """

    def name(path: str) -> str:
        return "/".join(filter(None, (field, path)))

    bad = [f"  {name(path)}: {_kind(x)}, deleted" for path, x in before.items() if path not in after]
    bad += [f"  {name(path)}: {_kind(_array(x))}, added" for path, x in after.items() if path not in before]
    variables: dict[str, WrittenVariable] = {}
    for path, old in before.items():
        if path not in after or after[path] is old:
            continue
        value = _array(after[path], dtypes[path])
        shape = written_shape(name(path), old.shape)
        if not hasattr(value, "dtype") or value.shape != shape or not can_represent(dtypes[path], value.dtype):
            bad.append(f"  {name(path)}: {_kind(jax.ShapeDtypeStruct(shape, dtypes[path]))}, then {_kind(value)}")
        variables[path] = WrittenVariable(value, old, name(path))
    return variables, bad


def _array(x: PyTree, dtype: DType | None = None) -> PyTree:
    """Returns constants as arrays: of their dtype; numbers of Python, which have none, of `dtype` if that has them."""
    if isinstance(x, np.generic | np.ndarray):
        return jnp.asarray(x)
    kind = next((kind for kind in (bool, int, float, complex) if isinstance(x, kind)), None)
    if kind is None:
        return x
    return jnp.asarray(x, dtype if dtype is not None and can_represent(dtype, kind) else None)


def _kind(x: PyTree) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"{x!r:.60}"


def split_mutable(
    aux: PyTree, before: Mapping[str, Mapping[str, jax.Array]], written_shape: WrittenShape
) -> tuple[dict[str, dict[str, WrittenVariable]], dict[str, PyTree]]:
    """Splits `aux` into the new values of `mutable` fields, by field and path, and the rest.

    Args:
      aux: The auxiliary values that the loss returned.
      before: The values of each field that the loss was given, by path.
      written_shape: The shape that one device writes.

    Raises:
      ValueError: A field came back with another structure, shape or dtype.
    """
    returned = aux if isinstance(aux, Mapping) else {}
    bad: list[str] = []
    variables: dict[str, dict[str, WrittenVariable]] = {}
    for name, old in before.items():
        if name not in returned:
            bad.append(f"  {name}: not there")
            continue
        dtypes = {path: x.dtype for path, x in old.items()}
        variables[name], wrong = pair_written(old, by_path(returned[name]), dtypes, written_shape, field=name)
        bad += wrong
    if bad:
        raise ValueError(
            f"`mutable={tuple(before)}` names fields that the loss must return in `aux`, a dictionary, with the "
            "structure, the shapes and the dtypes that the state has; these differ:\n"
            + "\n".join(bad[:10])
            + "\nA field whose shape changes cannot be carried on: shard a state that has the new shape."
        )
    return variables, {k: x for k, x in returned.items() if k not in before}


def drop_unwritten(traced: TracedLoss) -> TracedLoss:
    """Returns a traced loss that returns, of its `WrittenVariable`s, the values that differ from the ones before.

    Its third result becomes a list of these values, one for each of its `written`.
    """
    loss, (aux, changed) = traced.out_shape
    variables, _ = jax.tree_util.tree_flatten_with_path(changed, is_leaf=lambda x: isinstance(x, WrittenVariable))
    jaxpr, _ = compat.open_jaxpr(traced.jaxpr)
    roots = _roots(jaxpr) if variables else jaxpr.outvars  # one per output
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    first = len(roots) - 2 * len(variables)
    used = [True] * first
    written: list[Written] = []
    values: list[jax.ShapeDtypeStruct] = []
    pairs = zip(roots[first::2], roots[first + 1 :: 2], strict=True)  # in the order of the fields
    for ((field, path), x), (value, before) in zip(variables, pairs, strict=True):
        used += [value is not before, False]  # `before` is only for comparison
        if value is before:
            continue
        assert not compat.is_literal(before)  # it is the input that holds the variable
        written.append(Written(field.key, path.key, x.name, numbers[before]))
        values.append(x.value)
    part = compat.with_outputs(traced.jaxpr, used)
    return dataclasses.replace(traced, jaxpr=part, out_shape=(loss, (aux, values)), written=tuple(written))


def _roots(jaxpr: Jaxpr) -> list[Atom]:
    """Returns the origin of each output: an input, or the result of the equation that made the value."""

    def apply(eqn: JaxprEqn, origins: list[Atom]) -> list[Atom]:
        forwarded = itertools.zip_longest(eqn.outvars, _forwarded_inputs(eqn))
        return [v if number is None else origins[number] for v, number in forwarded]

    return propagate(jaxpr, [*jaxpr.constvars, *jaxpr.invars], apply, lambda literal: literal)


def _forwarded_inputs(eqn: JaxprEqn) -> Sequence[int | None]:
    """Returns, for each output of an equation, the index of the input that it equals; `None` for a new value."""
    name = eqn.primitive.name
    if name in RUNS:
        return _match_outputs_to_inputs(next(compat.contained_jaxprs(eqn)))
    if name == "scan":
        first, num_carry = compat.scan_groups(eqn)
        sources = _match_outputs_to_inputs(next(compat.contained_jaxprs(eqn)))
        # Forwarded: a carried value that the body returns in its place, and a stack whose rows the body returns.
        carried = [j if j == first + i else None for i, j in enumerate(sources[:num_carry])]
        return [*carried, *(j if j is not None and j >= first + num_carry else None for j in sources[num_carry:])]
    if name == "while":
        first, (body, _) = eqn.params["body_nconsts"], compat.open_jaxpr(eqn.params["body_jaxpr"])
        skipped = eqn.params["cond_nconsts"]  # inputs: the condition's constants, the body's, the carry
        return [skipped + j if j == first + i else None for i, j in enumerate(_match_outputs_to_inputs(body))]
    if name == "cond":
        branches = [_match_outputs_to_inputs(compat.open_jaxpr(branch)[0]) for branch in eqn.params["branches"]]
        # Input 0 is the index of the branch.
        return [j + 1 if j is not None and {j} == set(others) else None for j, *others in zip(*branches, strict=True)]
    return []


def _match_outputs_to_inputs(jaxpr: Jaxpr) -> list[int | None]:
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    return [None if isinstance(root, Literal) else numbers.get(root) for root in _roots(jaxpr)]
