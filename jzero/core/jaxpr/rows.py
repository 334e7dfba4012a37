"""How the values of a program depend on the rows of a batch that is split over devices.

    row_facts(jaxpr, *, batch, keys, axes) -> list[RowFacts]

Facts say of each output of a function of one device's rows whether devices may have different values, which dimensions
have one element per row, and whether it is a sum over rows (or a mean, see `growth`), or couples rows:

    lambda w, x: x @ w                    differs, rows along dimension 0
    lambda w, x: (x @ w).mean()           differs, a sum over rows or a mean
    lambda w, x: pmean((x @ w), "data")   the same on all devices
    lambda w, x: jnp.log((x @ w).mean())  differs, couples rows

One pass over the equations follows each value by the rules of `row_rules`. The results of an operation that it does not
know, or whose rule fails, are `RowKind.UNKNOWN`: a check never stops a program. `differs` is true unless it is known to
be false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.guard import attempt
from jzero.core.jaxpr import row_rules
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import RUNS, called_jaxpr
from jzero.core.jaxpr.row_facts import SAME, RowFacts, RowKind, applied, collected, lost, mixed, summed, without
from jzero.core.jaxpr.row_rules import shape_of

SUMS = frozenset({"psum", "psum2", "psum_invariant"})
EQUALIZING = SUMS | {"pmax", "pmin", "all_gather", "all_gather_invariant"}
COLLECTIVES = EQUALIZING | {"reduce_scatter", "ppermute", "pgather", "all_to_all", "ragged_all_to_all", "axis_index"}
MOST_ITERATIONS = 8


def row_facts(jaxpr: AnyJaxpr, *, batch: Sequence[bool], keys: Sequence[bool], axes: Iterable[str]) -> list[RowFacts]:
    """Returns the facts of each output of a jaxpr.

    Args:
      jaxpr: An open or closed jaxpr of one device's part of the batch.
      batch: For each input, whether it is a leaf of the batch: `[rows, ...]`, or a scalar that all devices share.
      keys: For each input, whether it is a random key that differs between devices.
      axes: The axes of the mesh over which the batch is split. A value reduced or gathered over all of them is the same
        on all devices and no longer depends on rows.

    Example:
      >>> from jzero.core.jaxpr.rows import row_facts
      >>> jaxpr = jax.make_jaxpr(lambda w, x: (x @ w, (x @ w).mean()))(jnp.ones(5), jnp.ones((4, 5)))
      >>> rowwise, mean = row_facts(jaxpr, batch=[False, True], keys=[False, False], axes={"data"})
      >>> sorted(rowwise.row_dims), mean.may_be_sum, mean.differs
      ([0], True, True)
    """
    inputs = []
    for v, has_rows, is_key in zip(compat.open_jaxpr(jaxpr)[0].invars, batch, keys, strict=True):
        is_rows = has_rows and bool(shape_of(v))
        inputs.append(
            RowFacts(True, True, RowKind.ROW, frozenset({0}), shape_of(v)[0]) if is_rows else RowFacts(is_key)
        )
    return _Interpreter(frozenset(axes))(jaxpr, inputs)


def _unknown(eqn: JaxprEqn, ins: Sequence[RowFacts]) -> list[RowFacts]:
    """Returns the facts of an equation that is not understood."""
    return [_marked(lost(ins), ins, differs=bool(eqn.effects))] * len(eqn.outvars)  # naming an axis is an effect


def _marked(x: RowFacts, ins: Sequence[RowFacts], *, differs: bool = False) -> RowFacts:
    """Returns facts of what is made from operands, that differs if they do, or if `differs` says so."""
    return x._replace(differs=differs or any(y.differs for y in ins), reads=any(y.reads for y in ins))


class _Interpreter:
    """Interprets jaxprs; each once for the same facts of its inputs."""

    def __init__(self, axes: frozenset[str]) -> None:
        self.axes = axes
        self._facts: IdDict[Jaxpr, dict[tuple[RowFacts, ...], list[RowFacts]]] = IdDict()

    def __call__(self, jaxpr: AnyJaxpr, inputs: Sequence[RowFacts]) -> list[RowFacts]:
        opened, _ = compat.open_jaxpr(jaxpr)
        facts, key = self._facts.setdefault(opened, {}), tuple(inputs)
        if key not in facts:
            consts = [SAME] * len(opened.constvars)
            facts[key] = propagate(opened, [*consts, *inputs], self._apply, lambda literal: SAME)
        return facts[key]

    def _apply(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        results = attempt(self._understood, eqn, ins)
        return _unknown(eqn, ins) if results is None else results

    def _understood(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        results = self._follow(eqn, ins)
        for x, v in zip(results, eqn.outvars, strict=True):
            assert all(d < len(shape_of(v)) for d in x.row_dims), eqn.primitive
        return results

    def _follow(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        name = eqn.primitive.name
        if name in RUNS or name == "shard_map":
            return [_named(x, eqn) for x in self(called_jaxpr(eqn), ins)]
        if name in ("scan", "while", "cond"):
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](eqn, ins)
        if name in COLLECTIVES or "axis_name" in eqn.params:
            return self._collective(eqn, ins)
        if name not in row_rules.RULES and (inner := list(compat.contained_jaxprs(eqn))):
            sizes = [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr in inner]
            runs_it = sizes == [(len(ins), len(eqn.outvars))]  # on its operands, it seems
            return self(inner[0], ins) if runs_it else _unknown(eqn, ins)
        if any(x.kind for x in ins):
            results = row_rules.RULES[name](eqn, ins) if name in row_rules.RULES else lost(ins)
        else:
            results = SAME
        every = [results] * len(eqn.outvars) if isinstance(results, RowFacts) else results
        return [_marked(x, ins, differs=bool(eqn.effects) and compat.has_side_effects(eqn)) for x in every]

    def _collective(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        name, named = eqn.primitive.name, eqn.params.get("axes", eqn.params.get("axis_name"))
        names = set(named) if isinstance(named, tuple | list | set | frozenset) else {named}
        equalizes = name in EQUALIZING and eqn.params.get("axis_index_groups") is None
        if equalizes and self.axes <= names:
            return [SAME._replace(reads=any(x.reads for x in ins))] * len(eqn.outvars)
        is_local = names.isdisjoint(self.axes)  # over other axes of the mesh, each part has the same rows
        dims = {x for x in names if isinstance(x, int)}  # that had the axis's name in a `vmap`
        moved = lost(ins)
        if moved.kind and not is_local:
            moved = moved._replace(kind=RowKind.EXCHANGED)
        results = [moved] * len(eqn.outvars)
        if is_local and name in SUMS:
            results = [summed(x, dims) for x in ins]
        elif is_local and name in ("pmax", "pmin"):
            results = [mixed(x, dims, eqn).at(without(dims)) for x in ins]
        return [_marked(x, ins, differs=not (is_local or equalizes)) for x in results]

    def _scan(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        num_consts, num_carry = compat.scan_groups(eqn)
        consts, carry, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        now = -id(eqn)  # the dimension along which passes differ, if they are of different rows
        rows = [x.at(lambda d: d - 1 if d else now) for x in xs]
        carry, outs = _fixed_point(lambda carry: self(eqn.params["jaxpr"], [*consts, *carry, *rows]), carry, eqn)
        ys = [y.at(lambda d: d + 1) for y in outs[num_carry:]]
        return [*carry, *(y._replace(row_dims=y.row_dims - {now} | {0}) if now in y.row_dims else y for y in ys)]

    def _while(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_cond, of_body, carry = ins[:first], ins[first : first + second], ins[first + second :]
        body, _ = compat.open_jaxpr(eqn.params["body_jaxpr"])
        carry, _ = _fixed_point(lambda carry: self(body, [*of_body, *carry]), carry, eqn)
        (goes_on,) = self(eqn.params["cond_jaxpr"], [*of_cond, *carry])
        # A loop over all rows until none needs more, as `vmap` makes it, changes each by itself: no coupling.
        count = lost([goes_on])
        changed = [v is not old for v, old in zip(body.outvars, body.invars[second:], strict=True)]
        return [
            _marked(x if x.kind else count, [x, goes_on]) if is_changed else x
            for x, is_changed in zip(carry, changed, strict=True)
        ]

    def _cond(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        index, *operands = ins
        outs = [_either(x) for x in zip(*(self(branch, operands) for branch in eqn.params["branches"]), strict=True)]
        values = [applied([index, x], eqn) if index.kind else x for x in outs]
        return [_marked(x, [y, index]) for x, y in zip(values, outs, strict=True)]


def _named(x: RowFacts, call: JaxprEqn) -> RowFacts:
    """Names the line of a call where jax knows no line in it."""
    if x.cause is None or x.cause.source:
        return x
    return x._replace(cause=x.cause._replace(source=compat.source_of(call)))


def _either(values: Iterable[RowFacts]) -> RowFacts:
    """Returns the facts of what may be either: results of branches, or of a loop's iterations."""
    values = list(values)
    if values.count(values[0]) == len(values):
        return values[0]
    return _marked(collected(values), values)


def _fixed_point(
    iterate: Callable[[list[RowFacts]], list[RowFacts]], carry: list[RowFacts], eqn: JaxprEqn
) -> tuple[list[RowFacts], list[RowFacts]]:
    """Returns the facts of a loop's carry after any number of iterations, and of the results of one."""
    for _ in range(MOST_ITERATIONS + len(carry)):  # values may move on by one place in each iteration
        outs = iterate(carry)
        after = [_either([x, _of_last_iteration(y, eqn)]) for x, y in zip(carry, outs, strict=False)]
        if after == carry:
            return carry, outs
        carry = after
    carry = [_marked(RowFacts(kind=RowKind.UNKNOWN), carry) for _ in carry]
    return carry, iterate(carry)


def _of_last_iteration(x: RowFacts, eqn: JaxprEqn) -> RowFacts:
    """Returns the facts of a carry that one iteration of a loop hands on to the next."""
    if -id(eqn) not in x.row_dims:
        return x
    return x._replace(kind=max(x.kind, RowKind.LINEAR), row_dims=x.row_dims - {-id(eqn)})  # of different rows: adds up
