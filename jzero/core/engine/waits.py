"""Makes backward loops and recomputed blocks wait until gradients from before them are reduced.

    wait_for_gradients(jaxpr, cache) -> jaxpr

A program with its reductions gets a `zero_wait` before loops and blocks:

    r:f32[64,64] = zero_reduce[path=head ...] g
    c_ _ = zero_wait[n=1 how=select] c r            # the cotangent of the loop over layers
    ... = scan[...] c_ ...

[Note: Waiting for gradients]
Compilers for GPUs would otherwise postpone the products that make gradients of weights, and keep their operands, such
as the gradient of the logits. The first block waits for the head, each other block for all earlier ones but the latest.
The cotangent waits, not the shards, so gathers may start early. Nothing waits for gradients that go to the host. At
stage 3, gradients of whole parameters are awaited only if a block makes them: the operands of the gradient of a norm's
scale are as large as an activation, and would be kept for each block (124M, unrolled and recomputed, on 8 H200:
1278 MiB, not 1122).

Where a U-Net joins an early value to a late one, the cotangent of the late one waits for that of the early one. That
would be cut out where it is added to another, far later, and all that the whole is made of would stay until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom, J
from jzero.core.engine.placed import can_be_awaited, reduce_p, unreduced_p, wait_p
from jzero.core.jaxpr.edit import Editor, is_recomputed, params_of_call
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import CALLS, RUNS, called_jaxpr

Cache: TypeAlias = IdDict[AnyJaxpr, AnyJaxpr]
Known: TypeAlias = IdDict[Jaxpr, dict[tuple[bool | None, ...], list[bool | None]]]


def wait_for_gradients(jaxpr: J, cache: Cache | None = None) -> J:
    """Returns a program that waits, see [Note: Waiting for gradients].

    Args:
      jaxpr: A program with its reductions.
      cache: The programs of calls: layers that share one function share its new program, too.
    """
    opened, _ = compat.open_jaxpr(jaxpr)
    pass_ = _Waits(IdDict() if cache is None else cache)
    awaited: dict[Var, bool] = {}
    _find_awaited(opened, [None] * len(opened.invars), awaited, IdDict())
    added_later = _parts_added_later(opened)
    for eqn in opened.eqns:
        pass_.visit(eqn, awaited)
        for v in filter(added_later.get, eqn.outvars):
            pass_.hold(v, added_later[v], eqn)
    return compat.with_equations(jaxpr, opened.invars, [pass_.read(v) for v in opened.outvars], pass_.eqns)


class _Waits(Editor):
    """A program under construction, with the gradients that were reduced since the last loop.

    Attributes:
      due: Those that the next block waits for.
      latest: Those since the last block began.
      is_in_blocks: Whether a block has begun since the last loop.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache
        self.due: list[Var] = []
        self.latest: list[Var] = []
        self.is_in_blocks = False

    def visit(self, eqn: JaxprEqn, awaited: Mapping[Var, bool]) -> None:
        """Appends an equation, which waits if it is a loop or a block."""
        name = eqn.primitive.name
        if name == "scan":
            eqn = self.delay(eqn, _carried(eqn), self.due + self.latest)
            self.due, self.latest, self.is_in_blocks = [], [], False
        elif is_recomputed(eqn):
            cotangent = [v for v in eqn.invars if _is_activation(v)][-1:]  # jax puts it last
            eqn = self.delay(eqn, cotangent, self.due)
            self.due, self.latest, self.is_in_blocks = self.latest, [], True
        if name in CALLS:
            eqn = self.enter(eqn)
        self.keep(eqn)
        makes = name == "scan" or name in RUNS or eqn.primitive in (reduce_p, unreduced_p)
        grads = [v for v in eqn.outvars if v in awaited and can_be_awaited(compat.type_of(v))] if makes else []
        reduced = self.latest if self.is_in_blocks else self.due
        reduced += [v for v in grads if name in RUNS or awaited[v]]

    def delay(self, eqn: JaxprEqn, cotangents: Sequence[Var], due: Sequence[Var]) -> JaxprEqn:
        """Returns an equation whose `cotangents` wait for the gradients that are `due`."""
        values = list(dict.fromkeys(cotangents))
        if not values or not due:
            return eqn
        inputs = [*map(self.read, values), *due]
        delayed = [compat.variable(v.aval) for v in inputs]
        self.bind(wait_p, inputs, delayed, eqn, n=len(values), how="select")
        names = dict(zip(values, delayed, strict=False))
        return eqn.replace(invars=[v if isinstance(v, Literal) else names.get(v, v) for v in eqn.invars])

    def hold(self, v: Var, others: Sequence[Var], scope: JaxprEqn) -> None:
        """Makes all that reads `v` from now on wait for others, whole: without a barrier, one element would do."""
        for how in ("barrier", "select"):
            inputs = [self.read(x) for x in (v, *others)]
            delayed = [compat.variable(x.aval) for x in inputs]
            self.bind(wait_p, inputs, delayed, scope, n=1, how=how)
            self.stands_for.update(zip((v, *others), delayed, strict=True))

    def enter(self, eqn: JaxprEqn) -> JaxprEqn:
        """Returns a call whose function waits."""
        jaxpr = called_jaxpr(eqn)
        if jaxpr not in self.cache:
            self.cache[jaxpr] = wait_for_gradients(jaxpr, self.cache)
        return eqn.replace(params=params_of_call(eqn, self.cache[jaxpr]))


