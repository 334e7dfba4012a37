"""Scans of the joint program: each iteration gathers its parameters.

    scan(walk, eqn, inputs) -> Sequence[Value]

Inputs may be lazy stacks, [L, D/N, F], and results made of parameters alone stay lazy. Forward and backward loops are
treated alike:

    c = scan[jaxpr={ lambda ; a:f32[8,512] w:f32[512,512]. let ... }] x ws        # ws: [L, 512, 512]

runs over the stack of shards, [L, 512/N, 512], and each iteration gathers its own row. It may also gather rows of the
next one, see [Note: Gathering one turn ahead].

[Note: Residuals made of parameters]
A forward loop returns its residuals as stacks: activations, and also values made of its parameters alone, such as a
cast weight. The latter stay lazy: as the stack of shards that they came from, or as `LazyRows`, which a later loop
gathers row by row. If an iteration makes a new shard, the loop stacks the shards: 1/N of the bytes.

    choose_prefetched(gathers, length, limit) -> dict[int, DType]

A turn gathers the next row of these stacks beside its computation, each in its dtype.

[Note: Gathering one turn ahead]
If each turn of a loop over layers gathers its own parameters, only the compiler can overlap gathers and computation,
and compilers do not move a gather into the turn before. So the loop carries whole parameters of this turn, and gathers
those of the next beside the computation. The last turn gathers parameters that nothing uses. It stays in the loop all
the same: compilers would lay out the activations of a separate last turn differently, and copy stacks of them. To limit
the waste, a turn gathers ahead so little that the last turn wastes at most a 32nd of all gathers of the loop. That is
enough: only the first parameters of a turn have nothing to hide behind, and the turn itself hides the gathers of the
others. Without a given bound, programs for GPUs gather a third of a turn's parameters ahead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from jzero.core.base import compat
from jzero.core.base.guard import warn
from jzero.core.base.types import DType, Params, PyTree
from jzero.core.engine.lazy import (
    LazyRows,
    Leaf,
    Operand,
    RowOf,
    ShardedParam,
    SharedLeaves,
    Value,
    has_param,
    is_constant,
    is_cut,
    is_lazy,
    is_looked_up,
    num_bytes,
)
from jzero.core.engine.placed import reduce_p, wait, without_last_hops
from jzero.core.engine.walk import Walk
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.primitives import CALLS, REMAT

Unfinished: TypeAlias = dict[int, jax.Array]
"""Rows of gradients before their last hop, by index of the result."""

IterationOutputs: TypeAlias = tuple[list[list[jax.Array]], dict[int, jax.Array]]
"""The arrays of each result of an iteration, and the gathered rows that it keeps, by stack; or of all, stacked."""

Restore: TypeAlias = Callable[[list[jax.Array]], Value]
"""Makes the result of a loop from its stacked arrays."""


Carry: TypeAlias = list["jax.Array | None"]
"""The carried values of an iteration; `None` for those that the body returns unchanged."""


def scan(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    """Evaluates a scan."""
    loop = _Loop(walk, eqn, inputs)
    end, (ys, kept_rows) = loop.run()
    for j, unsharded in kept_rows.items():
        # [L, D, F]: the backward loop scans the rows that the forward loop gathered.
        walk.held.keep([dataclasses.replace(loop.params[j], wire_dtype=unsharded.dtype, unsharded=unsharded)])
    # Unchanged values never went through the loop, so lazy ones are still lazy.
    last = [x.start if y is None else y for x, y in zip(loop.carried, end, strict=True)]
    return [*last, *(restore(y) for restore, y in zip(loop.restored, ys, strict=True))]


class _Carried(NamedTuple):
    """A carried value.

    Attributes:
      start: Its value before the first iteration.
      is_fixed: Whether the body returns it unchanged, so that it is a constant of the loop.
    """

    start: Value
    is_fixed: bool


class _Loop:
    """A scan and its inputs.

    Attributes:
      consts: The constants of all iterations; parameters that each iteration uses whole are gathered before the loop.
      values: The scanned inputs, each made of some of `stacks`.
      stacks: The distinct arrays and lazy stacks that the loop slices.
      params: The lazy ones among `stacks`, by index.
      last_hops: By index of a stacked result: the hop of its reduction that runs one iteration later.
      restored: For each stacked result, a function that makes it from the stacked arrays. Each trace of `iteration`
        sets it, and so does one that is thrown away (that of `_choose_prefetched`, and jax may trace a body twice).
        Only `scan` reads it, after `run`: then it is of the last trace, the one in the program.
      gathered_rows: What the last traced `iteration` gathered. Only `_choose_prefetched` reads it, after its own trace.
    """

    def __init__(self, walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> None:
        self.walk, self.eqn, self.jaxpr = walk, eqn, eqn.params["jaxpr"]
        body, _ = compat.open_jaxpr(self.jaxpr)
        first, num_carry = compat.scan_groups(eqn)
        end = first + num_carry
        self.num_carry, self.length = num_carry, int(eqn.params["length"])
        self.last_hops: dict[int, Params] = {}
        if walk.pipelines_reductions and self.length > 1:
            self.jaxpr, self.last_hops = without_last_hops(self.jaxpr, num_carry)
        fixed = [v is out for v, out in zip(body.invars[first:end], body.outvars, strict=False)]
        outside = _prepare_inputs(walk, body, inputs[:end], [*[True] * first, *fixed])
        self.consts = outside[:first]
        starts = [x if is_lazy(x) or hasattr(x, "dtype") else jnp.asarray(x) for x in outside[first:]]
        self.carried = [_Carried(x, is_fixed) for x, is_fixed in zip(starts, fixed, strict=True)]
        self.values = [
            x if isinstance(x, LazyRows) else LazyRows((_make_sliceable(walk, x),), (), ((False, 0),), 0)
            for x in inputs[end:]
        ]
        stacks = (stack for x in self.values for stack in x.stacks)
        self.stacks = [
            walk.held.fill(x) if isinstance(x, ShardedParam) else x for x in stacks
        ]  # [L, D/N, F] or [L, ...]
        self.params = {j: x for j, x in enumerate(self.stacks) if isinstance(x, ShardedParam)}
        self.restored: list[Restore] = []

    def iteration(
        self, carry: Carry, rows: list[Leaf], unfinished: Unfinished
    ) -> tuple[Carry, Unfinished, IterationOutputs]:
        """Returns the carry, unfinished rows and outputs of one iteration; finishes those of the one before."""
        finished = self.finish(unfinished)
        inner = self.walk.enter_block(of_loop=True)  # keeps what it gathers to the end of the iteration
        left = iter(rows)
        values = [x.row([next(left) for _ in x.stacks]) for x in self.values]
        carried = [x.start if y is None else y for x, y in zip(self.carried, carry, strict=True)]
        outputs = inner(self.jaxpr, [*self.consts, *carried, *values])
        self.gathered_rows = inner.gathered_rows
        # A carry has the same type in every iteration, so it cannot be lazy; unchanged values leave it.
        new: Carry = [*inner.gather([None if x.is_fixed else y for x, y in zip(self.carried, outputs, strict=False)])]
        kept_rows: dict[int, jax.Array] = {}
        for j, (stack, row) in enumerate(zip(self.stacks, rows, strict=True)):
            unsharded = inner.held.get(row) if is_cut(stack) and stack.stays else None
            kept_rows |= {} if unsharded is None else {j: unsharded}  # [D, F]; the scan stacks them
        ys = outputs[self.num_carry :]
        results = [self._split_result(inner, finished.get(i, y), rows, kept_rows) for i, y in enumerate(ys)]
        self.restored = [restore for _, restore in results]
        new_unfinished = {i: cast("jax.Array", ys[i]) for i in self.last_hops}
        return new, new_unfinished, ([arrays for arrays, _ in results], kept_rows)

    def finish(self, unfinished: Unfinished) -> dict[int, jax.Array]:
        """Returns unfinished rows after their last hop. [D/M, F] -> [D/N, F]."""
        return {i: reduce_p.bind(x, **self.last_hops[i]) for i, x in unfinished.items()}

    def run(self) -> tuple[Carry, IterationOutputs]:
        """Returns the final carry, and the stacked outputs of the iterations."""
        init: Carry = [None if x.is_fixed else cast("jax.Array", x.start) for x in self.carried]
        options = {k: self.eqn.params[k] for k in ("length", "reverse", "unroll")}
        ahead = self._choose_prefetched(init)
        step = -1 if self.eqn.params["reverse"] else 1
        start = jnp.asarray(self.length - 1 if step < 0 else 0, jnp.int32)  # the first iteration's row

        def gather(rows: Mapping[int, ShardedParam]) -> dict[int, jax.Array]:
            # [D/N, F] -> [D, F]
            return {j: dataclasses.replace(x, unsharded=None, wire_dtype=ahead[j]).gather() for j, x in rows.items()}

        def body(state: PyTree, stacks: list[Leaf]) -> tuple[PyTree, IterationOutputs]:
            carry, unfinished, prefetched, index = state  # prefetched: rows of this iteration, number `index`, [D, F]
            next_rows = gather({j: _slice_row(self.params[j], index + step) for j in ahead})  # the last are unused
            carry, unfinished, (arrays, kept_rows) = self.iteration(carry, self._rows(stacks, prefetched), unfinished)
            outputs = arrays, self._after(kept_rows, [*carry, *next_rows.values()])
            return (carry, unfinished, next_rows, index + step if ahead else None), outputs

        state: PyTree = init, self._none_unfinished(), {}, None
        if ahead:
            rows = {j: _slice_row(self.params[j], start) for j in ahead}  # of the first iteration, [D/N, F]
            state = *state[:2], gather(self.walk.order.order_first_rows(self.stacks, rows, init)), start
        (end, unfinished, *_), (ys, kept_rows) = lax.scan(body, state, self.stacks, **options)
        for i, row in self.finish(unfinished).items():  # the last iteration's; each returned the row before its own
            (stack,) = ys[i]
            parts = [row[None], stack[:-1]] if step < 0 else [stack[1:], row[None]]
            ys[i] = [jnp.concatenate(parts)]
        return end, (ys, kept_rows)

    def _after(self, kept_rows: dict[int, jax.Array], others: Sequence[jax.Array | None]) -> dict[int, jax.Array]:
        """Returns the gathered rows that stay, not written to their stacks before the iteration is done.

        Otherwise the compiler for GPUs writes a row as early as it can, and so gathers it beside no computation.
        """
        if self.walk.order.ahead == 0:
            return kept_rows
        behind, _ = wait([*kept_rows.values()], [x for x in others if isinstance(x, jax.Array)], "barrier")
        return dict(zip(kept_rows, behind, strict=True))

    def _none_unfinished(self) -> Unfinished:
        """Returns what the first iteration finishes: zeros."""
        results = compat.open_jaxpr(self.jaxpr)[0].outvars[self.num_carry :]
        types = {i: compat.type_of(results[i]) for i in self.last_hops}
        return {i: jnp.zeros(x.shape, x.dtype) for i, x in types.items()}  # [D/M, F]

    def _rows(self, stacks: Sequence[Leaf], prefetched: Mapping[int, jax.Array]) -> list[Leaf]:
        """Returns one row of each stack, with the rows that were gathered in the iteration before."""
        # A stack may be scanned twice, but is gathered ahead once.
        at_hand = IdDict((self.params[j].shard, x) for j, x in prefetched.items())

        def row(j: int, x: Leaf) -> Leaf:
            if not isinstance(x, ShardedParam):
                return x
            array = at_hand.get(self.params[j].shard, x.unsharded)
            return dataclasses.replace(x.drop_leading(), unsharded=array, row_of=RowOf(self.walk.depth + 1, j))

        return [row(j, x) for j, x in enumerate(stacks)]

    def _choose_prefetched(self, init: Carry) -> dict[int, DType]:
        """Returns the stacks to gather one iteration ahead, with the dtype of each gather."""
        limit = self.walk.order.ahead
        if limit == 0 or self.length < 2 or not any(map(is_cut, self.stacks)):
            return {}
        # A first trace shows what an iteration gathers.
        jax.eval_shape(
            lambda init, stacks: self.iteration(init, self._rows(_slice_rows(stacks, 0), {}), {})[2], init, self.stacks
        )
        first: IdDict[jax.Array, tuple[int, DType]] = IdDict()  # by shard; an iteration may gather a row more than once
        for row_of, dtype in self.gathered_rows:
            if row_of.depth == self.walk.depth + 1:  # not a row of a loop further out
                first.setdefault(self.params[row_of.stack].shard, (row_of.stack, dtype))
        return choose_prefetched({j: (self.params[j], dtype) for j, dtype in first.values()}, self.length, limit)

    def _split_result(
        self, inner: Walk, x: Value, rows: list[Leaf], kept_rows: Mapping[int, jax.Array]
    ) -> tuple[list[jax.Array], Restore]:
        """Returns an iteration's arrays for one result, and a function that makes the result from the stacks of all.

        See [Note: Residuals made of parameters].
        """
        number = IdDict((row.shard, j) for j, row in enumerate(rows) if isinstance(row, ShardedParam))
        of_result = SharedLeaves.of([x])
        unsharded = {j for j in number.values() if j in kept_rows or not is_cut(self.stacks[j])}
        is_unsharded = all(
            isinstance(y, ShardedParam) and y.shard in number and number[y.shard] in unsharded for y in of_result.leaves
        )
        # A value made of a parameter that stays is stacked whole, unless the parameter's whole rows are.
        stays = any(isinstance(y, ShardedParam) and y.stays for y in of_result.leaves)
        if not is_lazy(x) or (stays and not is_unsharded):
            return [jnp.asarray(inner.gather([x])[0])], lambda ys: ys[0]
        closed = IdDict((y, None) for y in jax.tree.leaves(self.consts))  # the same in all iterations, so not stacked
        arrays: list[jax.Array] = []
        parts: list[Callable[[list[jax.Array]], Leaf]] = []
        places: list[tuple[bool, int]] = []
        shared: list[Value] = []
        for leaf in of_result.leaves:
            array = leaf.shard if isinstance(leaf, ShardedParam) else leaf  # a shard is [D/N, F]
            if not isinstance(array, jax.core.Tracer) or array in closed:
                places.append((True, len(shared)))
                shared.append(leaf)
                continue
            places.append((False, len(parts)))
            if isinstance(leaf, ShardedParam) and array in number:
                parts.append(_restore_scanned(leaf, self.params[number[array]]))  # the stack that came in: no copy
            else:
                parts.append(_restore_stacked(leaf, len(arrays)))  # made in the iteration, stacked by the scan
                arrays.append(array)
        (expression,) = of_result.expressions

        def restore(ys: list[jax.Array]) -> Value:
            stacks = tuple(part(ys) for part in parts)
            is_one = isinstance(expression, int) and not shared and isinstance(stacks[0], ShardedParam)
            return stacks[0] if is_one else LazyRows(stacks, tuple(shared), tuple(places), expression)

        return arrays, restore


def _restore_scanned(row: ShardedParam, stack: ShardedParam) -> Callable[[list[jax.Array]], ShardedParam]:
    """Returns a function that makes a result from the stack that the loop scanned."""
    wire_dtype, dtype = row.wire_dtype, row.dtype
    return lambda ys: dataclasses.replace(stack, unsharded=None, row_of=None, wire_dtype=wire_dtype, dtype=dtype)


def _restore_stacked(row: Value, index: int) -> Callable[[list[jax.Array]], Leaf]:
    """Returns a function that makes a result from the stacked arrays, or shards, of the iterations."""
    if not isinstance(row, ShardedParam):
        return lambda ys: ys[index]
    layout = jax.tree.structure(dataclasses.replace(row, row_of=None, unsharded=None))  # no tracer may leave the scan

    def restore(ys: list[jax.Array]) -> ShardedParam:
        stack: ShardedParam = layout.unflatten([ys[index]])
        return dataclasses.replace(stack, cut=stack.cut.add_leading(len(ys[index])))  # [L, D/N, F]

    return restore


def _prepare_inputs(walk: Walk, body: Jaxpr, inputs: list[Value], fixed: list[bool]) -> list[Value]:
    """Returns a loop's constants and initial carry; gathers parameters, except those that the iterations only index."""
    lazily = [
        is_lazy(x) and ((same and (is_constant(x) or is_looked_up(x))) or _is_only_indexed(body, v))
        for x, v, same in zip(inputs, body.invars, fixed, strict=False)
    ]
    arrays = walk.gather([None if lazy else x for x, lazy in zip(inputs, lazily, strict=True)])
    return [x if lazy else y for x, y, lazy in zip(inputs, arrays, lazily, strict=True)]


