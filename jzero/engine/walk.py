"""The walk: gathers parameters where an equation uses them, reduces gradients where an equation makes them.

In: the joint jaxpr, lazy parameters, and the reduction of each output that is a gradient. Out: its outputs, gradients
as shards. So

    b:f32[8,64] = dot_general[...] x w          # w: [512, 64]
    ...
    c:f32[512,64] = dot_general[...] x g        # the gradient of w, a result

becomes, on each of N devices,

    a = all_gather(w)           # [512/N, 64] -> [512, 64]
    b = dot_general(x, a)
    ...
    c = dot_general(x, g)
    d = psum_scatter(c)         # [512, 64] -> [512/N, 64]

Forward and backward pass are equations of one program, and the walk's own output is never differentiated. So data
dependence and `order` alone decide when a parameter is gathered again, or a gradient reduced.

[Note: Short reuse]
A whole parameter is kept until an equation gathers another one, or until the backward pass begins, since the loss's
largest activations are near there. So a weight that several equations read in a row, such as one divided by its norm,
is gathered once. Loop bodies and recomputed blocks keep parameters to their end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jzero import _compat
from jzero.engine.bundles import Bundle, Rows, is_unevaluated
from jzero.engine.gradient_exits import GradientExit, Reduction
from jzero.engine.lazy import Lazy, RowOf, defer, is_constant, is_cut, is_lazy
from jzero.engine.meshes import MeshFacts, names_mesh
from jzero.engine.order import Order
from jzero.engine.reductions import find_reductions
from jzero.engine.rules import RULES, bind_whole
from jzero.engine.shard_rules import apply_on_shard

__all__ = ["HeldParameters", "Walk"]

Equation = Any
Wanted = Sequence[GradientExit | None]


class HeldParameters:
    """Whole parameters kept for later equations, see [Note: Short reuse].

    Attributes:
      keeps: Whether to keep all of them to the end of the walk.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self._whole: dict[Any, dict[Any, jax.Array]] = {}  # by parameter and the dtype of the gather
        self._alive: dict[Any, Any] = {}  # keeps shards alive, since their identities are keys

    def fill(self, x: Any) -> Any:
        """Returns `x`, with the whole array if it is a kept parameter."""
        if not isinstance(x, Lazy) or not is_cut(x):
            return x
        found = self._whole.get(x.key, {})
        whole = found.get(x.wire_dtype, next(iter(found.values()), None))
        return x if whole is None else dataclasses.replace(x, whole=whole)

    def get(self, x: Any) -> jax.Array | None:
        """Returns the kept array of a parameter, if any."""
        return next(iter(self._whole.get(x.key, {}).values()), None) if isinstance(x, Lazy) else None

    def keep(self, params: Sequence[Lazy]) -> None:
        """Keeps parameters that were gathered for one equation; drops the others, unless all are kept."""
        new = [x for x in params if x.wire_dtype not in self._whole.get(x.key, {})]
        if new and not self.keeps:  # another gather ends the reuse
            needed = {x.key for x in params}
            self._whole = {k: x for k, x in self._whole.items() if k in needed}
        for x in new:
            assert x.whole is not None
            self._whole.setdefault(x.key, {})[x.whole.dtype] = x.whole
            self._alive[x.key] = x.shard

    def drop(self) -> None:
        """Drops all parameters, unless they are kept to the end."""
        if not self.keeps:
            self._whole = {}


