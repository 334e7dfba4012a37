"""Loops that gather the parameters of the next turn while they compute on those of this one.

[Note: Gathering one layer ahead]
A scan over layers that gathers where it computes leaves it to the compiler to overlap the two, and compilers do not
move a gather from one turn of a loop into the one before unless they are told to. Here the loop says so itself: it
carries the whole parameters of this turn and gathers those of the next beside the computation. The last turn gathers
some that nothing uses: were it to stand after the loop, compilers would lay out its activations otherwise than the
loop's, and copy stacks of them (124M scanned on 8 H200: 1769 MiB so, 2407 with the last turn apart). Hence at most a
32nd of what the loop gathers is gathered ahead. That is enough: the first parameters of a turn have nothing to hide
behind, the others have the turn itself (7B on 8 H200: communication is exposed for 15 % of its time with nothing
gathered ahead, 2.5 % with a quarter of a layer, 5.7 % with all of it). Where no bound is given, programs for GPUs do so
with a third of a layer.

Differentiated by jax such a loop would keep what it carries, the whole stack. So it has a gradient of its own: one
turn is differentiated, and of what that would keep

* parameters, and all that follows from them and the loop's constants alone, are made again in the backward pass, where
  the loop gathers ahead in the other direction,
* rows of the arrays that are scanned are read again,
* the rest, activations, is kept by turn, as a scan would.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jzero import _compat
from jzero._lazy import Lazy, after
from jzero._own_derivatives import Beside, instantiated
from jzero._remat import REMAT

__all__ = ["chosen_ahead", "scan_ahead"]

CALLS = frozenset(["jit", "pjit"])
MOST_IN_VAIN = 1 / 32
"""The most that a loop gathers in vain in its last turn, as a share of all that it gathers."""
Body = Callable[[Any, list[Any], list[Any]], tuple[list[Any], list[Any]]]


def chosen_ahead(
    jaxpr: Any, variables: Sequence[Any], xs: Sequence[Any], limit: int | None, length: int
) -> dict[int, Lazy]:
    """Returns which of the scanned values are gathered one turn ahead, as they are then gathered.

    Those that a turn uses first come first: they have the least computation to hide behind.

    Args:
      jaxpr: The loop's body.
      variables: The body's variables for one row of each scanned value.
      xs: Scanned values: stacks, lazy or not.
      limit: The most, in bytes of whole parameters as they travel, that may be gathered ahead; `None`: a third of what
        a turn gathers, or its first parameter if that is more.
      length: The number of turns.
    """
    first_use = _first_uses(jaxpr)
    rows: dict[int, tuple[Lazy, int]] = {}
    for i in sorted(range(len(xs)), key=lambda i: first_use.get(variables[i], (len(jaxpr.eqns),))):
        x = xs[i]
        if not isinstance(x, Lazy) or x.shard is None or variables[i] not in first_use:
            continue
        narrow = _cast_to(jaxpr, variables[i])
        if narrow is not None and narrow.itemsize < jnp.dtype(x.wire_dtype).itemsize:
            x = dataclasses.replace(x, wire_dtype=narrow)
        rows[i] = x, math.prod(x.shape[1:]) * jnp.dtype(x.wire_dtype).itemsize
    sizes = [size for _, size in rows.values()]
    bound = max([sum(sizes) // 3, *sizes[:1]]) if limit is None else limit
    left = min(bound, int(sum(sizes) * length * MOST_IN_VAIN))
    found: dict[int, Lazy] = {}
    for i, (x, size) in rows.items():
        if size <= left:
            left -= size
            found[i] = x
    if limit and rows and not found:
        _warn_of_no_effect(sizes, limit, length)
    return found


def _warn_of_no_effect(sizes: Sequence[int], limit: int, length: int) -> None:
    smallest, total = min(sizes), sum(sizes)
    if limit < smallest:
        why = f"its smallest parameter to gather has {smallest} bytes. Give so many or more"
    else:
        why = (
            f"its {length} turns may gather {int(total * length * MOST_IN_VAIN)} bytes ahead, a 32nd of all that they "
            f"gather, since the last does so in vain, and its smallest parameter has {smallest}. Scan "
            f"{math.ceil(smallest / total / MOST_IN_VAIN)} layers or more, or call them one by one"
        )
    warnings.warn(f"`prefetch_bytes={limit}` has no effect on a scan in the loss: {why}.", stacklevel=2)


def _first_uses(jaxpr: Any) -> dict[Any, tuple[int, ...]]:
    """Returns for each variable where it is used first: in which equation, and where in what that calls."""
    first: dict[Any, tuple[int, ...]] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        inside: dict[Any, tuple[int, ...]] = {}
        if eqn.primitive.name in CALLS | REMAT:
            called = next(_compat.contained_jaxprs(eqn))
            uses = _first_uses(called)
            pairs = zip(eqn.invars, called.invars, strict=True)
            inside = {v: uses.get(w, ()) for v, w in pairs if not _compat.is_literal(v)}
        for v in eqn.invars:
            if not _compat.is_literal(v):
                first.setdefault(v, (i, *inside.get(v, ())))
    return first


def _cast_to(jaxpr: Any, var: Any) -> Any:
    """Returns the floating dtype that every use of `var` casts it to, if there is one."""
    uses = [eqn for eqn in jaxpr.eqns if any(v is var for v in eqn.invars)]
    if not uses or any(v is var for v in jaxpr.outvars):
        return None
    dtypes = set()
    for eqn in uses:
        if eqn.primitive.name == "convert_element_type":
            dtypes.add(jnp.dtype(eqn.params["new_dtype"]))
        elif eqn.primitive.name in CALLS | REMAT:
            inner = next(_compat.contained_jaxprs(eqn))
            dtypes |= {_cast_to(inner, v) for x, v in zip(eqn.invars, inner.invars, strict=True) if x is var}
        else:
            return None
    (dtype, *others) = dtypes
    return None if others or dtype is None or not jnp.issubdtype(dtype, jnp.floating) else dtype


def scan_ahead(
    body: Body, closed: Any, init: list[Any], xs: list[Any], ahead: Mapping[int, Lazy], **options: Any
) -> tuple[list[Any], list[Any]]:
    """`lax.scan` that gathers some of what it scans one turn ahead.

    Args:
      body: `body(closed, carry, row)`, which returns the new carry and a row of results. Its row holds lazy values for
        lazy stacks; those of `ahead` are whole already.
      closed: What every turn sees: a tree of arrays and lazy values.
      init: What the first turn gets from the one before.
      xs: What is scanned: arrays and lazy stacks.
      ahead: What to gather ahead, by index in `xs`.
      **options: `length`, `reverse` and `unroll` of `lax.scan`.

    Returns:
      What the last turn hands on, and the rows of results, stacked.
    """
    loop = _Loop(body, frozenset(ahead), **options)
    init = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in init]
    xs = [ahead.get(i, x) for i, x in enumerate(xs)]
    diff, rest = zip(*(_separated(tree) for tree in (closed, init, xs)), strict=True)
    differentiable = [tuple(values) for values in diff]
    beside = Beside()

    @jax.custom_vjp
    def region(diff: Any, rest: Any) -> Any:
        return loop.forward(*map(_joined, diff, rest))

    def forward(diff: Any, rest: Any) -> tuple[Any, Any]:
        wanted = [frozenset(i for i, x in values.items() if x.perturbed) for values in diff]
        diff, rest = jax.tree.map(lambda x: x.value, (diff, rest))
        closed, init, xs = map(_joined, diff, rest)
        turn = _Turn.traced(loop, closed, init, xs, wanted, beside)
        (end, ys), kept = loop.forward_keeping(turn, closed, init, xs)
        beside.put([*end, *ys])
        return (end, ys), (closed, xs, kept, turn)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, None]:
        closed, xs, kept, turn = residuals
        found = loop.backward(closed, xs, kept, turn, cotangents)
        return [{i: some.get(i) for i in which} for some, which in zip(found, differentiable, strict=True)], None

    region.defvjp(forward, backward, symbolic_zeros=True)
    end, ys = region(list(diff), list(rest))
    results = beside.instead([*end, *ys])
    return results[: len(end)], results[len(end) :]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The loop as a function of all that it uses; `scan_ahead` says what."""

    body: Body
    ahead: frozenset[int]
    length: int
    reverse: bool
    unroll: int

    def forward(self, closed: Any, init: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Runs it."""

        def turn(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            return self.body(closed, carry, row)

        return self._run(turn, init, xs, self.reverse, None)

    def forward_keeping(self, turn: _Turn, closed: Any, init: list[Any], xs: list[Any]) -> tuple[Any, list[Any]]:
        """Runs it; also returns what the backward pass needs of each turn, stacked."""

        def one(carry: list[Any], row: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            (carry, ys), kept = turn.run(closed, carry, row)
            return carry, (ys, kept)

        end, (ys, kept) = self._run(one, init, xs, self.reverse, None)
        return (end, ys), kept

    def backward(
        self, closed: Any, xs: list[Any], kept: list[Any], turn: _Turn, cotangents: tuple[list[Any], list[Any]]
    ) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
        """Returns the gradients of `closed`, `init` and `xs` by index of what `_separated` tells apart."""
        of_end = {i: instantiated(cotangents[0][i]) for i in turn.carried}
        of_ys = dict(enumerate(cotangents[1]))
        of_ys = {i: x for i, x in of_ys.items() if _inexact(x) and not isinstance(x, SymbolicZero)}
        none_yet = {i: jnp.zeros_like(x) for i, x in _separated(closed)[0].items() if i in turn.wanted[0]}

        def one(state: Any, row: Any) -> Any:
            (of_carry, of_closed), (x, saved, of_y) = state, row
            found, of_carry, of_row = turn.pull(closed, x, saved, of_carry, of_y)
            return (of_carry, jax.tree.map(jnp.add, of_closed, found)), of_row

        fence = [*of_end.values(), *of_ys.values()]
        (of_init, of_closed), of_xs = self._run(one, (of_end, none_yet), xs, not self.reverse, fence, kept, of_ys)
        return of_closed, of_init, of_xs

    def _run(
        self, turn: Callable[..., Any], carry: Any, xs: list[Any], backwards: bool, fence: Any, *more: Any
    ) -> tuple[Any, Any]:
        """Runs `turn(carry, row)`, or `turn(carry, (row, *rows of more))`, from the first row to the last or backwards.

        The first gather waits for `fence`, if that is not `None`.
        """

        @jax.jit
        def one(carry: Any, at: jax.Array, whole: dict[int, jax.Array], data: Any) -> Any:
            xs, more = data
            row = self.row(xs, at, whole)
            return turn(carry, (row, *(_index(x, at) for x in more)) if more else row)

        def at(turn: Any) -> jax.Array:  # arithmetic on the counter: compilers look for that to pipeline reductions
            return jnp.asarray(self.length - 1 - turn if backwards else turn, jnp.int32)

        def step(i: jax.Array, state: Any) -> Any:
            carry, whole, rows = state
            following = {j: _shard(xs[j], at(i + 1)).make_whole() for j in self.ahead}  # of some row in the last turn
            carry, found = one(carry, at(i), whole, (xs, more))
            return carry, following, _write(rows, found, at(i))

        shards = {i: _shard(xs[i], at(0)) for i in self.ahead}
        if fence is not None:
            shards = after(shards, fence)
        whole = {i: x.make_whole() for i, x in shards.items()}
        _, shapes = jax.eval_shape(one, carry, at(0), whole, (xs, more))
        rows = jax.tree.map(lambda x: jnp.zeros((self.length, *x.shape), x.dtype), shapes)
        carry, _, rows = lax.fori_loop(0, self.length, step, (carry, whole, rows), unroll=self.unroll)
        return carry, rows

    def row(self, xs: list[Any], at: jax.Array, whole: Mapping[int, jax.Array]) -> list[Any]:
        """Returns one row of what is scanned, with the whole parameters that are at hand."""
        return [
            dataclasses.replace(_index(dataclasses.replace(x, shard=None), at).drop_leading(), whole=whole[i])
            if i in self.ahead
            else _index(x, at).drop_leading()
            if isinstance(x, Lazy)
            else _index(x, at)
            for i, x in enumerate(xs)
        ]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Turn:
    """One turn, differentiated.

    Attributes:
      jaxpr: From `(closed, carry, row)`, flat, to the new carry, the row of results, and what the gradient needs.
      pullback: The tree of what the gradient needs.
      results: The dtypes and shapes of the carry and the row of results.
      wanted: What of `closed` and of `row` has a gradient.
      carried: What of the carry has one.
      origin: Where the backward pass gets each thing that the gradient needs: ("kept", i), ("input", i) or ("made", i),
        output i of `jaxpr` made again.
      kept: Which outputs of `jaxpr` are kept.
    """

    jaxpr: Any
    pullback: Any
    results: Any
    wanted: Sequence[frozenset[int]]
    carried: Sequence[int]
    origin: Sequence[tuple[str, int]]
    kept: Sequence[int]

    @classmethod
    def traced(
        cls,
        loop: _Loop,
        closed: Any,
        init: list[Any],
        xs: list[Any],
        wanted: Sequence[frozenset[int]],
        beside: Beside,
    ) -> _Turn:
        """Differentiates one turn; `wanted` says what of its inputs has a gradient in the first turn."""

        def one(*trees: Any) -> Any:
            parts = [_separated(tree) for tree in trees]
            asked = [{i: x for i, x in diff.items() if i in n} for (diff, _), n in zip(parts, wanted, strict=True)]

            def results(*asked: dict[int, Any]) -> Any:
                carry, ys = loop.body(*(_joined({**d, **a}, rest) for (d, rest), a in zip(parts, asked, strict=True)))
                values = beside.noting([*carry, *ys])
                return values[: len(carry)], values[len(carry) :]

            return jax.vjp(results, *asked)

        at = jax.ShapeDtypeStruct((), jnp.int32)
        whole = {i: jax.eval_shape(lambda x, at: _shard(x, at).make_whole(), xs[i], at) for i in loop.ahead}
        row = jax.eval_shape(loop.row, xs, at, whole)
        jaxpr, (results, pullback) = jax.make_jaxpr(one, return_shape=True)(closed, init, row)
        carried = wanted[1] | {i for i, _ in enumerate(init) if beside.moved[i]}
        if carried != wanted[1]:  # what one turn makes of parameters, the next one gets
            return cls.traced(loop, closed, init, xs, (wanted[0], carried, wanted[2]), beside)
        beside.moved[: len(init)] = [i in carried for i, _ in enumerate(init)]
        kinds = ["free"] * len(jax.tree.leaves(closed)) + ["carry"] * len(init)
        kinds += [k for x in row for k in ["free" if isinstance(x, Lazy) else "row"] * len(jax.tree.leaves(x))]
        origin, kept = _origins(jaxpr, kinds, len(jax.tree.leaves(results)))
        return cls(
            jaxpr,
            jax.tree.structure(pullback),
            results,
            wanted=(wanted[0], wanted[2]),
            carried=sorted(carried),
            origin=origin,
            kept=kept,
        )

    def run(self, closed: Any, carry: list[Any], row: list[Any]) -> tuple[Any, list[Any]]:
        """Returns the new carry and the row of results, and what is to be kept."""
        outputs = _compat.evaluate(self.jaxpr, jax.tree.leaves((closed, carry, row)), _compat.bind)
        treedef = jax.tree.structure(self.results)
        return treedef.unflatten(outputs[: treedef.num_leaves]), [outputs[i] for i in self.kept]

    def pull(
        self, closed: Any, row: list[Any], saved: list[Any], of_carry: dict[int, Any], of_y: dict[int, Any]
    ) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
        """Returns the gradients of `closed`, the carry and `row`."""
        carry_like, y_like = self.results
        inputs = [*jax.tree.leaves(closed), *([None] * len(jax.tree.leaves(carry_like))), *jax.tree.leaves(row)]
        made = [i for kind, i in self.origin if kind == "made"]
        again = dict(zip(made, _recomputed(self.jaxpr, inputs, made), strict=True))
        sources: dict[str, Any] = {"kept": saved, "input": inputs, "made": again}
        pullback = self.pullback.unflatten([sources[kind][i] for kind, i in self.origin])
        cotangents = [
            [x[i] if i in x else _no_cotangent(like) for i, like in enumerate(likes)]
            for x, likes in ((of_carry, carry_like), (of_y, y_like))
        ]
        found, of_carry, of_row = pullback(tuple(cotangents))
        return found, of_carry, of_row


def _origins(jaxpr: Any, kinds: Sequence[str], first: int) -> tuple[list[tuple[str, int]], list[int]]:
    """Returns `_Turn.origin` of the outputs from `first` on, and which of them are kept.

    Args:
      jaxpr: The turn.
      kinds: What each of its inputs is: "free" (parameters and constants), "row" (of an array that is scanned) or
        "carry".
      first: The first output that is not a result.
    """
    jaxpr, _ = _compat.open_jaxpr(jaxpr)
    index = {v: i for i, v in enumerate(jaxpr.invars)}
    depends = _dependences(jaxpr, [frozenset([kind]) for kind in kinds])
    origin: list[tuple[str, int]] = []
    kept: dict[Any, int] = {}
    outputs: list[int] = []
    for i, v in list(enumerate(jaxpr.outvars))[first:]:
        if depends[i] <= {"free"}:  # literals, too
            origin.append(("made", i))
        elif v in index and kinds[index[v]] == "row":
            origin.append(("input", index[v]))
        else:
            if v not in kept:
                kept[v] = len(kept)
                outputs.append(i)
            origin.append(("kept", kept[v]))
    return origin, outputs


def _dependences(jaxpr: Any, kinds: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Returns of which kinds of inputs each output of a jaxpr is made."""
    jaxpr, _ = _compat.open_jaxpr(jaxpr)
    found: dict[Any, frozenset[str]] = dict(zip(jaxpr.invars, kinds, strict=True))

    def of(atom: Any) -> frozenset[str]:
        return frozenset() if _compat.is_literal(atom) else found.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        inputs = [of(v) for v in eqn.invars]
        if eqn.primitive.name in CALLS:
            outputs = _dependences(eqn.params["jaxpr"], inputs)
        else:
            outputs = [frozenset().union(*inputs)] * len(eqn.outvars)
        found.update(zip(eqn.outvars, outputs, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _recomputed(jaxpr: Any, inputs: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """Returns some outputs of a jaxpr, given the inputs that they are made of; the others may be `None`."""
    jaxpr, consts = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    for eqn, outputs in _needed(jaxpr, wanted)[0]:
        with _compat.equation_context(eqn):
            args = [_compat.value_of(v) if _compat.is_literal(v) else env.get(v) for v in eqn.invars]
            if eqn.primitive.name in CALLS:
                results = _recomputed(eqn.params["jaxpr"], args, outputs)
            else:
                every = _compat.bind(eqn, args)
                results = [every[i] for i in outputs]
        env.update(zip((eqn.outvars[i] for i in outputs), results, strict=True))
    atoms = [jaxpr.outvars[i] for i in wanted]
    return [_compat.value_of(v) if _compat.is_literal(v) else env[v] for v in atoms]


def _needed(jaxpr: Any, wanted: Sequence[int]) -> tuple[list[tuple[Any, list[int]]], list[int]]:
    """Returns the equations that some outputs need, with which of their outputs, and the inputs that they need."""
    variables = {v for v in (jaxpr.outvars[i] for i in wanted) if not _compat.is_literal(v)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        outputs = [i for i, v in enumerate(eqn.outvars) if v in variables]
        if not outputs:
            continue
        atoms = eqn.invars
        if eqn.primitive.name in CALLS:
            inner, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
            atoms = [atoms[i] for i in _needed(inner, outputs)[1]]
        variables |= {v for v in atoms if not _compat.is_literal(v)}
        equations.append((eqn, outputs))
    return equations[::-1], [i for i, v in enumerate(jaxpr.invars) if v in variables]


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, Lazy)


def _separated(tree: Any) -> tuple[dict[int, jax.Array], Any]:
    """Returns what of a tree of arrays and lazy values may have a gradient, and the tree without."""
    entries, treedef = jax.tree.flatten(tree, is_leaf=_is_entry)
    diff: dict[int, jax.Array] = {}
    for i, x in enumerate(entries):
        if isinstance(x, Lazy) and x.slot is not None:
            diff[i], entries[i] = x.slot, dataclasses.replace(x, slot=None)
        elif not isinstance(x, Lazy) and _inexact(x):
            diff[i], entries[i] = x, None
    return diff, treedef.unflatten(entries)


def _joined(diff: Mapping[int, Any], rest: Any) -> Any:
    """Undoes `_separated`."""
    entries, treedef = jax.tree.flatten(rest, is_leaf=_is_entry)
    for i, x in diff.items():
        entries[i] = x if entries[i] is None else dataclasses.replace(entries[i], slot=x)
    return treedef.unflatten(entries)


def _shard(x: Lazy, at: jax.Array) -> Lazy:
    """Returns one row of a lazy stack as it is gathered: without its gradient, in the dtype that travels."""
    return _index(dataclasses.replace(x, slot=None, dtype=x.wire_dtype), at).drop_leading()


def _index(tree: Any, at: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, at, keepdims=False), tree)


def _write(stacks: Any, rows: Any, at: jax.Array) -> Any:
    return jax.tree.map(lambda x, row: lax.dynamic_update_index_in_dim(x, row, at, 0), stacks, rows)


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _no_cotangent(like: Any) -> Any:
    return jnp.zeros(like.shape, like.dtype) if _inexact(like) else np.zeros(like.shape, jax.dtypes.float0)