def _make_sliceable(walk: Walk, x: Operand) -> Leaf:
    """Returns an array, or a stack whose shards can be sliced; gathers other stacks whole, with a warning."""
    # [L, D/N, F] has rows [D/N, F]. If cut over its rows, [L/N, D, F], an iteration's row is on one device alone.
    if not is_lazy(x) or (isinstance(x, ShardedParam) and x.cut.dim > 0):
        return x
    if has_param(x) and x.shape not in walk.warned:  # warns once for the loop and its backward loop
        walk.warned.add(x.shape)
        why = "is cut on dimension 0" if isinstance(x, ShardedParam) else "is computed from parameters as a whole"
        warn(
            f"A stack of shape {x.shape} {why}, and a scan in the loss runs over it: every device gathers the whole "
            "stack before the loop. Compute on single layers inside the loop, and say which dimension is scanned: "
            '`ZeroConfig(rules={"path/of/the/stack/.*": LeafRule(scan_dim=0)})`.'
        )
    return walk.gather([x])[0]  # [L, D, F], whole


def _slice_row(stack: ShardedParam, index: ArrayLike) -> ShardedParam:
    """Returns one row of a lazy stack."""
    (row,) = _slice_rows([stack], index)
    assert isinstance(row, ShardedParam)
    return row.drop_leading()  # [L, D/N, F] -> [D/N, F]


