"""How the values that several devices write to one variable become one, which every device then holds.

[Note: State that the loss writes]
The state holds one value of each variable, and the loss runs on each device with that device's rows. So a value that
the loss writes is one device's, and needs a rule that makes it one for all. `MERGES` has the rules by the words that a
user says (`merge={"seen": "summed"}`). Without a word, a value that cannot differ between devices (a count of calls)
stays as it is, and floating values are averaged, as batch statistics need it. Whatever else differs is refused before
the first step: the rows of one device are no queue of negatives, and the largest of several histograms is none.

Values are merged after each micro-batch, and the next micro-batch starts from the result. So a step of several
micro-batches writes what as many steps would, and each rule only has to be right for one. Maxima and minima are of the
whole batch: each micro-batch starts from the value before the step, as each device does. So a step adds one entry to a
history of maxima, as delayed scaling keeps it.

A random key is the same on all devices, which must not draw the same numbers. So each device folds its index into the
keys that the loss reads, as into `rng`. A key that the loss writes becomes that of the first device, whose index is the
same for all numbers of devices; the others fold theirs into it next time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jzero.core.arrays.collectives import extreme, from_first, gather_param, gather_rows, own_shard, sum_over
from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.guard import attempt, warn
from jzero.core.config.precision import is_key, widen
from jzero.core.engine.outputs import REAL, average, sum_dtype
from jzero.core.engine.trace import TracedLoss, Written
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.growth import growth
from jzero.core.jaxpr.row_facts import RowFacts
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import batch_axes
from jzero.core.layout.placement import overwrite
from jzero.core.layout.route import Sums
from jzero.core.plan.plan import ZeroPlan


def _add_changes(x: jax.Array, before: Callable[[], jax.Array], sums: Sums) -> jax.Array:
    old = before()
    dtype = sum_dtype(old.dtype)
    old = old.astype(dtype)
    return old + sum_over(x.astype(dtype) - old, sums)


class MergeRule(NamedTuple):
    """How the values that several devices wrote become one.

    Attributes:
      merge: The value of all devices, given that of one, a function that returns the value before, and how they are
        summed.
      takes: The kinds of dtypes that it can merge.
      of_micro_batches: Makes the value of several micro-batches, along dimension 0, that of the batch. Each starts from
        the value before the step then; with `None`, from what the one before wrote.
    """

    merge: Callable[[jax.Array, Callable[[], jax.Array], Sums], jax.Array]
    takes: tuple[DTypeLike, ...]
    of_micro_batches: Callable[[jax.Array], jax.Array] | None = None


MERGES = {
    "mean": MergeRule(lambda x, before, sums: average(x, sums), (jnp.inexact,)),
    "summed": MergeRule(_add_changes, (jnp.number,)),
    "per_example": MergeRule(lambda x, before, sums: gather_rows(x, sums), (np.generic,)),
    "max": MergeRule(lambda x, before, sums: extreme(x, sums, lax.pmax), REAL, lambda x: widen(x).max(0)),
    "min": MergeRule(lambda x, before, sums: extreme(x, sums, lax.pmin), REAL, lambda x: widen(x).min(0)),
    "equal": MergeRule(lambda x, before, sums: from_first(x, sums), (np.generic,)),
}
"""The rules by the words that a user says."""

FOR_TRAINED = ("mean", "equal")
"""Words for trained parameters, which the loss sees in the compute dtype: sums would count its rounding."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """The user's words for the variables that the loss writes.

    Attributes:
      words: A word of `MERGES` by regular expression over the whole name of a variable.
      num_shards: The number of devices with a part of the batch.
      times: How many times as many rows the loss is traced over as one device has.
    """

    words: Mapping[str, str]
    num_shards: int
    times: int = 1

    def word(self, name: str) -> str | None:
        """Returns the word for a variable; `None` if there is none."""
        return next((word for pattern, word in self.words.items() if re.fullmatch(pattern, name)), None)

    def written_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that one device writes to a variable."""
        has_rows = self.word(name) == "per_example" and shape and not shape[0] % self.num_shards
        return (self.times * shape[0] // self.num_shards, *shape[1:]) if has_rows else shape  # [n B, ...] -> [B, ...]


def choose_merges(
    traced: TracedLoss,
    merge: Merge,
    plan: ZeroPlan,
    leaves: Sequence[StateLeaf],
    doubled: Callable[[], TracedLoss],
) -> TracedLoss:
    """Returns a traced loss whose written variables have their layout and their rule.

    Args:
      traced: The loss, with the variables that it writes.
      merge: What the user says.
      plan: The plan of the state.
      leaves: The layout of each parameter and carried leaf.
      doubled: Traces the same loss over twice as many rows.

    Raises:
      ValueError: A written value differs between devices, and no rule covers it; or `merge` names what is not written,
        or a rule that does not fit.
    """
    _check_words(merge, traced.written)
    shapes = traced.out_shape[1][1]
    facts = traced.row_facts[len(traced.row_facts) - len(shapes) :]
    _check_keys(traced, facts, merge)
    counts = _find_counts_of_rows(traced, facts, merge, doubled)
    bad: list[str] = []
    written: list[Written] = []
    for i, (x, shape, fact) in enumerate(zip(traced.written, shapes, facts, strict=True)):
        leaf = leaves[x.source]
        word = merge.word(x.name)
        is_trained = x.source < len(plan.leaves) and plan.leaves[x.source].trained
        why = _why_no_value(word, shape, fact, is_trained=is_trained, counts=i in counts)
        _check_can_be_written(x.name, leaf)
        if why and merge.num_shards > 1:
            bad.append(f"  {x.name}: {shape.dtype}{list(shape.shape)}, {why}")
        if word is None and fact.differs:
            word = "equal" if is_key(shape.dtype) else "mean" if jnp.issubdtype(shape.dtype, jnp.inexact) else None
        written.append(dataclasses.replace(x, leaf=leaf, merge=word))
    if bad:
        axes = batch_axes(plan.config)
        raise ValueError(
            "The loss writes values of one device's rows, and jzero cannot know what the state should hold:\n"
            + "\n".join(bad)
            + "\nSay for each how the devices' values become one, `merge={'name': 'summed'}`: 'summed' adds up what "
            "each device adds to the value before; 'per_example' puts the rows of all devices one after another; "
            "'mean' averages; 'max' and 'min' take the largest or smallest value; 'equal' takes what the first device "
            "wrote. Or make them equal with a collective over ZeRO's axes, such as "
            f"`jax.lax.all_gather(rows, {axes}, tiled=True)` for a queue of rows."
        )
    return dataclasses.replace(traced, written=tuple(written))


def _check_can_be_written(name: str, leaf: StateLeaf) -> None:
    """Raises unless what the loss writes to a leaf can be kept as it is."""
    if leaf.memory != "device":
        raise ValueError(
            f"The loss writes a leaf that lies on the host or on disk (`Offload`): {name!r}. Keep it on the devices, "
            "`rules={path: LeafRule(offload=False)}`."
        )
    if leaf.cut is not None and leaf.cut.blocks is not None:
        raise ValueError(
            f"The loss writes a parameter that is stored in a few bits (`Quantization(frozen=...)`), which would round "
            f"each of its changes: {name!r}. Keep it as it is, `rules={{path: LeafRule(quantize=False)}}`."
        )


def _why_no_value(
    word: str | None, shape: jax.ShapeDtypeStruct, facts: RowFacts, *, is_trained: bool, counts: bool
) -> str | None:
    """Returns why a variable's new value is not one for all devices; `None` if it is, or the user's word covers it."""
    if word is not None:
        takes_dtype = any(jnp.issubdtype(shape.dtype, x) for x in MERGES[word].takes)
        fits = takes_dtype and (word in FOR_TRAINED or not is_trained)
        return None if fits else f"which cannot be {word!r}"
    if counts:
        return "which depends on the number of rows that one device has"
    if not facts.differs:
        return None
    if not (jnp.issubdtype(shape.dtype, jnp.inexact) or is_key(shape.dtype)):
        return "which depends on the rows that one device has"
    if facts.row_dims:
        return f"whose dimension {min(facts.row_dims)} holds rows of one device"
    return "which adds up the rows that one device has" if facts.is_sum else None


def _check_keys(traced: TracedLoss, facts: Sequence[RowFacts], merge: Merge) -> None:
    """Raises if the loss draws from a key of the form before jax had a dtype for keys, and writes the next one."""
    if merge.num_shards == 1:
        return
    for i, (x, shape, fact) in enumerate(zip(traced.written, traced.out_shape[1][1], facts, strict=True)):
        has_form = shape.dtype == jnp.uint32 and shape.shape[-1:] in ((2,), (4,)) and not fact.differs
        if has_form and merge.word(x.name) is None and attempt(_draws, traced, i):
            raise ValueError(
                f"The loss draws from a key in the state that has no key's dtype, {x.name!r}: {shape.dtype}"
                f"{list(shape.shape)}. It is the same on all devices, and so would be the numbers. Keep a typed key, "
                "`jax.random.key(seed)` or `jax.random.wrap_key_data(x)`, into which each device folds its index, or "
                f"pass `rng=` to the step. If it is no key: `merge={{{x.name!r}: 'equal'}}`."
            )


def _draws(traced: TracedLoss, number: int) -> bool:
    """Whether a written variable is made with a key that was integers."""
    jaxpr, _ = compat.open_jaxpr(_part_for(traced, [number]))
    return any(eqn.primitive.name == "random_wrap" for eqn in equations_of(jaxpr))


def _find_counts_of_rows(
    traced: TracedLoss, facts: Sequence[RowFacts], merge: Merge, doubled: Callable[[], TracedLoss]
) -> set[int]:
    """Returns the written variables that have the number of a device's rows in them, as in `seen + len(x)`.

    Python computes with that number, so only a trace over more rows tells, see `jzero.core.jaxpr.growth`. Values that
    are made from rows need no such test, nor do those with a word.
    """
    pairs = enumerate(zip(traced.written, facts, strict=True))
    suspects = [i for i, (x, fact) in pairs if not (merge.word(x.name) or fact.reads)]
    if merge.num_shards == 1 or not suspects:
        return set()
    try:
        other = doubled()
        if other.written != traced.written:
            raise ValueError(f"Its variables are others: it writes {[x.name for x in other.written]}.")
        powers = growth(_part_for(traced, suspects), _part_for(other, suspects))
    except Exception as error:  # the user's code may hold for one number of rows only
        names = [traced.written[i].name for i in suspects]
        warn(
            f"jzero takes these variables that the loss writes for equal on all devices: {names}. It could not see "
            "whether the number of a device's rows is in them, as in `seen + len(x)`, since the loss fails with twice "
            f"the rows: {type(error).__name__}: {error}. If they are equal, say so: `merge={{{names[0]!r}: 'equal'}}`."
        )
        return set()
    return {i for i, power in zip(suspects, powers, strict=True) if power not in (0, -math.inf)}


def _part_for(traced: TracedLoss, numbers: Collection[int]) -> AnyJaxpr:
    """Returns the part of the loss that makes some of the written variables."""
    first = len(compat.open_jaxpr(traced.jaxpr)[0].outvars) - len(traced.written)
    used = [False] * first + [i in numbers for i in range(len(traced.written))]
    return compat.with_outputs(traced.jaxpr, used)


def _check_words(merge: Merge, written: Sequence[Written]) -> None:
    names = [x.name for x in written]
    unused = [pattern for pattern in merge.words if not any(re.fullmatch(pattern, name) for name in names)]
    if unused:
        raise ValueError(f"`merge` names variables that the loss does not write: {unused}. It writes {names}.")


def is_of_whole_batch(written: Written) -> bool:
    """Whether micro-batches do not pass on a variable, which gets its new value after the last one."""
    return written.merge is not None and MERGES[written.merge].of_micro_batches is not None


def merge_stacked(
    x: jax.Array, before: jax.Array, written: Written, sums: Sums, plan: ZeroPlan, num_micro_batches: int
) -> jax.Array:
    """Returns a variable of the whole batch after the loss; the values of several micro-batches are stacked."""
    rule = MERGES[str(written.merge)]
    if num_micro_batches > 1 and rule.of_micro_batches is not None:
        x = rule.of_micro_batches(x).astype(x.dtype)
    return merge_written(x, before, written, sums, plan)


def merge_written(x: jax.Array, before: jax.Array, written: Written, sums: Sums, plan: ZeroPlan) -> jax.Array:
    """Returns a variable after the loss, as the plan stores it.

    Args:
      x: Its value after the loss, on this device and in its natural shape.
      before: Its value before the loss, as this device stores it.
      written: Which variable, with its layout and its rule.
      sums: How values are summed over devices.
      plan: The plan of the state.
    """
    assert written.leaf is not None
    cut = written.leaf.cut_for_collectives

    def whole() -> jax.Array:
        return before if cut is None else gather_param(before, cut, plan.route)

    merged = x if written.merge is None else MERGES[written.merge].merge(x, whole, sums)
    return overwrite(before, merged if cut is None else own_shard(merged, cut, plan.route))
