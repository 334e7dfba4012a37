"""Tells the variables that the loss wrote from those that it only passed through.

In: a traced loss whose `aux` holds a `WrittenVariable` for each variable: its values after and before the loss. Out:
the loss without pairs of equal values, and with `Synced` in place of the others.

A library that runs a part of a model as a function, as `nnx.remat` does, returns all variables of that part from the
function, so each becomes a new value in the trace. The jaxpr shows that it is not new: the first result of

    c = checkpoint[jaxpr={ lambda ; a:f32[8,4] b:f32[8,4]. let ... in (a, ...) }] w x

is `w`. If jzero did not see that, each parameter of such a part would leave the step whole, and be written back
unchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jzero import _compat
from jzero._text import path_str
from jzero.engine.outputs import Synced
from jzero.engine.trace import TracedLoss
from jzero.jaxpr.primitives import RUNS

__all__ = ["WrittenVariable", "drop_unwritten"]

Jaxpr = Any
Equation = Any
Atom = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrittenVariable:
    """A variable of the model.

    Attributes:
      value: Its value after the loss.
      before: Its value before the loss.
    """

    value: jax.Array
    before: jax.Array


def drop_unwritten(traced: TracedLoss) -> TracedLoss:
    """Returns a traced loss that returns only those `WrittenVariable` values that differ from the ones before.

    Raises:
      ValueError: The loss writes a random key, which differs between devices.
    """
    treedef: Any
    found, treedef = jax.tree_util.tree_flatten_with_path(traced.out_shape, is_leaf=_is_written)
    if not any(_is_written(x) for _, x in found):
        return traced
    jaxpr, _ = _compat.open_jaxpr(traced.jaxpr)
    ends = itertools.accumulate((len(jax.tree.leaves(x)) for _, x in found), initial=0)
    roots = _roots(jaxpr)  # one per output
    used = [True] * len(roots)
    kept: list[Any] = []
    for (path, x), (start, end) in zip(found, itertools.pairwise(ends), strict=True):
        if not _is_written(x):
            kept.append(x)
            continue
        changed = roots[start] is not roots[start + 1]  # `value`, then `before`: the order of the fields
        used[start:end] = [changed, False]  # `before` is only for comparison
        if changed and jax.dtypes.issubdtype(x.value.dtype, jax.dtypes.prng_key):
            name = path_str(path[-1:])
            raise ValueError(
                f"The loss writes the random key {name!r} of the model. Devices fold keys with their index, so each "
                "has another one, and the state can hold but one. Draw from `nnx.Rngs`, whose counts go on and whose "
                "keys stay, or pass `rng=` to the step."
            )
        kept.append(Synced(x.value) if changed else None)  # `None` is no leaf
    out_shape = treedef.unflatten(kept)
    return dataclasses.replace(traced, jaxpr=_compat.with_outputs(traced.jaxpr, used), out_shape=out_shape)


def _is_written(x: Any) -> bool:
    return isinstance(x, WrittenVariable)


def _roots(jaxpr: Jaxpr) -> list[Atom]:
    """Returns the origin of each output: an input, or the result of the equation that made the value."""
    origin: dict[Any, Any] = {}

    def root(atom: Atom) -> Atom:
        return atom if _compat.is_literal(atom) else origin.get(atom, atom)

    for eqn in jaxpr.eqns:
        for out, number in zip(eqn.outvars, _forwarded_inputs(eqn), strict=False):
            if number is not None:
                origin[out] = root(eqn.invars[number])  # an end already, since makers come first
    return [root(atom) for atom in jaxpr.outvars]


def _forwarded_inputs(eqn: Equation) -> Sequence[int | None]:
    """Returns, for each output of an equation, the index of the input that it equals; `None` for a new value."""
    name = eqn.primitive.name
    if name in RUNS:
        return _match_outputs_to_inputs(next(_compat.contained_jaxprs(eqn)))
    if name == "scan":
        first, num_carry = _compat.scan_groups(eqn)
        found = _match_outputs_to_inputs(next(_compat.contained_jaxprs(eqn)))
        # Equal are a carried value that the body returns in its place, and a stack whose rows the body returns.
        carried = [j if j == first + i else None for i, j in enumerate(found[:num_carry])]
        return [*carried, *(j if j is not None and j >= first + num_carry else None for j in found[num_carry:])]
    if name == "while":
        first, (body, _) = eqn.params["body_nconsts"], _compat.open_jaxpr(eqn.params["body_jaxpr"])
        skipped = eqn.params["cond_nconsts"]  # inputs: the condition's constants, the body's, the carry
        return [skipped + j if j == first + i else None for i, j in enumerate(_match_outputs_to_inputs(body))]
    if name == "cond":
        branches = [_match_outputs_to_inputs(_compat.open_jaxpr(branch)[0]) for branch in eqn.params["branches"]]
        # Input 0 is the index of the branch.
        return [j + 1 if j is not None and {j} == set(others) else None for j, *others in zip(*branches, strict=True)]
    return []


def _match_outputs_to_inputs(jaxpr: Jaxpr) -> list[int | None]:
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    return [None if _compat.is_literal(root) else numbers.get(root) for root in _roots(jaxpr)]