def _slice_rows(stacks: list[Leaf], index: ArrayLike) -> list[Leaf]:
    """Returns the arrays of one row of each stack, as a scan would slice them."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacks)  # `unsharded`, too


def _is_only_indexed(jaxpr: Jaxpr, var: Var) -> bool:
    """Whether a loop's body reads constant `var` one slice at a time."""
    uses = [eqn for eqn in jaxpr.eqns if any(v is var for v in eqn.invars)]
    return bool(uses) and all(_indexes(eqn, var) for eqn in uses) and var not in jaxpr.outvars


def _indexes(eqn: JaxprEqn, var: Var) -> bool:
    """Whether an equation reads only slices of `var`."""
    if eqn.primitive.name not in REMAT | CALLS:
        return eqn.primitive.name == "dynamic_slice"  # `w[i]`, and `i` is traced
    body = next(compat.contained_jaxprs(eqn))
    return all(_is_only_indexed(body, v) for x, v in zip(eqn.invars, body.invars, strict=True) if x is var)


MOST_IN_VAIN = 1 / 32
"""Upper bound on the wasted gathers of the last turn, as a share of all gathers of the loop."""


def choose_prefetched(
    gathers: Mapping[int, tuple[ShardedParam, DType]], length: int, limit: int | None
) -> dict[int, DType]:
    """Returns the stacks to gather one turn ahead, by number, with the dtype of each gather.

    The stacks that a turn uses first come first: they have the least computation to hide behind.

    Args:
      gathers: Those of a turn, in their order: by number, the stack and the dtype of the gather.
      length: The number of turns.
      limit: Most bytes to gather ahead, counted in whole parameters and the dtypes of their gathers; `None`: a third
        of a turn's gathers, or its first parameter if that is larger.
    """
    # Counted in the dtype that travels, which may be narrower than the stack's.
    sizes = {
        j: num_bytes([dataclasses.replace(stack, cut=stack.cut.drop_leading(), wire_dtype=dtype)])  # [D, F], whole
        for j, (stack, dtype) in gathers.items()
    }
    total = sum(sizes.values())  # bytes of one turn's gathers
    bound = max([total // 3, *list(sizes.values())[:1]]) if limit is None else limit
    spare = min(bound, int(total * length * MOST_IN_VAIN))  # the last turn gathers in vain
    chosen = {}
    for j, size in sizes.items():
        if size <= spare:  # a later, smaller one may still fit
            spare -= size
            chosen[j] = gathers[j][1]
    # A bound that the user did not give needs no warning; 0 asks for no gather ahead.
    if limit and sizes and not chosen:
        _warn_of_no_effect([*sizes.values()], limit, length)
    return chosen


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
    warn(f"`prefetch_bytes={limit}` has no effect on a scan in the loss: {why}.")
