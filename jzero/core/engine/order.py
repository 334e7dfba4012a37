"""The order of gathers: delays them until other values exist.

    Order.order_use(leaves) -> list[Value]

An `Order` knows what the walk has gathered and computed so far, and returns values that wait. The joint program gathers
a parameter twice, forward and backward, and a compiler would merge the two gathers and keep the result:

    a = all_gather(w)   b = dot(x, a)   ...   c = all_gather(w)   d = dot(g, c)

So the second gather waits for the other operands of its use: `w, g = zero_wait[how=barrier] w g`, see
[Note: Barriers and selects].

[Note: Waiting rules]
* A parameter that is gathered again waits for the arrays that it is used with.
* Gathers of a backward loop before its first turn wait for the initial carry. Otherwise they may run beside the head,
  whose own collectives then have nothing to hide behind (a scanned GPT with a tied head on 8 H200 exposed 43 % of its
  communication, not 26).
* With `prefetch_bytes`, a gather waits until enough earlier uses are done, so that gathered but unused parameters stay
  within the bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import jax

from jzero.core.config.zero import may_prefetch
from jzero.core.engine.lazy import Leaf, ShardedParam, Value, is_cut, num_bytes
from jzero.core.engine.placed import can_be_awaited, wait
from jzero.core.jaxpr.identity import IdDict
from jzero.core.layout.platform import Wait, platform_facts
from jzero.core.plan.plan import ZeroPlan


@dataclasses.dataclass
class Order:
    """The events so far in a sequence of equations, and the rules for values that wait for them.

    Attributes:
      second_gather: How a second gather waits, see `PlatformFacts`; `None`: it need not wait.
      limit: Most bytes to gather ahead of their use; `None`: the compiler decides.
      ahead: Most bytes that a loop gathers one turn ahead; `None`: a share of a turn, see `choose_prefetched`.
    """

    second_gather: Wait | None = None
    limit: int | None = None
    ahead: int | None = 0
    _gathered: IdDict[jax.Array, None] = dataclasses.field(default_factory=IdDict)
    _is_backward: bool = False
    _turned_at: int = 0  # number of uses before the backward pass
    _uses: list[tuple[int, list[jax.Array]]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, plan: ZeroPlan, *, differentiates: bool) -> Order:
        """Returns the order of a program on the plan's platform."""
        config, platform = plan.config, platform_facts(plan.mesh)
        ahead = config.prefetch_bytes
        if ahead is None and not (platform.prefetches and may_prefetch(config)):
            ahead = 0
        second_gather = platform.second_gather if differentiates and plan.regathers else None
        limit = config.prefetch_bytes if plan.regathers else None
        return cls(second_gather, limit, ahead)

    def enter_block(self) -> Order:
        """Returns the order of a loop body or a recomputed block: a separate program, which gathers only once."""
        return Order(ahead=self.ahead)

    def enter_call(self, gathered: Iterable[Value]) -> Order:
        """Returns the order of a called function, given those of its inputs that were gathered before."""
        order = Order(self.second_gather, None, self.ahead)
        order.note_gathered(gathered)
        return order

    # Events.

    def enter_pass(self, *, is_backward: bool) -> bool:
        """Records the pass of the next equation; returns whether the backward pass begins with it."""
        if self._is_backward or not is_backward:
            return False
        self._is_backward, self._turned_at = True, len(self._uses)
        return True

    def note_gathered(self, params: Iterable[Value]) -> None:
        """Records that parameters are gathered."""
        self._gathered.update((x.shard, None) for x in params if isinstance(x, ShardedParam))

    def was_gathered(self, x: object) -> TypeGuard[ShardedParam]:
        """Whether a parameter has been gathered before."""
        return isinstance(x, ShardedParam) and x.shard in self._gathered

    def note_used(self, results: Sequence[object]) -> None:
        """Records a result computed from the parameters that were gathered last."""
        if self._uses and not self._uses[-1][1]:
            self._uses[-1][1].extend([x for x in results if _is_number(x)][:1])

    # Values that wait for them.

    def order_use(self, leaves: list[Value]) -> list[Value]:
        """Returns arrays and lazy parameters that one equation uses, with the parameters waiting as needed.

        A parameter that was gathered before waits for the arrays. With a limit, all parameters wait for earlier uses.
        """
        leaves, again, waits = self._begin_use(leaves)
        how = self.second_gather
        if how is None or waits:
            return leaves
        arrays = {i: x for i, x in enumerate(leaves) if _is_activation(x)}
        if how == "light" and num_bytes(arrays.values()) <= num_bytes(again.values()):
            how = "barrier"
        delayed, behind = _delay(again, [*arrays.values()], how)
        return _replace(leaves, {**delayed, **dict(zip(arrays, behind, strict=True))})

    def order_block(self, operands: list[Value]) -> tuple[list[Value], bool]:
        """Returns the operands of a recomputed block, and whether its parameters may be gathered before it begins."""
        operands, again, may_be_ahead = self._begin_use(operands)
        if self.second_gather == "select" and not may_be_ahead:  # else the block's own barrier keeps them apart
            cotangent = [x for x in operands if _is_activation(x)][-1:]  # jax puts it last
            operands = _replace(operands, _delay(again, cotangent)[0])
        return operands, may_be_ahead

    def order_first_rows(
        self, stacks: Sequence[Leaf], rows: dict[int, ShardedParam], carry: Sequence[object]
    ) -> dict[int, ShardedParam]:
        """Returns the rows of stacks that are gathered before the first turn of a loop.

        If a stack was gathered before, its row waits for the initial carry.
        """
        again = {i: x for i, x in rows.items() if self.was_gathered(stacks[i])}
        self.note_gathered(_find_cut(stacks).values())
        return {**rows, **_delay(again, [x for x in carry if _is_number(x)])[0]}

    def _begin_use(self, leaves: list[Value]) -> tuple[list[Value], dict[int, ShardedParam], bool]:
        """Records a use; with a limit, its gathers wait until enough earlier uses are done.

        Returns:
          The values, those that are gathered again, and whether they wait and may be gathered ahead: more bytes than
          the limit may not.
        """
        cut = _find_cut(leaves)
        again = [i for i, x in cut.items() if self.was_gathered(x)]
        self.note_gathered(cut.values())
        if self.limit is None or not cut:
            return leaves, {i: cut[i] for i in again}, False
        ahead = size = num_bytes(cut.values())
        waits_for: list[jax.Array] = []
        for i, (earlier, results) in reversed(list(enumerate(self._uses, 1))):
            ahead += earlier
            if ahead > self.limit or i == self._turned_at:  # the backward pass waits for the end of the forward pass
                waits_for = results
                break
        self._uses.append((size, []))
        delayed, _ = _delay(cut, waits_for)
        return _replace(leaves, delayed), {i: delayed[i] for i in again}, bool(waits_for) and size <= self.limit


def _delay(
    params: Mapping[int, ShardedParam], others: Sequence[jax.Array], how: Wait = "select"
) -> tuple[dict[int, ShardedParam], list[jax.Array]]:
    """Returns lazy parameters that are not gathered before others exist, and those others, behind the same barrier."""
    shards, behind = wait([x.shard for x in params.values()], others, how)
    pairs = zip(params.items(), shards, strict=True)
    return {i: dataclasses.replace(x, shard=shard) for (i, x), shard in pairs}, behind


def _find_cut(leaves: Sequence[Value]) -> dict[int, ShardedParam]:
    return {i: x for i, x in enumerate(leaves) if is_cut(x)}


def _is_number(x: object) -> TypeGuard[jax.Array]:
    return isinstance(x, jax.Array) and can_be_awaited(jax.typeof(x))


def _is_activation(x: object) -> TypeGuard[jax.Array]:
    return _is_number(x) and x.ndim > 0


def _replace(values: list[Value], new: Mapping[int, Value]) -> list[Value]:
    return [new.get(i, x) for i, x in enumerate(values)]