def _carried(eqn: JaxprEqn) -> list[Var]:
    """Returns the activations that a scan carries and changes."""
    num_consts, num_carry = compat.scan_groups(eqn)
    body, _ = compat.open_jaxpr(eqn.params["jaxpr"])
    own = body.invars[num_consts : num_consts + num_carry]
    starts = zip(eqn.invars[num_consts:], own, body.outvars, strict=False)
    return [v for v, before, after in starts if before is not after and _is_activation(v)]


def _find_awaited(
    jaxpr: Jaxpr, inputs: Sequence[bool | None], awaited: dict[Var, bool], known: Known
) -> list[bool | None]:
    """Returns for each output of a program, if it is a gradient, whether it is awaited outside blocks; else `None`.

    `inputs` says the same of its inputs; `awaited` gets it for all gradients that the program makes. `known` are the
    outputs of functions that layers share.
    """

    def apply(eqn: JaxprEqn, into: list[bool | None]) -> list[bool | None]:
        outs: list[bool | None]
        if eqn.primitive in (reduce_p, unreduced_p):
            outs = [eqn.params["is_awaited"]]
        elif eqn.primitive.name == "scan" or eqn.primitive.name in RUNS:
            inner, _ = compat.open_jaxpr(called_jaxpr(eqn))
            of_inner = known.setdefault(inner, {})
            if tuple(into) not in of_inner:
                of_inner[tuple(into)] = _find_awaited(inner, into, {}, known)
            outs = of_inner[tuple(into)]
        else:
            is_gradient = any(x is not None for x in into)
            outs = [any(into) if is_gradient else None] * len(eqn.outvars)
        awaited.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if x is not None)
        return outs

    return propagate(jaxpr, [*[None] * len(jaxpr.constvars), *inputs], apply, lambda literal: None)


def _parts_added_later(jaxpr: Jaxpr) -> dict[Var, list[Var]]:
    """Returns the parts of joined cotangents that are only added to later ones, by the part that is read first."""
    made = {v: t for t, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    readers: dict[Var, list[int]] = {}
    for t, eqn in enumerate(jaxpr.eqns):
        for v in filter(_is_activation, eqn.invars):
            readers.setdefault(v, []).append(t)

    def adds(t: int, after: int) -> bool:
        eqn = jaxpr.eqns[t]
        return eqn.primitive.name == "add_any" and max(made[v] for v in eqn.invars if v in made) > after

    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "split" and compat.is_transposed(eqn):
            parts = [v for v in eqn.outvars if v in readers]
            first = min(parts, key=readers.__getitem__, default=None)
            if first is not None:
                found[first] = [v for v in parts if all(adds(t, readers[first][0]) for t in readers[v])]
    return found


def _is_activation(v: Atom) -> TypeGuard[Var]:
    aval = compat.type_of(v)
    return not isinstance(v, Literal) and can_be_awaited(aval) and aval.ndim > 0
