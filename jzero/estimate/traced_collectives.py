"""What a traced program sends, by parameter: exact, without devices and without a compiler.

    traced_collectives(jaxpr) -> Iterator[TracedCollective]

Each gather and reduction of the placed program of a step, or of any function that calls one, has its parameter, how
often it runs, and its fate. For the step of [Life of a step](../life_of_a_step.md):

    gather up x1, gather down x1, reduce down x1, gather down x1, reduce up x1

Layers that share one function have its collectives; which parameter each is about comes from the names that stand
before and after the calls, see `jzero.core.engine.placed`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom
from jzero.core.base.types import DType
from jzero.core.engine.placed import collectives_of, dtype_moved, gather_p, named_p, reduce_p, wait_p
from jzero.core.jaxpr.lookups import TableReads
from jzero.core.jaxpr.primitives import Trait, primitives_with
from jzero.core.layout.cut import Cut
from jzero.core.layout.route import Collective

MOVES = primitives_with(Trait.LAYOUT | Trait.ALIAS) | {"convert_element_type", "optimization_barrier", "zero_wait"}


class Fate(enum.Enum):
    """How a gathered parameter outlives its use, if it does.

    Attributes:
      USED: It does not.
      STACKED: The loop that gathers it returns the rows of all iterations.
      SCANNED: A loop runs over it, or over what is computed from it: the stack is gathered before the loop.
      SAVED: The backward pass reads what the forward pass gathered.
    """

    USED = enum.auto()
    STACKED = enum.auto()
    SCANNED = enum.auto()
    SAVED = enum.auto()


class TracedCollective(NamedTuple):
    """One gather or reduction of a placed program.

    Attributes:
      eqn: The equation.
      path: The parameter; empty if it is not known.
      times: How often a step runs it; a `while` counts as one pass.
      in_loop: Whether it is inside a loop.
      fate: The fate of a gathered parameter.
    """

    eqn: JaxprEqn
    path: str
    times: int
    in_loop: bool
    fate: Fate

    @property
    def gathers(self) -> bool:
        """Whether it is a gather, not a reduction."""
        return self.eqn.primitive is gather_p

    @property
    def cut(self) -> Cut:
        """How the parameter is cut."""
        return self.eqn.params["cut"]

    @property
    def dtype(self) -> DType:
        """The dtype that travels."""
        return dtype_moved(self.eqn)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Its collectives."""
        return collectives_of(self.eqn)


def traced_collectives(jaxpr: AnyJaxpr) -> Iterator[TracedCollective]:
    """Yields the gathers and reductions of a program, in its order.

    Example:
      >>> from jzero.estimate.traced_collectives import traced_collectives
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> for x in traced_collectives(step.trace(state, jnp.ones((8, 512))).jaxpr):
      ...     print(x.eqn.primitive, x.path, x.dtype, x.times)
      zero_gather w float32 1
      zero_reduce w float32 1
    """
    opened, _ = compat.open_jaxpr(jaxpr)
    yield from _Walk(times=1, in_loop=False, inputs={}, outputs={}, stacked=frozenset())(opened)


