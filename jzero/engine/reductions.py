"""Finds the values of a differentiated loss that are gradients on their way out, and where to reduce each.

In: a joint jaxpr and how its outputs leave. Out: for each of its gradients how it leaves, and the equations that run on
shards. Here the walk reduces `d`, not `c` or `e`:

    c:f32[64,512] = dot_general[...] g x          # made
    d:bf16[64,512] = convert_element_type[new_dtype=bfloat16] c   # narrower: reduced here, [64, 512/N] on each device
    e:f32[64,512] = convert_element_type[new_dtype=float32] d     # runs on the shard
  in (loss, e)

[Note: Reducing gradients where they are made]
Followed back from the outputs, a gradient passes a few operations that add, place or relabel (the transposes of those
that `shard_rules` apply to parameters), and ends at the operation that made it. The walk reduces and cuts it right
there, and runs those few operations on shards. So a loop that returns a stack of gradients stacks shards, and a loop
that adds to the stack layer by layer adds shards.

[Note: Several uses]
The gradients of a parameter's uses are summed first and reduced once: that holds one whole gradient between the uses,
and sends each element once. There are two exceptions, each reduced one by one: parts of a stack, which together make
the stack; and, from stage 2 on, uses with a loop between them, since the whole gradient would stay in memory beside the
activations of that loop.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jzero import _compat
from jzero.engine.gradient_exits import GradientExit, OnShards, Part, Reduction
from jzero.engine.gradient_rules import GRADIENT_RULES, PLACES, RELABELS
from jzero.jaxpr.primitives import CALLS, REMAT

__all__ = ["Reductions", "Search", "find_reductions"]

Equation = Any
Jaxpr = Any


class Reductions(NamedTuple):
    """The gradients among a jaxpr's values.

    Attributes:
      leaving: For each gradient, how it leaves. In the walk, gradients with a `Reduction` are shards.
      on_shards: The equations that run on shards, by index.
    """

    leaving: dict[Any, GradientExit]
    on_shards: dict[int, OnShards]


def find_reductions(
    jaxpr: Jaxpr, wanted: Sequence[GradientExit | None], given: Mapping[Any, Reduction] | None = None
) -> Reductions:
    """Finds the gradients of a jaxpr, see [Note: Reducing gradients where they are made].

    Args:
      jaxpr: An open jaxpr.
      wanted: For each output that is a gradient, how it leaves; else `None`.
      given: Inputs that are already shards, with their reductions.

    Example:
      >>> from jzero.arrays.collectives import Wire
      >>> from jzero.plan.layout import Cut
      >>> from jzero.engine.gradient_exits import Reduction
      >>> from jzero.engine.reductions import find_reductions
      >>> loss = lambda w, x: (x @ w.astype(jnp.bfloat16)).sum()
      >>> joint = jax.make_jaxpr(jax.grad(loss))(jnp.ones((64, 8)), jnp.ones((2, 64), jnp.bfloat16))
      >>> wire = Wire("data", None, reduce_scatter=True)
      >>> how = Reduction(Cut(0, (64, 8), 8), wire, jnp.float32, by_use=True)
      >>> found = find_reductions(joint.jaxpr, [how])
      >>> [str(joint.jaxpr.eqns[i].primitive) for i in found.on_shards]
      ['convert_element_type']
    """
    given = dict(given or {})
    if not given and not any(x is not None for x in wanted):
        return Reductions({}, {})
    search = Search(jaxpr, wanted, given)
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):  # from the outputs to the makers
        if eqn.primitive.name == "scan":
            search.visit_scan(eqn)
        elif len(eqn.outvars) == 1 and eqn.outvars[0] in search.leaving and eqn.primitive.name in GRADIENT_RULES:
            search.visit(i, eqn)
    return Reductions(search.leaving, search.on_shards)


class Search:
    """A search backward through the equations of a jaxpr, with its findings so far."""

    def __init__(self, jaxpr: Jaxpr, wanted: Sequence[GradientExit | None], given: dict[Any, Reduction]) -> None:
        atoms = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
        # An output is a use, too: what is returned and read elsewhere cannot be a shard.
        self.uses = collections.Counter(v for v in atoms if not _compat.is_literal(v))
        self.made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.loops = [i for i, eqn in enumerate(jaxpr.eqns) if _has_loop(eqn)]  # see [Note: Several uses]
        self.eqns, self.given, self.on_shards = jaxpr.eqns, given, dict[int, OnShards]()
        outputs = [(v, x) for v, x in zip(jaxpr.outvars, wanted, strict=False) if x is not None]
        self.leaving: dict[Any, GradientExit] = {**given, **{v: x for v, x in outputs if self.is_free(v)}}
        self._first: dict[Any, int] = {}  # caches `find_first_maker`

    def visit(self, i: int, eqn: Equation) -> None:
        """Visits an equation whose result is a gradient."""
        leaving = self.leaving[eqn.outvars[0]]
        if isinstance(leaving, Part):
            if eqn.primitive.name == "add_any":
                self.leaving |= {v: leaving for v in eqn.invars if self.is_free(v)}  # summands, [D, F]
            return
        found = GRADIENT_RULES[eqn.primitive.name](self, eqn, leaving.on_device())
        if found is not None:
            # Only the last shard of a chain moves to the host.
            self.on_shards[i] = OnShards(found.inputs, lambda xs: leaving.place(found.apply(xs)))
            self.leaving |= {eqn.invars[j]: x for j, x in found.inputs.items()}  # the search goes on from these

    def visit_scan(self, eqn: Equation) -> None:
        """Visits a scan: if its turns can add shards to a carried gradient, the initial one is a shard, too."""
        num_consts, num_carry = _compat.scan_groups(eqn)
        for k, (out, start) in enumerate(zip(eqn.outvars[:num_carry], eqn.invars[num_consts:], strict=False)):
            leaving = self.leaving.get(out)
            if isinstance(leaving, Reduction) and self.is_free(start) and _adds_shards(eqn, k, leaving):
                self.leaving[start] = leaving.on_device()  # e.g. zeros, [L, D/N, F]

    def is_free(self, atom: Any) -> bool:
        """Whether nothing else reads a value, so that it can be a shard."""
        return not _compat.is_literal(atom) and self.uses[atom] == 1 and (atom in self.made or atom in self.given)

    def find_maker(self, atom: Any) -> Equation | None:
        """Returns the equation that made a value; `None` for literals and inputs."""
        return None if _compat.is_literal(atom) or atom not in self.made else self.eqns[self.made[atom]]

    def find_first_maker(self, atom: Any) -> int:
        """Returns the index of the first equation that made a summand of a gradient; -1 for inputs and literals."""
        if _compat.is_literal(atom) or atom not in self.made:
            return -1
        if atom not in self._first:
            eqn = self.eqns[self.made[atom]]
            relabels = eqn.primitive.name in RELABELS or eqn.primitive.name == "add_any"
            self._first[atom] = min(map(self.find_first_maker, eqn.invars)) if relabels else self.made[atom]
        return self._first[atom]

    def is_loop_between(self, x: Any, y: Any) -> bool:
        """Whether a loop stands between the equations that made two gradients, or makes the second."""
        first, second = sorted(map(self.find_first_maker, (x, y)))
        return any(first < i <= second for i in self.loops)  # `<=`: the second may come out of the loop

    def is_zero(self, atom: Any) -> bool:
        """Whether a value is known to be zero."""
        if _compat.is_literal(atom):
            return not atom.aval.shape and _compat.value_of(atom) == 0
        maker = self.find_maker(atom)
        return maker is not None and maker.primitive.name == "broadcast_in_dim" and self.is_zero(maker.invars[0])

    def is_part(self, atom: Any, leaving: Reduction) -> bool:
        """Whether a gradient is that of a part of a parameter, padded with zeros, and can be cut into shards."""
        eqn = self.find_maker(atom)
        if eqn is None:
            return False
        if eqn.primitive.name == "add_any":
            return any(self.is_part(v, leaving) for v in eqn.invars)
        return eqn.primitive.name in PLACES and GRADIENT_RULES[eqn.primitive.name](self, eqn, leaving) is not None


def _has_loop(eqn: Equation) -> bool:
    """Whether an equation is a scan, or contains one."""
    if eqn.primitive.name == "scan":
        return True
    return any(_has_loop(inner) for jaxpr in _compat.contained_jaxprs(eqn) for inner in jaxpr.eqns)


def _adds_shards(eqn: Equation, index: int, leaving: Reduction) -> bool:
    """Whether a scan adds to the carried gradient at `index` part by part, so that its turns can add shards."""
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    num_consts, _ = _compat.scan_groups(eqn)
    var = body.invars[num_consts + index]  # the gradient so far; [L, D/N, F] if turns add shards
    found = find_reductions(body, [leaving if i == index else None for i in range(len(body.outvars))], {var: leaving})
    # No equation on shards takes the carry, so the body reads it whole.
    if not any(v is var for i in found.on_shards for v in body.eqns[i].invars):
        return False
    # Turns that each reduce all of it would send more than one reduction after the loop.
    return int(eqn.params["length"]) * _count_reduced(body, found) <= math.prod(leaving.cut.shape)


def _count_reduced(jaxpr: Jaxpr, found: Reductions) -> int:
    """Returns the number of elements that are reduced where they are made, including those in calls."""
    number = 0
    for i, eqn in enumerate(jaxpr.eqns):
        wanted = [found.leaving.get(v) for v in eqn.outvars]
        if i in found.on_shards or not any(wanted):  # shards need no collective
            continue
        if eqn.primitive.name in CALLS | REMAT:
            inner = next(_compat.contained_jaxprs(eqn))
            number += _count_reduced(inner, find_reductions(inner, wanted))
        else:
            number += sum(math.prod(x.cut.shape) for x in wanted if isinstance(x, Reduction))
    return number
