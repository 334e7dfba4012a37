"""What devices exchange in one step for parameters and gradients, according to a plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

from jzero.config.precision import cast_dtype
from jzero.layout.comm import Comm, Hop, comm_of
from jzero.layout.leaves import LeafPlan, StateLeaf
from jzero.layout.mesh import shard_axes
from jzero.plan.ways import Way, why_exact, why_not_stored

if TYPE_CHECKING:
    from jzero.plan.plan import ZeroPlan


class LevelBytes(NamedTuple):
    """Bytes within nodes and between them."""

    within: int
    between: int


class UnquantizedLeaf(NamedTuple):
    """A partitioned parameter that travels as it is, although `Quantization` asks for integers."""

    path: str
    shape: tuple[int, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class Traffic:
    """How each parameter reaches the loss and each gradient returns, and the bytes of both.

    Attributes:
      plan: The plan.
    """

    plan: ZeroPlan

    def bytes_gathered_in(self, *, micro_batches: int) -> int:
        """Returns `gathered_bytes` of a step with several micro-batches: at stage 3 each of them gathers."""
        before = self.gathers_before_loss if micro_batches else ()
        hops = (*before, *micro_batches * self.gathers_of_loss, *self._gathers_after_update)
        return sum(hop.num_bytes for hop in hops)

    @property
    def _gathers_after_update(self) -> list[Hop]:
        updated = [x for x in self.plan.leaves if not x.param.cut and x.trained]
        return [hop for x in updated for hop in Way(x.grad, self.plan.comm).hops(x.compute_dtype)[1]]

    def way(self, leaf: StateLeaf) -> Way:
        """Returns how a parameter reaches the loss of a train step, given its layout as stored."""
        kind = self.plan.config.quantization.gather
        is_exact = kind == "none" or self.why_exact(leaf)
        return Way(leaf, self.plan.comm, "none" if is_exact else kind, self.plan.config.secondary_params)

    def comm_of_gradient(self, leaf: LeafPlan) -> Comm:
        """Returns how a parameter's gradient travels."""
        is_exact = self.plan.config.quantization.reduce == "none" or self.why_exact(leaf.grad)
        return self.plan.comm if is_exact else self.rounding_comm

    def is_reduced_once(self, micro_batches: int) -> bool:
        """Whether gradients cross nodes once per step, however often their parameters are used."""
        return self.plan.config.secondary_grads and micro_batches > 1

    @functools.cached_property
    def rounding_comm(self) -> Comm:
        """How gradients travel that `Quantization.reduce` rounds."""
        return comm_of(self.plan.config, self.plan.mesh, self.plan.config.quantization.reduce)

    def why_exact(self, leaf: StateLeaf) -> str:
        """Returns why a parameter or gradient cannot travel in blocks of integers; an empty string if it can."""
        return why_exact(leaf, self.plan.config.rule_for(leaf.path))

    def unquantized(self) -> tuple[UnquantizedLeaf, ...]:
        """Returns every partitioned parameter that `Quantization` leaves as it is, with the reason."""
        kinds = self.plan.config.quantization
        travels = [leaf.param for leaf in self.plan.leaves if leaf.param.cut and kinds.gather != "none"]
        stored = [
            x for x in self.plan.other_leaves if x.is_param and x.cut and {kinds.gather, kinds.frozen} != {"none"}
        ]
        reduced = [leaf.grad for leaf in self.plan.leaves if leaf.trained and leaf.grad.cut and kinds.reduce != "none"]
        reasons = [(x, self.why_exact(x)) for x in (*travels, *reduced, *stored)]
        if kinds.frozen != "none":
            frozen = [leaf.param for leaf in self.plan.leaves if not leaf.trained and leaf.param.cut]
            reasons += [(x, why_not_stored(x, self.plan.config.rule_for(x.path))) for x in (*frozen, *stored)]
        by_path = {x.path: UnquantizedLeaf(x.path, x.shape, reason) for x, reason in reasons}
        return tuple(x for x in by_path.values() if x.reason)

    def sent_bytes(self, *, micro_batches: int = 1) -> LevelBytes:
        """See `ZeroPlan.sent_bytes`."""
        hops = [*self.gathers_before_loss, *micro_batches * self.gathers_of_loss, *self._gathers_after_update]
        within_nodes, *over_nodes = shard_axes(self.plan.config)
        for leaf in self.plan.leaves:
            cut = leaf.grad.cut_for_collectives if leaf.trained else None
            if cut is None:
                continue
            dtype = cast_dtype(leaf.compute_dtype, self.plan.config.policy.reduce)
            reductions = self.comm_of_gradient(leaf).reduce_hops(cut.of_part(self.plan.mesh.shape), dtype)
            late = self.is_reduced_once(micro_batches)
            for hop in reductions:
                once = self.plan.config.stage < 2 or (late and within_nodes not in hop.axes)
                hops += [hop] * (1 if once else micro_batches)
        between = sum(hop.sent_bytes for hop in hops if not {*over_nodes}.isdisjoint(hop.axes))
        return LevelBytes(round(sum(hop.sent_bytes for hop in hops) - between), round(between))

    @property
    def secondary_bytes(self) -> int:
        """Bytes on one device of the secondary shares that it keeps during a step (`ZeroConfig.secondary_params`)."""
        return sum(hop.num_bytes for hop in self.gathers_before_loss)

    @functools.cached_property
    def _hops(self) -> list[tuple[tuple[Hop, ...], tuple[Hop, ...]]]:
        """The collectives of each parameter once per step, and of each use."""
        held = [(leaf.param, leaf.compute_dtype) for leaf in self.plan.leaves]
        held += [(x, x.compute_dtype) for x in self.plan.other_leaves if x.compute_dtype is not None]
        return [self.way(x).hops(dtype) for x, dtype in held]

    @functools.cached_property
    def gathers_of_loss(self) -> tuple[Hop, ...]:
        """The collectives of the gathers of a loss and its gradient."""
        again = [
            of_use
            for x, (_, of_use) in zip(self.plan.all_params, self._hops, strict=True)
            if self.plan.regathers_param(x.path)
        ]
        return tuple(hop for hops in (*(of_use for _, of_use in self._hops), *again) for hop in hops)

    @functools.cached_property
    def gathers_before_loss(self) -> tuple[Hop, ...]:
        """The collectives of gathers once per step: those between nodes with `secondary_params`."""
        return tuple(hop for once, _ in self._hops for hop in once)