@dataclasses.dataclass
class Walk:
    """A walk over one sequence of equations.

    Attributes:
      axes: The manual mesh axes: ZeRO's and the replicas'.
      order: Records what happened so far, and makes gathers wait.
      held: The whole parameters that are kept.
      keeps_passes: Whether parameters are kept from the forward to the backward pass (`reshard_after_forward=False`).
      depth: How many loops enclose this walk.
      found: The stacks whose rows were gathered, with the dtypes of the gathers, in their order.
      meshes: Mesh facts about the jaxprs of this trace.
      cache: Functions of this trace's calls, and the warnings already given; lives as long as the trace.
    """

    axes: frozenset[str]
    order: Order
    held: HeldParameters
    keeps_passes: bool = False
    depth: int = 0
    found: list[tuple[RowOf, Any]] = dataclasses.field(default_factory=list)
    meshes: MeshFacts = dataclasses.field(default_factory=MeshFacts)
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def start(cls, axes: frozenset[str], order: Order | None = None, *, keeps: bool = False) -> Walk:
        """Returns the walk over a program; with `keeps`, parameters stay whole from their first use to the end."""
        return cls(axes, order or Order(), HeldParameters(keeps=keeps), keeps_passes=keeps)

    def enter_block(self, *, of_loop: bool = False) -> Walk:
        """Returns the walk over a recomputed block or a loop body, which keeps parameters to its end."""
        of_body = dataclasses.replace(
            self, order=self.order.enter_block(), held=HeldParameters(keeps=True), keeps_passes=False
        )
        return dataclasses.replace(of_body, depth=self.depth + 1, found=[]) if of_loop else of_body

    def enter_call(self, gathered: Sequence[Lazy]) -> Walk:
        """Returns the walk over a called function, of whose inputs the `gathered` ones were gathered before."""
        return dataclasses.replace(self, order=self.order.enter_call(gathered), held=HeldParameters(keeps=False))

    def __call__(
        self, jaxpr: Any, inputs: Sequence[Any], wanted: Wanted = (), given: Sequence[Reduction | None] = ()
    ) -> list[Any]:
        """Evaluates a jaxpr.

        Args:
          jaxpr: The jaxpr, open or closed.
          inputs: Arrays, lazy values, or shards of gradients.
          wanted: For each output that is a gradient, how it leaves; a `Reduction` returns a shard.
          given: For each input that is a shard, how it was reduced.

        Returns:
          The outputs, lazy if they are made of parameters alone.
        """
        closed, (jaxpr, _) = jaxpr, _compat.open_jaxpr(jaxpr)
        shards = {v: x for v, x in zip(jaxpr.invars, given, strict=False) if x is not None}  # [D/N, F]
        leaving, on_shards = find_reductions(jaxpr, wanted, shards)
        numbers = itertools.count()  # `evaluate` visits equations in order, as `on_shards` numbers them

        def how(atom: Any) -> GradientExit | None:
            return None if not leaving or _compat.is_literal(atom) else leaving.get(atom)

        def apply(eqn: Equation, inputs: list[Any]) -> list[Any]:
            done = on_shards.get(next(numbers))
            if done is not None:
                # Indices and zeros may be deferred; the gradients beside them are shards, [D/N, F].
                return [done.apply([self.gather([x])[0] if is_lazy(x) and not x.shape else x for x in inputs])]
            return self._apply(eqn, inputs, list(map(how, eqn.invars)), list(map(how, eqn.outvars)))

        outputs = _compat.evaluate(closed, inputs, apply)
        pairs = itertools.zip_longest(outputs, jaxpr.outvars, wanted)
        return [x if how(v) is not None else self.leave(x, w) for x, v, w in pairs]

    def _apply(self, eqn: Equation, inputs: list[Any], arriving: list[Any], wanted: list[Any]) -> list[Any]:
        if self.order.enter_pass(is_backward=_compat.is_transposed(eqn)):
            self.held.drop()  # the largest activations are near, see [Note: Short reuse]
        name = eqn.primitive.name
        lazy = any(map(is_unevaluated, inputs))
        rule = RULES.get(name)
        if rule is not None:
            # Meshes are to be adjusted even if nothing is lazy, see [Note: Meshes in types].
            is_of_mesh = name == "reshard" or names_mesh(eqn) or self.meshes.in_equation(eqn).carried
            if lazy or is_of_mesh or any(w is not None for w in wanted):
                return rule(self, eqn, inputs, arriving, wanted)
        # Values made of literals alone, such as masks, are deferred to their use, too: jax has moved them out of loops.
        elif (lazy and not any(isinstance(x, Rows) for x in inputs)) or all(map(is_constant, inputs)):
            kept = apply_on_shard(eqn, inputs) or defer(eqn, inputs)  # on the shard first: its gather moves less
            if kept is not None:
                return [self.leave(kept, w) for w in wanted]
        return [self.leave(x, w) for x, w in zip(bind_whole(self, eqn, inputs), wanted, strict=True)]

    def leave(self, x: Any, how: GradientExit | None) -> Any:
        """Reduces a gradient if `how` is a reduction; returns other values as they are."""
        if how is None:
            return x
        (x,) = self.gather([x])  # [D, F]
        reduced = how(x) if isinstance(how, Reduction) else x  # [D/N, F], or [D, F] for a `Part`
        self.note([reduced], [how])
        return reduced

    def note(self, grads: Sequence[Any], wanted: Wanted, *, of_block: bool = False) -> None:
        """Records gradients for the passes that wait for them: the awaited ones, or all of a block's."""
        awaited = [x for x, how in zip(grads, wanted, strict=True) if how is not None and (of_block or how.is_awaited)]
        self.order.note_reduced(awaited)

    def evaluate_whole(self, jaxpr: Any, *inputs: Any) -> list[Any]:
        """Evaluates a jaxpr to whole values."""
        return self.gather(self(jaxpr, inputs))

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Returns values that are used together, whole. This is the only place where parameters are gathered."""
        values = [self._gather_rows(x) if isinstance(x, Rows) else x for x in values]
        if not any(map(is_lazy, values)):
            return values
        bundle = Bundle.of(values)
        leaves = list(map(self.held.fill, bundle.leaves))  # [D/N, F], and [D, F] if still held
        self.found += [(x.row_of, x.wire_dtype) for x in leaves if is_cut(x) and x.row_of is not None]
        params = [x for x in leaves if isinstance(x, Lazy)]
        made: dict[Any, jax.Array] = {}  # shared by parameters that differ only in their final dtype
        for i, x in enumerate(self.order.order_use(leaves)):
            if not isinstance(x, Lazy):
                leaves[i] = x
                continue
            key = leaves[i].key, x.wire_dtype  # a shard that waits is another object: the old one is the key
            whole = made[key] if key in made else made.setdefault(key, x.gather())  # [D, F]
            leaves[i] = whole.astype(x.dtype)  # widening casts follow the gather
        self.held.keep([dataclasses.replace(x, whole=made[x.key, x.wire_dtype]) for x in params])
        return Bundle(tuple(leaves), bundle.template).compute()

    def _gather_rows(self, x: Rows) -> jax.Array:
        """Returns all rows of a loop's result, whole."""
        stacks, shared = self.gather(x.stacks), self.gather(x.shared)  # stacks: [L, D, F]
        of_whole = dataclasses.replace(x, shared=tuple(shared))
        return jax.vmap(lambda rows: Bundle.of([of_whole.row(rows)]).compute()[0])(stacks)  # [L, ...]