def traced_lookups(jaxpr: AnyJaxpr, micro_batches: int) -> dict[str, TableReads]:
    """Returns what one micro-batch reads of the parameters whose rows a step's program looks up in their shards."""
    gathers = [x for x in traced_collectives(jaxpr) if x.gathers]
    whole = {x.path for x in gathers if "lookup" not in x.eqn.params}
    found: dict[str, TableReads] = {}
    for x in gathers:
        if "lookup" in x.eqn.params:
            read = found.setdefault(x.path, TableReads(otherwise=x.path in whole))
            read.add(x.times * x.eqn.params["lookup"].num_rows // micro_batches, len(x.cut.shape))
    return found


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A walk over one jaxpr.

    Attributes:
      times: How often it runs.
      in_loop: Whether a loop runs it.
      inputs: The names of those inputs that are shards.
      outputs: The names of those outputs that are shards of gradients.
      stacked: The outputs that a loop stacks over its iterations.
    """

    times: int
    in_loop: bool
    inputs: Mapping[Var, str]
    outputs: Mapping[Var, str]
    stacked: frozenset[Var]

    def __call__(self, jaxpr: Jaxpr) -> Iterator[TracedCollective]:
        """Yields what the jaxpr sends."""
        shards, grads = dict(self.inputs), dict(self.outputs)
        for eqn in reversed(jaxpr.eqns):  # names of gradients, from the calls back to the equations that make them
            if eqn.primitive is named_p:
                grads |= dict.fromkeys(_variables(eqn.invars), grads.get(eqn.outvars[0], eqn.params["path"]))
            elif len(eqn.outvars) == 1 and eqn.outvars[0] in grads and eqn.primitive is not reduce_p:
                grads |= dict.fromkeys(_variables(eqn.invars), grads[eqn.outvars[0]])
        for eqn in jaxpr.eqns:  # names of shards, from before the calls to the gathers
            first = next((shards.get(v, "") for v in _variables(eqn.invars[:1])), "")
            if eqn.primitive is gather_p:
                yield TracedCollective(
                    eqn, first or eqn.params["path"], self.times, self.in_loop, self._fate(eqn, jaxpr)
                )
            elif eqn.primitive is reduce_p:
                yield TracedCollective(
                    eqn, grads.get(eqn.outvars[0], eqn.params["path"]), self.times, self.in_loop, Fate.USED
                )
            for body in compat.contained_jaxprs(eqn):
                yield from self._enter(eqn, body, shards, grads)(body)
            if eqn.primitive is wait_p or eqn.primitive.name == "optimization_barrier":
                shards |= _renamed(shards, eqn.invars, eqn.outvars)
            elif first or eqn.primitive is named_p:  # an operation on a shard has it first
                shards[eqn.outvars[0]] = first or eqn.params["path"]

    def _enter(self, eqn: JaxprEqn, body: Jaxpr, shards: Mapping[Var, str], grads: Mapping[Var, str]) -> _Walk:
        """Returns the walk over what an equation runs."""
        stacked = {y for x, y in zip(eqn.outvars, body.outvars, strict=False) if x in self.stacked}
        if eqn.primitive.name == "scan":
            stacked |= {*body.outvars[compat.scan_groups(eqn)[1] :]}
        return _Walk(
            self.times * int(eqn.params.get("length", 1)),
            self.in_loop or eqn.primitive.name in ("scan", "while"),
            _renamed(shards, eqn.invars[len(eqn.invars) - len(body.invars) :], body.invars),
            _renamed(grads, eqn.outvars, body.outvars),
            frozenset(_variables(stacked)),
        )

    def _fate(self, gather: JaxprEqn, jaxpr: Jaxpr) -> Fate:
        """Returns the fate of a gathered parameter in the jaxpr that gathers it."""
        if gather.params.get("lookup") is not None:
            return Fate.USED  # of its rows
        unsharded = {gather.outvars[0]}
        alike = {gather.outvars[0]}  # what is computed from it, in its shape
        for eqn in jaxpr.eqns:
            reads = [i for i, v in enumerate(eqn.invars) if any(v is x for x in alike)]
            if not reads:
                continue
            if eqn.primitive.name == "scan" and reads[-1] >= sum(compat.scan_groups(eqn)):
                return Fate.SCANNED
            alike |= {v for v in eqn.outvars if compat.type_of(v).shape == gather.params["cut"].shape}
            if not any(eqn.invars[i] is x for i in reads for x in unsharded):
                continue
            # A loop's body has both in one iteration if it recomputes.
            if not self.in_loop and compat.is_transposed(eqn) and not compat.is_transposed(gather):
                return Fate.SAVED
            if eqn.primitive.name in MOVES:
                size = math.prod(gather.params["cut"].shape)
                unsharded |= {v for v in eqn.outvars if compat.type_of(v).size == size}
        return Fate.STACKED if unsharded & self.stacked else Fate.USED


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _renamed(names: Mapping[Var, str], outside: Sequence[Atom], inside: Sequence[Atom]) -> dict[Var, str]:
    """Returns the names of values inside of an equation that runs a jaxpr."""
    pairs = [(x, y) for x, y in zip(outside, inside, strict=False) if not isinstance(y, Literal)]
    return {y: names[x] for x, y in pairs if not isinstance(x, Literal) and x in names}
