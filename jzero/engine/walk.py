"""The walk: parameters are made whole where an equation uses them, gradients are reduced where one makes them.

In: the joint jaxpr, with lazy parameters, and how its outputs leave. Out: its outputs; gradients as shards. So

    b:f32[8,64] = dot_general[...] x w          # w: [512, 64]
    ...
    c:f32[512,64] = dot_general[...] x g        # the gradient of w, a result

becomes, on each of N devices,

    a = all_gather(w)           # [512/N, 64] -> [512, 64]
    b = dot_general(x, a)
    ...
    c = dot_general(x, g)
    d = psum_scatter(c)         # [512, 64] -> [512/N, 64]

Forward and backward pass are equations of one program, and nothing of what the walk emits is differentiated. So when a
parameter is gathered again, or a gradient reduced, is a matter of which equation reads what, and of `order`.

[Note: Short reuse]
A whole parameter is kept until an equation gathers another one, or the backward pass begins, which the loss's largest
activations are near. So a weight that is computed from itself, such as a normalized one, is gathered once. In a turn of
a loop, and in a recomputed block, it is kept to their end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jzero import _compat
from jzero.engine.bundles import Bundle, Rows, is_unmade
from jzero.engine.lazy import Lazy, RowOf, defer, is_constant, is_cut, is_lazy
from jzero.engine.leaving import Leaving, Reduction
from jzero.engine.meshes import MeshFacts, names_mesh
from jzero.engine.on_shard import on_shard
from jzero.engine.order import Order
from jzero.engine.reductions import reductions
from jzero.engine.rules import RULES, bind_whole

__all__ = ["Held", "Walk"]

Equation = Any
Wanted = Sequence[Leaving | None]


class Held:
    """The whole parameters that are kept for equations to come, see [Note: Short reuse].

    Attributes:
      keeps: Whether all are kept, to the end of the walk.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self._whole: dict[Any, dict[Any, jax.Array]] = {}  # by parameter and the dtype that travelled
        self._alive: dict[Any, Any] = {}  # shards, whose identities are keys

    def filled(self, x: Any) -> Any:
        """Returns `x`; a parameter that is kept comes whole."""
        if not isinstance(x, Lazy) or not is_cut(x):
            return x
        found = self._whole.get(x.key, {})
        whole = found.get(x.wire_dtype, next(iter(found.values()), None))
        return x if whole is None else dataclasses.replace(x, whole=whole)

    def whole_of(self, x: Any) -> jax.Array | None:
        """Returns what is kept of a parameter."""
        return next(iter(self._whole.get(x.key, {}).values()), None) if isinstance(x, Lazy) else None

    def keep(self, params: Sequence[Lazy]) -> None:
        """Keeps parameters that have been made whole for one equation; drops the others, if not all are kept."""
        new = [x for x in params if x.wire_dtype not in self._whole.get(x.key, {})]
        if new and not self.keeps:
            needed = {x.key for x in params}
            self._whole = {k: x for k, x in self._whole.items() if k in needed}
        for x in new:
            assert x.whole is not None
            self._whole.setdefault(x.key, {})[x.whole.dtype] = x.whole
            self._alive[x.key] = x.shard

    def drop(self) -> None:
        """Drops what is not kept to the end."""
        if not self.keeps:
            self._whole = {}


