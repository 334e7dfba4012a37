"""What devices exchange in one step for parameters and gradients, according to a plan."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp

from jzero.core.base.types import DType
from jzero.core.config.precision import cast_dtype
from jzero.core.config.zero import LeafRule, ZeroConfig
from jzero.core.jaxpr.lookups import TableReads
from jzero.core.jaxpr.sizes import itemsize
from jzero.core.layout.blocks import LEAST
from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.lookups import hop_of_rows, row_collectives
from jzero.core.layout.mesh import AnyMesh, axes_within_nodes
from jzero.core.layout.route import Collective, Leg, Route, route_of
from jzero.core.plan.table import format_bytes

Q = TypeVar("Q", bound=str)
Lookups: TypeAlias = Literal["none", "some", "all"]
"""Which reads of a parameter look up rows in its shards, see `Traffic.choose_lookups`."""


class GatherPlan(NamedTuple):
    """How one stored parameter reaches the loss.

    Attributes:
      leaf: The parameter as stored.
      route: How its shards travel.
      kind: In which blocks they travel, `int8`, or "none".
      is_secondary: Whether it is gathered between nodes once per step, before all uses.
      stays: Whether it stays whole from its first to its last use, in both passes.
      lookups: Which of its reads look up rows in its shards.
    """

    leaf: StateLeaf
    route: Route
    kind: str = "none"
    is_secondary: bool = False
    stays: bool = False
    lookups: Lookups = "none"

    def cut_sent(self, cut: Cut, dtype: DType) -> Cut:
        """Returns its cut as it travels in a dtype."""
        as_stored = self.kind == "none" or cut.blocks is not None
        return cut if as_stored else cut.in_blocks(self.kind, dtype, self.leaf.mesh.shape)

    def legs(self, cut: Cut) -> tuple[Leg, ...]:
        """Returns how it travels for each use and, if it is secondary, once per step before."""
        return self.route.legs(cut) if self.is_secondary else ((cut, self.route),)

    def rows(self, read: TableReads | None, dtype: DType, *, reduces: bool = False) -> tuple[Collective, ...] | None:
        """Returns the collectives of all lookups in one pass; `None` if they do not run on shards."""
        cut = self.leaf.cut_for_collectives
        if cut is None or read is None or not read.num_rows or self.leaf.in_records:
            return None
        cut, route = self.legs(self.cut_sent(cut, dtype))[0]
        dims = range(len(cut.shape) - read.ndim, len(cut.shape))  # of a stack of tables, those of one
        table = cut.for_shape([cut.shape[d] for d in dims], dims) if cut.dim in dims else None
        if table is None or hop_of_rows(table, route, reduces=reduces) is None:
            return None
        return row_collectives(table, route, read.num_rows, dtype, reduces=reduces)

    def collectives(self, dtype: DType) -> list[tuple[Collective, ...]]:
        """Returns the collectives of each leg; none if it stays whole."""
        if self.leaf.cut_for_collectives is None:
            return [()]
        cut = self.cut_sent(self.leaf.cut_for_collectives, dtype)
        legs = self.legs(cut.of_part(self.leaf.mesh.shape))
        return [route.gathers(part, cut.dtype_sent(dtype)) for part, route in legs]


def why_not_stored(leaf: StateLeaf, rule: LeafRule) -> str:
    """Returns why a frozen parameter cannot be stored in blocks; an empty string if it can."""
    return why_exact(leaf, rule) if not any(leaf.base) else "cut over other mesh axes, too"


def why_exact(leaf: StateLeaf, rule: LeafRule) -> str:
    """Returns why a leaf cannot travel in blocks; an empty string if it can."""
    cut = leaf.cut
    if cut is None or rule.quantize is False:
        return "by rule" if cut else "whole"
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or itemsize(leaf.dtype) < 2:
        return f"{leaf.dtype} is no floating-point dtype of 16 bits or more"
    if cut.blocks is not None:
        return ""
    if cut.flat:
        return "flattened"
    if cut.num_stacked > 1:  # a loop would transpose it, and blocks cannot be
        return f"scanned over dimension {cut.num_stacked - 1}, not 0"
    beside = cut.with_other_axes(leaf.base, leaf.mesh.shape).of_part(leaf.mesh.shape).size_beside
    return f"{beside} elements beside the cut, fewer than {LEAST}" if beside < LEAST else ""


def _bytes(collectives: Iterable[Collective]) -> float:
    return sum(x.sent_bytes for x in collectives)


class LevelBytes(NamedTuple):
    """Bytes within nodes and between them."""

    within: int
    between: int


class UnquantizedLeaf(NamedTuple):
    """A partitioned parameter that travels as it is, although `Quantization` asks for integers."""

    path: str
    shape: tuple[int, ...]
    reason: str


class Kept(NamedTuple):
    """Values that stay on a device from the forward to the backward pass, though stage 3 could make them anew.

    Attributes:
      params: The paths of the parameters that stay whole, of those that are partitioned.
      of_params: How many are partitioned.
      param_bytes: Their bytes on one device.
      blocks: How many of the loss's repeated blocks, and of its loops over layers, keep what `Keep` says.
      of_blocks: How many there are.
      block_bytes: The bytes that these blocks save on one device for the backward pass.
      peak: The estimated peak of the step on one device, if the step chose by itself what it keeps.
      limit: What a step may use of a device, likewise.
    """

    params: frozenset[str]
    of_params: int
    param_bytes: int
    blocks: int
    of_blocks: int
    block_bytes: int
    peak: int | None = None
    limit: int | None = None

    def line(self) -> str:
        """Returns what stays on a device between the passes, as text."""
        params = "all parameters" if len(self.params) == self.of_params else f"{len(self.params)} of {self.of_params}"
        blocks = f"{self.blocks} of {self.of_blocks} blocks"
        if self.peak is not None and self.limit is not None:
            # Its parts would not add up: compilers fuse what blocks save.
            said = ([params] if self.params else []) + ([blocks] if self.of_blocks else [])
            fits = f"{format_bytes(self.peak)} of {format_bytes(self.limit)}, estimated"
            return f"kept between passes: {', '.join(said)}: {fits} (`remat='cheap'` keeps less)"
        said = [f"{params} ({format_bytes(self.param_bytes)})"] if self.params else []
        of_blocks = f" ({format_bytes(self.block_bytes)})" if self.block_bytes or not self.blocks else ""
        said += [f"{blocks}{of_blocks}"] if self.of_blocks else []
        return f"kept between passes: {', '.join(said) or 'nothing'}"


@dataclasses.dataclass(frozen=True, eq=False)
class Traffic:
    """How each parameter reaches the loss and each gradient returns, and the bytes of both.

    Attributes:
      leaves: The layouts of a plan's parameters.
      other_leaves: Those of the further fields.
      kept: What stays on a device between the passes, if that is known.
      lookups: What the loss reads of the parameters whose rows it looks up in their shards, if that is known.
    """

    config: ZeroConfig
    mesh: AnyMesh
    leaves: tuple[LeafPlan, ...]
    other_leaves: tuple[StateLeaf, ...]
    kept: Kept | None
    lookups: Mapping[str, TableReads]

    @functools.cached_property
    def route(self) -> Route:
        """How parameters travel, and gradients that are not rounded to integers."""
        return route_of(self.config, self.mesh)

    def regathers(self, path: str) -> bool:
        """Whether the backward pass gathers a partitioned parameter again."""
        return self.config.reshard_after_forward and (self.kept is None or path not in self.kept.params)

    def lines(self) -> list[str]:
        """Returns as text what devices gather and keep, and what they send within and between nodes."""
        gathered = f"gathered per step: {format_bytes(self.bytes_gathered_in(micro_batches=1))}"
        if self.gathers_of_loss:
            gathered += ", without what the loss's own jax.checkpoint adds (estimate_step_memory counts it)"
        lines = [gathered, *([] if self.kept is None else [self.kept.line()])]
        over_nodes = self.config.node_axis
        if over_nodes is None:
            return lines
        if self.mesh.shape[over_nodes] == 1:
            return [*lines, f"one node along {over_nodes!r}: there is nothing between nodes"]
        within, between = map(format_bytes, self.sent_bytes())
        lines.append(f"sent per step and device: {within} within nodes, {between} between them")
        if self.config.secondary_params:
            lines.append(f"secondary parameters: {format_bytes(self.secondary_bytes)} per device during a step")
        return lines

    def gather_plan(self, leaf: StateLeaf) -> GatherPlan:
        """Returns how a parameter reaches the loss of a train step, given its layout as stored."""
        kind, lookups = self._kind(self.config.quantization.gather, leaf), self.lookups_of(leaf.path)
        return GatherPlan(leaf, self.route, kind, self.config.secondary_params, lookups=lookups)

    def lookups_of(self, path: str) -> Lookups:
        """Returns which reads of a parameter look up rows in its shards."""
        read = self.lookups.get(path)
        return "none" if read is None else "some" if read.otherwise else "all"

    def route_of_gradient(self, leaf: LeafPlan) -> Route:
        """Returns how a parameter's gradient travels."""
        return route_of(self.config, self.mesh, self._kind(self.config.quantization.reduce, leaf.grad))

    def choose_lookups(self, reads: Mapping[str, TableReads]) -> dict[str, TableReads]:
        """Returns what a loss reads of those parameters whose lookups run on shards: it sends less than whole ones.

        One decision for all lookups of a parameter, since many may send more than the parameter. A gradient is cut as
        its parameter is at stage 3, so the decision holds for both passes.
        """
        chosen, grads = {}, {leaf.path: leaf.grad for leaf in self.leaves}
        for param, dtype in self._held:
            read, is_whole = reads.get(param.path), param.cut is None
            gather = GatherPlan(grads.get(param.path, param), self.route) if is_whole else self.gather_plan(param)
            rows = None if read is None else gather.rows(read, dtype)
            if read is not None and rows is not None and _bytes(rows) < _bytes(gather.collectives(dtype)[0]):
                chosen[param.path] = read
        return chosen

    def is_reduced_once(self, micro_batches: int) -> bool:
        """Whether gradients cross nodes once per step, however often their parameters are used."""
        return self.config.secondary_grads and micro_batches > 1

    def _kind(self, asked: Q, leaf: StateLeaf) -> Q | Literal["none"]:
        return "none" if asked == "none" or self._why_exact(leaf) else asked

    def _why_exact(self, leaf: StateLeaf) -> str:
        if leaf.owner is not None:
            return "no parameter, though laid out like one"
        if leaf.is_written:
            return "written by the loss"
        return why_exact(leaf, self.config.rule_for(leaf.path))

    def unquantized(self) -> tuple[UnquantizedLeaf, ...]:
        """Returns every partitioned parameter that `Quantization` leaves as it is, with the reason."""
        kinds = self.config.quantization
        travels = [leaf.param for leaf in self.leaves if leaf.param.cut and kinds.gather != "none"]
        stored = [x for x in self.other_leaves if x.is_param and x.cut and {kinds.gather, kinds.frozen} != {"none"}]
        reduced = [leaf.grad for leaf in self.leaves if leaf.trained and leaf.grad.cut and kinds.reduce != "none"]
        reasons = [(x, self._why_exact(x)) for x in (*travels, *reduced, *stored)]
        if kinds.frozen != "none":
            frozen = [leaf.param for leaf in self.leaves if not leaf.trained and leaf.param.cut]
            reasons += [(x, why_not_stored(x, self.config.rule_for(x.path))) for x in (*frozen, *stored)]
        by_path = {x.path: UnquantizedLeaf(x.path, x.shape, reason) for x, reason in reasons}
        return tuple(x for x in by_path.values() if x.reason)

    def bytes_gathered_in(self, *, micro_batches: int) -> int:
        """Returns `gathered_bytes` of a step with several micro-batches: at stage 3 each of them gathers."""
        return sum(x.num_bytes for x in self._gathers_in(micro_batches))

    def sent_bytes(self, *, micro_batches: int = 1) -> LevelBytes:
        """Returns the bytes that one device sends per step, within and between nodes."""
        found = self._gathers_in(micro_batches)
        within_nodes, over_nodes = {*axes_within_nodes(self.config)}, {self.config.node_axis}
        for leaf in self.leaves:
            cut = leaf.grad.cut_for_collectives if leaf.trained else None
            if cut is None:
                continue
            dtype = cast_dtype(leaf.compute_dtype, self.config.policy.reduce)
            between_once, route = self.is_reduced_once(micro_batches), self.route_of_gradient(leaf)
            # Stage 1 sums whole gradients of several micro-batches.
            read = None if self.config.stage < 2 and micro_batches > 1 else self.lookups.get(leaf.path)
            rows = GatherPlan(leaf.grad, route).rows(read, dtype, reduces=True)
            whole = route.reductions(cut.of_part(self.mesh.shape), dtype)
            for x in whole if read is None or rows is None else rows + read.otherwise * whole:
                once = self.config.stage < 2 or (between_once and within_nodes.isdisjoint(x.axes))
                found += [x] * (1 if once else micro_batches)
        between = sum(x.sent_bytes for x in found if not over_nodes.isdisjoint(x.axes))
        return LevelBytes(round(sum(x.sent_bytes for x in found) - between), round(between))

    @property
    def secondary_bytes(self) -> int:
        """Bytes on one device of the secondary shares that it keeps during a step (`ZeroConfig.secondary_params`)."""
        return sum(x.num_bytes for x in self.gathers_before_loss)

    def _gathers_in(self, micro_batches: int) -> list[Collective]:
        """Returns the collectives of all gathers of a step; without micro-batches, of those after the update."""
        before = self.gathers_before_loss if micro_batches else ()
        updated = [x for x in self.leaves if not x.param.cut and x.trained]
        after = [GatherPlan(x.grad, self.route).collectives(x.compute_dtype)[0] for x in updated]
        return [*before, *micro_batches * self.gathers_of_loss, *itertools.chain(*after)]

    @functools.cached_property
    def _held(self) -> list[tuple[StateLeaf, DType]]:
        """Each parameter as stored, and its dtype in the loss."""
        held = [(leaf.param, leaf.compute_dtype) for leaf in self.leaves]
        return held + [(x, x.compute_dtype) for x in self.other_leaves if x.compute_dtype is not None]

    @functools.cached_property
    def gathers_of_loss(self) -> tuple[Collective, ...]:
        """The collectives of the gathers of a loss and its gradient."""
        found: list[Collective] = []
        for leaf, dtype in self._held:
            gather, read = self.gather_plan(leaf), self.lookups.get(leaf.path)
            passes = 0 if gather.lookups == "all" else 2 if self.regathers(leaf.path) else 1
            found += gather.rows(read, dtype) or ()
            found += passes * gather.collectives(dtype)[0]
        return tuple(found)

    @functools.cached_property
    def gathers_before_loss(self) -> tuple[Collective, ...]:
        """The collectives of gathers once per step: those between nodes with `secondary_params`."""
        legs = [self.gather_plan(leaf).collectives(dtype) for leaf, dtype in self._held]
        return tuple(x for _, *before in legs for leg in before for x in leg)
