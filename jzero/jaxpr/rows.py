"""How the values of a program depend on the rows of a batch that is split over devices.

In: the jaxpr of a function of one device's rows, and which of its inputs are leaves of the batch. Out: for each output,
whether devices may have different values, which dimensions have one element per row, and whether it is a mean or a
sum over rows, or couples rows:

    lambda w, x: x @ w                    differs, rows along dimension 0
    lambda w, x: (x @ w).mean()           differs, a mean over rows
    lambda w, x: pmean((x @ w), "data")   the same on all devices
    lambda w, x: jnp.log((x @ w).mean())  differs, couples rows

One pass over the equations (`row_rules`, `row_moves`) follows each value (`row_values`, `row_layouts`). It reports what
it does not know as `Kind.UNKNOWN`; `differs` is true unless it is known to be false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jzero import _compat
from jzero._compat import AnyJaxpr
from jzero.jaxpr.identity import IdDict
from jzero.jaxpr.interpret import propagate
from jzero.jaxpr.primitives import RUNS, Trait, called_jaxpr, primitives_with
from jzero.jaxpr.row_layouts import scattered
from jzero.jaxpr.row_moves import element, of_last_pass, stacked
from jzero.jaxpr.row_rules import RULES, lost, number_of
from jzero.jaxpr.row_values import BATCH, SAME, Cause, Kind, Value, applied, joined, unknown_origin

SUMS = frozenset({"psum", "psum2", "psum_invariant"})
EQUALIZING = SUMS | {"pmax", "pmin", "all_gather", "all_gather_invariant"}
COLLECTIVES = EQUALIZING | {"reduce_scatter", "ppermute", "pgather", "all_to_all", "ragged_all_to_all"}
KEEPS_NUMBER = primitives_with(Trait.LAYOUT) | {"convert_element_type", "copy", "copy_p", "stop_gradient", "pvary"}
MOST_PASSES = 8


class RowFacts(NamedTuple):
    """How one value depends on the rows of the batch.

    Attributes:
      differs: Whether devices may have different values.
      value: Everything else.
    """

    differs: bool
    value: Value

    @property
    def kind(self) -> Kind:
        """How it depends on rows."""
        return self.value.kind

    @property
    def row_dims(self) -> frozenset[int]:
        """The dimensions along which elements belong to different rows."""
        return frozenset(dim for dim, _ in self.value.layout)

    @property
    def is_linear(self) -> bool:
        """Whether it is a sum or mean over rows, without row dimensions."""
        return self.kind is Kind.LINEAR and not self.value.layout

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over rows that is not divided by their number."""
        return self.is_linear and not self.value.scale.is_mean

    @property
    def coupled(self) -> Cause | None:
        """The equation that combined rows in a way that is not linear."""
        return self.value.cause if self.kind is Kind.COUPLED else None


def row_facts(jaxpr: AnyJaxpr, *, batch: Sequence[bool], keys: Sequence[bool], axes: Iterable[str]) -> list[RowFacts]:
    """Returns the facts of each output of a jaxpr.

    Args:
      jaxpr: An open or closed jaxpr of one device's part of the batch.
      batch: For each input, whether it is a leaf of the batch: `[rows, ...]`, or a scalar that all devices share.
      keys: For each input, whether it is a random key that differs between devices.
      axes: The axes of the mesh over which the batch is split. A value reduced or gathered over all of them is the same
        on all devices and no longer depends on rows.

    Example:
      >>> from jzero.jaxpr.rows import row_facts
      >>> jaxpr = jax.make_jaxpr(lambda w, x: (x @ w, (x @ w).mean()))(jnp.ones(5), jnp.ones((4, 5)))
      >>> rowwise, mean = row_facts(jaxpr, batch=[False, True], keys=[False, False], axes={"data"})
      >>> sorted(rowwise.row_dims), mean.is_sum, mean.differs
      ([0], False, True)
    """
    opened, _ = _compat.open_jaxpr(jaxpr)
    inputs = []
    for v, has_rows, is_key in zip(opened.invars, batch, keys, strict=True):
        if has_rows and _compat.type_of(v).ndim:
            inputs.append(RowFacts(True, Value(Kind.ROW, ((0, ((_compat.type_of(v).shape[0], 1),)),), BATCH)))
        else:
            inputs.append(RowFacts(is_key, SAME))
    return _Interpreter(frozenset(axes))(jaxpr, inputs)


EQUAL = RowFacts(False, SAME)