@dataclasses.dataclass
class Walk:
    """A walk over one sequence of equations.

    Attributes:
      axes: The mesh axes that are manual: ZeRO's and the replicas'.
      order: What happened so far, and what gathers wait for.
      held: The whole parameters that are kept.
      keeps_passes: Whether parameters are kept from the forward to the backward pass (`reshard_after_forward=False`).
      depth: How many loops this is inside of.
      found: Of which stacks rows were gathered, and the dtypes that travelled, in their order.
      meshes: What the jaxprs of this trace say about meshes.
      cache: The functions of this trace's calls, and which warnings it gave; lives as long as the trace.
    """

    axes: frozenset[str]
    order: Order
    held: Held
    keeps_passes: bool = False
    depth: int = 0
    found: list[tuple[RowOf, Any]] = dataclasses.field(default_factory=list)
    meshes: MeshFacts = dataclasses.field(default_factory=MeshFacts)
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def start(cls, axes: frozenset[str], order: Order | None = None, *, keeps: bool = False) -> Walk:
        """Returns the walk over a program; `keeps`: parameters are kept from their first use to the end."""
        return cls(axes, order or Order(), Held(keeps=keeps), keeps_passes=keeps)

    def inside(self, *, of_loop: bool = False) -> Walk:
        """Returns the walk over a recomputed block, or a turn of a loop: parameters are kept to its end."""
        of_body = dataclasses.replace(self, order=self.order.inside(), held=Held(keeps=True), keeps_passes=False)
        return dataclasses.replace(of_body, depth=self.depth + 1, found=[]) if of_loop else of_body

    def in_call(self, gathered: Sequence[Lazy]) -> Walk:
        """Returns the walk over a function that is called; `gathered` of its inputs have been gathered before."""
        return dataclasses.replace(self, order=self.order.in_call(gathered), held=Held(keeps=False))

    def __call__(
        self, jaxpr: Any, inputs: Sequence[Any], wanted: Wanted = (), given: Sequence[Reduction | None] = ()
    ) -> list[Any]:
        """Evaluates a jaxpr.

        Args:
          jaxpr: The jaxpr, open or closed.
          inputs: Arrays, lazy values, or shards of gradients.
          wanted: For each output how it leaves, if it is a gradient: it is returned as a shard.
          given: The same of inputs that are shards.

        Returns:
          The outputs, lazy where they are made of parameters alone.
        """
        closed, (jaxpr, _) = jaxpr, _compat.open_jaxpr(jaxpr)
        shards = {v: x for v, x in zip(jaxpr.invars, given, strict=False) if x is not None}
        leaving, on_shards = reductions(jaxpr, wanted, shards)
        numbers = itertools.count()

        def how(atom: Any) -> Leaving | None:
            return None if not leaving or _compat.is_literal(atom) else leaving.get(atom)

        def apply(eqn: Equation, inputs: list[Any]) -> list[Any]:
            done = on_shards.get(next(numbers))
            if done is not None:
                return [done.apply([self.whole([x])[0] if is_lazy(x) and not x.shape else x for x in inputs])]
            return self._apply(eqn, inputs, list(map(how, eqn.invars)), list(map(how, eqn.outvars)))

        outputs = _compat.evaluate(closed, inputs, apply)
        pairs = itertools.zip_longest(outputs, jaxpr.outvars, wanted)
        return [x if how(v) is not None else self.leave(x, w) for x, v, w in pairs]

    def _apply(self, eqn: Equation, inputs: list[Any], arriving: list[Any], wanted: list[Any]) -> list[Any]:
        if self.order.turns(is_backward=_compat.is_transposed(eqn)):
            self.held.drop()
        name = eqn.primitive.name
        lazy = any(map(is_unmade, inputs))
        rule = RULES.get(name)
        if rule is not None:
            is_of_mesh = name == "reshard" or names_mesh(eqn) or self.meshes.in_equation(eqn).carried
            if lazy or is_of_mesh or any(w is not None for w in wanted):
                return rule(self, eqn, inputs, arriving, wanted)
        # What is made of literals alone, such as a mask, is made where it is used, too: jax has moved it out of loops.
        elif (lazy and not any(isinstance(x, Rows) for x in inputs)) or all(map(is_constant, inputs)):
            kept = on_shard(eqn, inputs) or defer(eqn, inputs)
            if kept is not None:
                return [self.leave(kept, w) for w in wanted]
        return [self.leave(x, w) for x, w in zip(bind_whole(self, eqn, inputs), wanted, strict=True)]

    def leave(self, x: Any, how: Leaving | None) -> Any:
        """Reduces a gradient as it is wanted."""
        if how is None:
            return x
        (x,) = self.whole([x])
        reduced = how(x) if isinstance(how, Reduction) else x
        self.note([reduced], [how])
        return reduced

    def note(self, grads: Sequence[Any], wanted: Wanted, *, of_block: bool = False) -> None:
        """Notes gradients that are on their way out, for passes that wait for them; of a block for all."""
        awaited = [x for x, how in zip(grads, wanted, strict=True) if how is not None and (of_block or how.is_awaited)]
        self.order.reduced(awaited)

    def all_whole(self, jaxpr: Any, *inputs: Any) -> list[Any]:
        """Evaluates a jaxpr to whole values."""
        return self.whole(self(jaxpr, inputs))

    def whole(self, values: Sequence[Any]) -> list[Any]:
        """Returns values that are used together, whole: the only place where parameters are gathered."""
        values = [self._all_rows(x) if isinstance(x, Rows) else x for x in values]
        if not any(map(is_lazy, values)):
            return values
        bundle = Bundle.of(values)
        leaves = list(map(self.held.filled, bundle.leaves))
        self.found += [(x.row_of, x.wire_dtype) for x in leaves if is_cut(x) and x.row_of is not None]
        params = [x for x in leaves if isinstance(x, Lazy)]
        made: dict[Any, jax.Array] = {}  # of parameters that differ in nothing but what they are cast to in the end
        for i, x in enumerate(self.order.before_use(leaves)):
            if not isinstance(x, Lazy):
                leaves[i] = x
                continue
            key = leaves[i].key, x.wire_dtype
            whole = made[key] if key in made else made.setdefault(key, x.gathered())
            leaves[i] = whole.astype(x.dtype)
        self.held.keep([dataclasses.replace(x, whole=made[x.key, x.wire_dtype]) for x in params])
        return Bundle(tuple(leaves), bundle.template).computed()

    def _all_rows(self, x: Rows) -> jax.Array:
        """Returns all rows, whole, of what a loop returned."""
        stacks, shared = self.whole(x.stacks), self.whole(x.shared)
        of_whole = dataclasses.replace(x, shared=tuple(shared))
        return jax.vmap(lambda rows: Bundle.of([of_whole.row(rows)]).computed()[0])(stacks)
