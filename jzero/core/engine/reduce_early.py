"""Moves each reduction to the equation that makes the gradient.

    reduce_early(jaxpr, out_exits, in_exits, cache) -> jaxpr

The joint program gets a `zero_reduce` where a gradient is made, in loop bodies, calls and recomputed blocks too, and
equations on shards from there to the output, where the gradient leaves as `out_exits` says. A gradient that is reduced
later, or with others, passes a `zero_unreduced`. Here `d` is reduced, not `c` or `e`:

    c:f32[64,512] = dot_general[...] g x                          # made
    d:bf16[64,512] = convert_element_type[new_dtype=bfloat16] c   # narrower: reduced here, [64, 512/N] on each device
    e:f32[64,512] = convert_element_type[new_dtype=float32] d     # of the shard: summed in bf16, stored in f32
  in (loss, e)

[Note: Reducing gradients where they are made]
Followed back from the outputs, a gradient passes a few operations that add, place or relabel (the transposes of those
that `shard_rules` apply to parameters), and ends at the operation that made it. It is reduced and cut right there, and
those few operations run on shards. So a loop that returns a stack of gradients stacks shards, and a loop that adds to
the stack layer by layer adds shards. Collectives cannot be in the branches of a `cond`, nor in a `while`, where devices
may differ in what they run: such a gradient is reduced after it.

[Note: Several uses]
The gradients of a parameter's uses are summed first and reduced once: that holds one whole gradient between the uses,
and sends each element once. There are two exceptions, each reduced one by one: parts of a stack, which together make
the stack; and, from stage 2 on, uses with a loop between them, since the whole gradient would stay in memory beside the
activations of that loop. A loop without products is no loop over layers and does not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom, J
from jzero.core.base.types import Params
from jzero.core.engine.gradient_rules import GRADIENT_RULES, DefUse, GradientExit, Reduction, Unreduced
from jzero.core.engine.placed import named_p, reduce_p, unreduced_p
from jzero.core.jaxpr.edit import Editor, params_of_call
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.primitives import CALLS, RUNS, called_jaxpr

Exits: TypeAlias = Sequence[GradientExit | None]
Cache: TypeAlias = IdDict[AnyJaxpr, dict[tuple[Reduction | None, ...], AnyJaxpr]]
"""New programs of functions, by how their results leave."""


def reduce_early(jaxpr: J, out_exits: Exits, in_exits: Exits = (), cache: Cache | None = None) -> J:
    """Returns a program whose gradients leave as they should, see [Note: Reducing gradients where they are made].

    Args:
      jaxpr: A program over whole parameters.
      out_exits: For each output that is a gradient, how it leaves; else `None`. Those with a `Reduction` become shards.
      in_exits: For each input that is a shard of a gradient, its reduction.
      cache: The programs of calls: layers that share one function share its new program, too.

    Example:
      >>> from jzero.core.engine.gradient_rules import Reduction
      >>> from jzero.core.engine.reduce_early import reduce_early
      >>> from jzero.core.layout.route import Hop, Route
      >>> from jzero.core.layout.cut import Cut
      >>> from jzero.core.layout.route import Sums
      >>> loss = lambda w, x: (x @ w.astype(jnp.bfloat16)).sum()
      >>> joint = jax.make_jaxpr(jax.grad(loss))(jnp.ones((64, 8)), jnp.ones((2, 64), jnp.bfloat16))
      >>> cut, route = Cut(0, (64, 8), 8), Route((Hop("data", 8),))
      >>> exit = Reduction("w", cut, route, Sums(("data",)), jnp.dtype("float32"), by_use=True)
      >>> [str(eqn.primitive) for eqn in reduce_early(joint.jaxpr, [exit]).eqns[-2:]]
      ['transpose', 'zero_reduce']
    """
    if not any(x is not None for x in out_exits):
        return jaxpr
    opened, _ = compat.open_jaxpr(jaxpr)
    sweep = _Sweep(opened, in_exits, IdDict() if cache is None else cache)
    outputs = [v if how is None else sweep.request(v, how) for v, how in zip(opened.outvars, out_exits, strict=True)]
    for eqn in reversed(opened.eqns):
        sweep.visit(eqn)
    inputs = [sweep.shards.get(v, v) for v in opened.invars]
    return compat.with_equations(jaxpr, inputs, outputs, sweep.eqns[::-1])


class _Sweep:
    """One sweep from the outputs of a program to the equations that make its gradients.

    Attributes:
      def_use: Facts about its values.
      exits: How each gradient leaves, as far as the sweep has come.
      shards: The variable that replaces each of them after its exit: the shard, or the marked gradient.
      eqns: The equations of the new program, the last one first.
    """

    def __init__(self, jaxpr: Jaxpr, in_exits: Exits, cache: Cache) -> None:
        pairs = zip(jaxpr.invars, in_exits, strict=False)
        shards = {v: how for v, how in pairs if isinstance(how, Reduction)}  # [D/N, F]
        self.def_use, self.cache = DefUse(jaxpr, shards), cache
        self.exits: dict[Var, GradientExit] = dict(shards)
        self.shards = {v: compat.variable(how.shard_type()) for v, how in shards.items()}
        self.eqns: list[JaxprEqn] = []

    def request(self, v: Atom, how: GradientExit) -> Var:
        """Requests an exit for a gradient; returns the variable that replaces it. One with other readers exits here."""
        out = compat.variable(how.shard_type() if isinstance(how, Reduction) else v.aval)
        if isinstance(v, Literal) or not self.def_use.is_free(v):
            self.insert_exit(v, how, out)
            return out
        self.exits[v] = how
        return self.shards.setdefault(v, out)

    def insert_exit(self, v: Atom, how: GradientExit, out: Var) -> None:
        """Prepends the reduction of a gradient, or the mark of one that is reduced later."""
        maker = self.def_use.find(v)
        params: Params = {"path": how.path, "is_awaited": how.is_awaited}
        if isinstance(how, Unreduced):
            self.eqns.append(compat.new_equation(unreduced_p, [v], [out], params, maker))
            return
        shard = self.place(how, out, maker)
        params |= {"cut": how.cut, "dtype": how.dtype, "route": how.route, "sums": how.sums}
        self.eqns.append(compat.new_equation(reduce_p, [v], [shard], params, maker))

    def name(self, how: GradientExit | None, out: Var, maker: JaxprEqn) -> Var:
        """Prepends a shard's name if it comes out of a call; returns the call's result."""
        if how is None or maker.primitive.name not in CALLS:
            return out
        result = compat.variable(out.aval)
        self.eqns.append(compat.new_equation(named_p, [result], [out], {"path": how.path}, maker))
        return result

    def place(self, how: Reduction, out: Var, scope: JaxprEqn | None) -> Var:
        """Prepends a shard's way to the host, if it goes there; returns the shard on the device."""
        if not how.to_host:
            return out
        shard = compat.variable(how.on_device().shard_type())
        self.compute(how.place, [shard], out, scope)
        return shard

    def compute(self, fn: Callable[..., jax.Array], inputs: Sequence[Atom], out: Var, scope: JaxprEqn | None) -> None:
        """Prepends the equations of a function whose result is `out`."""
        ahead = Editor()
        (result,) = ahead.trace(fn, inputs, scope)
        if not ahead.eqns:  # the result is an input, which `out` therefore stands for
            self.shards.update((v, out) for v, x in self.shards.items() if x is result)
            return
        renamed = [eqn.replace(outvars=[out if v is result else v for v in eqn.outvars]) for eqn in ahead.eqns]
        self.eqns += renamed[::-1]

    def visit(self, eqn: JaxprEqn) -> None:
        """Prepends an equation: as it is, or on shards, or with its gradients reduced inside."""
        exits: Exits = [self.exits.get(v) for v in eqn.outvars]
        name, how = eqn.primitive.name, exits[0] if len(exits) == 1 else None
        if isinstance(how, Reduction) and name in GRADIENT_RULES:
            passed = GRADIENT_RULES[name](self.def_use, eqn, how.on_device())
            if passed is not None and passed.apply is not None:  # [D/N, F]
                apply, place = passed.apply, how.place  # only the last shard of a chain moves to the host
                read = self._mark(eqn, passed.inputs).invars
                self.compute(lambda *xs: place(apply(list(xs))), read, self.shards[eqn.outvars[0]], eqn)
                return
            if passed is not None:
                eqn = self._mark(eqn, passed.inputs)
        if isinstance(how, Unreduced) and name == "add_any":
            eqn = self._mark(eqn, {i: how for i, v in enumerate(eqn.invars) if self.def_use.is_free(v)})  # summands
        if any(isinstance(x, Reduction) for x in exits) and (name == "scan" or name in RUNS):
            eqn, exits = self._enter_loop(eqn, exits) if name == "scan" else self._enter_call(eqn, exits)
        for v, x in zip(eqn.outvars, exits, strict=True):
            if x is not None:
                self.insert_exit(v, x, self.shards[v])
        self.eqns.append(eqn)

    def _mark(self, eqn: JaxprEqn, inputs: Mapping[int, GradientExit]) -> JaxprEqn:
        """Returns an equation on what replaces those of its inputs that are gradients."""
        return eqn.replace(invars=[self.request(v, inputs[i]) if i in inputs else v for i, v in enumerate(eqn.invars)])

    def _enter_call(self, eqn: JaxprEqn, exits: Exits) -> tuple[JaxprEqn, Exits]:
        """Moves reductions into a call, or a recomputed block; returns it, and what leaves after it."""
        jaxpr, inside = called_jaxpr(eqn), [x if isinstance(x, Reduction) else None for x in exits]
        if eqn.primitive.name in CALLS:  # layers share one function, see `placed`
            inside = [x and dataclasses.replace(x, path=f"result {i}") for i, x in enumerate(inside)]
        programs, key = self.cache.setdefault(jaxpr, {}), tuple(inside)
        if key not in programs:
            programs[key] = reduce_early(jaxpr, inside, cache=self.cache)
        outs = [
            v if how is None else self.name(exits[i], self.shards[v], eqn)
            for i, (v, how) in enumerate(zip(eqn.outvars, inside, strict=True))
        ]
        is_changed = [how is not None for how in inside]
        params = params_of_call(eqn, programs[key], is_changed)
        return eqn.replace(outvars=outs, params=params), [None if isinstance(x, Reduction) else x for x in exits]

    def _enter_loop(self, eqn: JaxprEqn, exits: Exits) -> tuple[JaxprEqn, Exits]:
        """Moves reductions into a loop, which adds shards to carried gradients, and returns shards of stacked ones."""
        num_consts, num_carry = compat.scan_groups(eqn)
        inside: list[Reduction | None] = []
        for i, (how, start) in enumerate(zip(exits[:num_carry], eqn.invars[num_consts:], strict=False)):
            own = how.on_device() if isinstance(how, Reduction) else None
            adds = own is not None and self.def_use.is_free(start) and _adds_shards(eqn, num_consts + i, i, own)
            inside.append(own if adds else None)
        inside += [how.for_row() if isinstance(how, Reduction) else None for how in exits[num_carry:]]
        in_exits = [*[None] * num_consts, *inside[:num_carry]]
        body = reduce_early(eqn.params["jaxpr"], inside, in_exits, self.cache)
        outs, inputs = list(eqn.outvars), list(eqn.invars)
        for i, (how, done) in enumerate(zip(exits, inside, strict=True)):
            if done is None or not isinstance(how, Reduction):
                continue
            shard = self.shards[eqn.outvars[i]]
            outs[i] = shard if done.to_host else self.place(how, shard, eqn)  # iterations send rows to the host
            if i < num_carry:
                inputs[num_consts + i] = self.request(inputs[num_consts + i], done)  # e.g. zeros, [L, D/N, F]
        after = [how if done is None else None for how, done in zip(exits, inside, strict=True)]
        return eqn.replace(invars=inputs, outvars=outs, params={**eqn.params, "jaxpr": body}), after


def _adds_shards(eqn: JaxprEqn, place: int, index: int, how: Reduction) -> bool:
    """Whether a scan adds to the carried gradient at `index` part by part, so that its iterations can add shards.

    The body has it as its input number `place`.
    """
    body, _ = compat.open_jaxpr(eqn.params["jaxpr"])
    exits = [how if i == index else None for i in range(len(body.outvars))]
    tried, _ = compat.open_jaxpr(
        reduce_early(body, exits, [how if i == place else None for i in range(len(body.invars))])
    )
    read = [v for inner in tried.eqns for v in inner.invars]
    # An equation that takes the whole carry would have to gather it.
    if any(v is body.invars[place] for v in read) or not any(v is tried.invars[place] for v in read):
        return False
    # Turns that each reduce all of it would send more than one reduction after the loop.
    # Those of rows that were looked up send less, as was decided.
    whole = [x for x in equations_of(tried) if x.primitive is reduce_p and "lookup" not in x.params]
    num_reduced = sum(math.prod(x.params["cut"].shape) for x in whole)
    return int(eqn.params["length"]) * num_reduced <= math.prod(how.cut.shape)