class _Interpreter:
    """Interprets jaxprs; each once for the same facts of its inputs."""

    def __init__(self, axes: frozenset[str]) -> None:
        self.axes = axes
        self._facts: IdDict[Jaxpr, dict[tuple[RowFacts, ...], list[RowFacts]]] = IdDict()

    def __call__(self, jaxpr: AnyJaxpr, inputs: Sequence[RowFacts]) -> list[RowFacts]:
        opened, _ = _compat.open_jaxpr(jaxpr)
        facts, key = self._facts.setdefault(opened, {}), tuple(inputs)
        if key not in facts:
            facts[key] = propagate(opened, [*[EQUAL] * len(opened.constvars), *inputs], self._results, _literal)
        return facts[key]

    def _results(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        name = eqn.primitive.name
        if name in RUNS:
            return _from_call(eqn, ins, self(called_jaxpr(eqn), ins))
        if name in _CONTAINERS:
            return _CONTAINERS[name](self, eqn, ins)
        if name == "axis_index":
            return [RowFacts(not self.axes.isdisjoint(_named_axes(eqn)), SAME)]
        if name in COLLECTIVES or "axis_name" in eqn.params:
            return self._collective(eqn, ins)
        rule = RULES.get(name)
        if rule is None and (inner := list(_compat.contained_jaxprs(eqn))):
            return self._contained(eqn, ins, inner)
        differs = any(x.differs for x in ins) or (bool(eqn.effects) and _compat.has_side_effects(eqn))
        values = [x.value for x in ins]
        if not any(x.kind for x in values):
            return [RowFacts(differs, _without_rows(eqn, values))] * len(eqn.outvars)
        results = [lost(values)] * len(eqn.outvars) if rule is None else rule(eqn, values)
        return [RowFacts(differs, x) for x in (results if isinstance(results, list) else [results])]

    def _contained(self, eqn: JaxprEqn, ins: list[RowFacts], inner: list[Jaxpr]) -> list[RowFacts]:
        """Interprets an equation that seems to run its one jaxpr on its operands."""
        jaxpr = inner[0]
        if len(inner) == 1 and len(jaxpr.invars) == len(ins) and len(jaxpr.outvars) == len(eqn.outvars):
            return self(jaxpr, ins)
        differs = any(x.differs for x in ins) or _compat.has_side_effects(eqn)
        values = [x.value for x in ins if x.value.kind]
        return [RowFacts(differs, lost(values) if values else SAME)] * len(eqn.outvars)

    def _collective(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        names, is_ungrouped = _named_axes(eqn), eqn.params.get("axis_index_groups") is None
        equalizes = eqn.primitive.name in EQUALIZING and is_ungrouped
        if equalizes and self.axes <= names:
            return [EQUAL] * len(eqn.outvars)
        is_local = names.isdisjoint(self.axes)  # over other axes of the mesh, each part has the same rows
        differs = any(x.differs for x in ins) or not (is_local or equalizes)
        values = [x.value for x in ins]
        if not any(x.kind for x in values):
            return [RowFacts(differs, SAME)] * len(eqn.outvars)
        if is_local and eqn.primitive.name in SUMS:
            return [RowFacts(differs, x) for x in values]
        if is_local and eqn.primitive.name in ("pmax", "pmin"):
            return [RowFacts(differs, applied([x], eqn)) for x in values]
        return [RowFacts(differs, lost(values))] * len(eqn.outvars)

    def _scan(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        num_consts, num_carry = _compat.scan_groups(eqn)
        consts, carry, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        elements = [RowFacts(x.differs, element(x.value, eqn)) for x in xs]

        def turn(carry: list[RowFacts]) -> list[RowFacts]:
            return self(eqn.params["jaxpr"], [*consts, *carry, *elements])

        carry, outs = _settled(turn, carry, eqn)
        return [
            *carry,
            *(
                RowFacts(y.differs, stacked(y.value, eqn, _compat.type_of(v).shape))
                for y, v in zip(outs[num_carry:], eqn.outvars[num_carry:], strict=True)
            ),
        ]

    def _while(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_cond, of_body, carry = ins[:first], ins[first : first + second], ins[first + second :]
        body, _ = _compat.open_jaxpr(eqn.params["body_jaxpr"])

        def turn(carry: list[RowFacts]) -> list[RowFacts]:
            (goes_on,) = self(eqn.params["cond_jaxpr"], [*of_cond, *carry])
            outs = self(body, [*of_body, *carry])
            unchanged = [v is body.invars[second + i] for i, v in enumerate(body.outvars)]
            # A loop over all rows until none needs more, as `vmap` makes it, changes each by itself: no coupling.
            counts = goes_on.kind is not Kind.SAME
            return [
                x if same else RowFacts(x.differs or goes_on.differs, _UNKNOWN if counts and not x.kind else x.value)
                for x, same in zip(outs, unchanged, strict=True)
            ]

        return _settled(turn, carry, eqn)[0]

    def _cond(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        index, operands = ins[0], ins[1:]
        first, *others = [self(branch, operands) for branch in eqn.params["branches"]]
        for branch in others:
            first = [_joined(x, y, eqn, i) for i, (x, y) in enumerate(zip(first, branch, strict=True))]
        if not index.kind:
            return [RowFacts(x.differs or index.differs, x.value) for x in first]
        return [RowFacts(True, applied([index.value, x.value], eqn)) for x in first]

    def _shard_map(self, eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
        jaxpr, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        outs = self(jaxpr, [_fitted(x, _compat.type_of(v).shape, eqn) for x, v in zip(ins, jaxpr.invars, strict=True)])
        return [_fitted(x, _compat.type_of(v).shape, eqn) for x, v in zip(outs, eqn.outvars, strict=True)]


_UNKNOWN = Value(Kind.UNKNOWN)
_CONTAINERS: dict[str, Callable[[_Interpreter, JaxprEqn, list[RowFacts]], list[RowFacts]]] = {
    "scan": _Interpreter._scan,
    "while": _Interpreter._while,
    "cond": _Interpreter._cond,
    "shard_map": _Interpreter._shard_map,
}


def _named_axes(eqn: JaxprEqn) -> set[str]:
    """Returns the axes of the mesh that a collective names."""
    named = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return set(named) if isinstance(named, tuple | list | set | frozenset) else {named}


def _literal(atom: Literal) -> RowFacts:
    value = atom.val
    is_number = isinstance(value, bool | int | float) or getattr(getattr(value, "dtype", None), "kind", "V") in "biuf"
    return RowFacts(False, Value(Kind.SAME, number=float(value) if is_number else "unknown"))


def _without_rows(eqn: JaxprEqn, values: list[Value]) -> Value:
    """Returns the value of an operation whose operands do not depend on rows."""
    numbers = [number_of(x, atom) for x, atom in zip(values, eqn.invars, strict=True)]
    if len(eqn.outvars) != 1 or None in numbers or not numbers:
        return SAME
    if eqn.primitive.name in KEEPS_NUMBER and len(numbers) == 1:
        return Value(Kind.SAME, number=numbers[0])
    return Value(Kind.SAME, number="unknown") if eqn.primitive.name in _ELEMENTWISE else SAME


_ELEMENTWISE = primitives_with(Trait.ELEMENTWISE)


def _from_call(eqn: JaxprEqn, ins: list[RowFacts], outs: list[RowFacts]) -> list[RowFacts]:
    """Names the line of the call where jax knows no line in it."""
    if not any(x.value.cause for x in outs):
        return outs
    causes = {x.value.cause for x in ins}
    return [
        x
        if (cause := x.value.cause) is None or cause in causes or cause.source
        else RowFacts(x.differs, x.value._replace(cause=Cause(cause.eqn, cause.how, eqn)))
        for x in outs
    ]


def _joined(x: RowFacts, y: RowFacts, eqn: JaxprEqn, number: int) -> RowFacts:
    return RowFacts(x.differs or y.differs, joined(x.value, y.value, eqn, number))


def _settled(
    turn: Callable[[list[RowFacts]], list[RowFacts]], carry: list[RowFacts], eqn: JaxprEqn
) -> tuple[list[RowFacts], list[RowFacts]]:
    """Returns the facts of a loop's carry after any number of passes, and of the results of a pass."""
    for _ in range(MOST_PASSES + len(carry)):  # values may move on by one place in each pass
        outs = turn(carry)
        after = [
            _joined(x, RowFacts(y.differs, of_last_pass(y.value, eqn)), eqn, i)
            for i, (x, y) in enumerate(zip(carry, outs, strict=False))
        ]
        if after == carry:
            return carry, outs
        carry = after
    carry = [RowFacts(True, _UNKNOWN) for _ in carry]
    return carry, turn(carry)


def _fitted(x: RowFacts, shape: Sequence[int], eqn: JaxprEqn) -> RowFacts:
    """Returns the facts of an array that a `shard_map` may have cut or joined."""
    sizes = {dim: math.prod(size for size, _ in factors) for dim, factors in x.value.layout}
    if all(dim < len(shape) and shape[dim] == size for dim, size in sizes.items()):
        return x
    return RowFacts(x.differs, x.value.at(scattered(x.value.layout, shape), unknown_origin(eqn)))
