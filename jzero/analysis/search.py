"""The search of `fit`: every layout, with as many micro-batches as its estimated memory needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import Mesh

from jzero.analysis.candidates import CLOSE_TO_BEST, Candidate, recomputation_rank
from jzero.analysis.host_memory import HostMemory
from jzero.analysis.replanning import abstract_mesh, plan_of_argument, relaid
from jzero.analysis.step_programs import check_update_of
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.offload import Offload
from jzero.core.config.zero import Quantization, ZeroConfig
from jzero.core.engine.recompute import Remat
from jzero.core.layout.mesh import AnyMesh, axes_of_config, batch_axes, make_mesh
from jzero.core.plan.plan import ZeroPlan
from jzero.core.step.inputs import check_batch
from jzero.core.step.train_step import TrainStep
from jzero.estimate.step_memory import StepMemory, memory_of_step
from jzero.machines.machine import Machine
from jzero.training import make_train_step

Stage: TypeAlias = Literal[0, 1, 2, 3]
WORTH_A_NOTE = 0.1
"""Share of the step that integers on the links must save to be worth a note."""


def by_cost(x: Candidate) -> tuple[float, ...]:
    """Sorts by estimated cost, in steps of a percent; then arithmetic, micro-batches, recomputation, stage."""
    knows_rates = x.memory.seconds is not None
    return (
        x.host_seconds is None,
        0 if knows_rates else _steps(x.disk_seconds),
        _steps(x.cost()),
        _steps(x.memory.flops),
        x.accumulate_steps,
        recomputation_rank(x.remat),
        x.config.stage,
        -x.config.persistence_threshold,
    )


def _steps(x: float) -> int:
    return round(math.log(max(x, 1e-12)) / math.log(CLOSE_TO_BEST))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """The facts that all candidates share, and their estimated costs.

    Attributes:
      state: The state, as shapes.
      trainable: Which of its parameters are trained.
      loss_fn: As for `make_train_step`.
      options: Other arguments of `make_train_step`.
      batch: The global batch.
      rng: The `rng` of the step.
      topology: The name of the machine, if it is not this one.
      hardware: Its specifications, if known.
      devices: Its devices, if it can be compiled for.
      num_devices: Their number.
      host: The memory and the disk of one of its hosts.
      base: The settings that are not searched.
      limit: Most bytes of a step on one device.
      stages: The stages to search.
      remat: The options `remat` to search.
      max_steps: Most micro-batches.
      mesh: The mesh of all candidates; `None` if the search chooses it.
      last: Where to keep optimizer state if nothing else fits.
      untried: Why the loss refused so many micro-batches.
    """

    state: TrainStateLike
    trainable: PyTree | str | None
    loss_fn: Callable[..., Any]
    options: dict[str, Any]
    batch: PyTree
    rng: jax.Array | None
    topology: str | None
    hardware: Machine | None
    devices: list[jax.Device] | None
    num_devices: int
    host: HostMemory
    base: ZeroConfig
    limit: int
    stages: tuple[Stage, ...]
    remat: Sequence[Remat | None]
    max_steps: int
    mesh: AnyMesh | None
    last: tuple[Offload, ...] = ()
    untried: dict[int, str] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
    _memories: dict[Any, StepMemory] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def estimate(self, offloads: Sequence[Offload]) -> list[Candidate]:
        """Returns every layout, the cheapest first, with as many micro-batches as its estimated memory needs."""
        tried = self._layouts(offloads)
        while more := self.more(tried):
            tried = [*tried, *more]
        return sorted(tried, key=by_cost)

    def more(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Returns what to try if nothing fits without a disk: every parameter cut, then state in host memory.

        Nothing, if no state is as large as what is lacking: then the step itself is too large.
        """
        if any(x.fits(self.limit) and not x.memory.disk for x in tried) or self.exceeded_by_step(tried):
            return []
        return self._cut_further(tried) or self._layouts(
            [x for x in self.last if not any(y.config.offload == x for y in tried)]
        )

    def exceeded_by_step(self, tried: Sequence[Candidate]) -> bool:
        """Whether what steps need beside their state and batch is alone more than the limit."""
        return min(x.memory.temporaries for x in tried) > self.limit

    def next_steps(self, x: Candidate) -> list[Candidate]:
        """Returns the candidates to try after one that takes more than its estimate: more micro-batches."""
        num_replicas = x.mesh_shape.get(str(x.config.replica_axis), 1)
        is_searched = self.base.node_axis is None
        once = x.config.secondary_grads or (is_searched and x.config.secondary_params)  # see `_levels`
        config = dataclasses.replace(x.config, secondary_grads=once)
        return list(self._micro_batches(config, num_replicas, x.remat, first=2 * x.accumulate_steps))

    def why_not_on_disk(self, offload: Offload) -> str:
        """Returns why optimizer state cannot be on a disk; an empty string if it can."""
        num_replicas = self._replicas()[0]
        config = dataclasses.replace(self._config(self.stages[-1], num_replicas), offload=offload)
        try:
            check_update_of(self.step(1, None), self.placed(config, num_replicas), self.batch, self.rng)
        except ValueError as error:
            return str(error)
        return ""

    def _layouts(self, offloads: Sequence[Offload]) -> list[Candidate]:
        """Returns the candidates with each of these offloads."""
        layouts = [
            (self._config(stage, num_replicas, {**levels, **again, "offload": offload}), num_replicas, recompute)
            for stage, num_replicas, recompute, offload in itertools.product(
                self.stages, self._replicas(), self._remats, offloads
            )
            if stage > 0 or num_replicas == self._replicas()[0]
            for levels in self._levels(stage, num_replicas)
            for again in self._passes(stage, recompute)
        ]
        return self._traced(layouts)

    def _traced(self, layouts: Sequence[tuple[ZeroConfig, int, Remat | None]]) -> list[Candidate]:
        """Returns the candidates of layouts, each a configuration, a number of replicas and an option `remat`."""
        candidates: dict[Candidate, None] = {}
        for i, layout in enumerate(layouts, 1):
            logging.getLogger("jzero").info("Tracing layout %s of %s.", i, len(layouts))
            candidates |= dict.fromkeys(self._micro_batches(*layout))
        return list(candidates)

    def _config(self, stage: Stage, num_replicas: int, levels: Mapping[str, Any] = {}) -> ZeroConfig:
        free = next(name for name in ("replica", "replicas") if name not in batch_axes(self.base))
        name = (self.base.replica_axis or free) if num_replicas > 1 else None
        return dataclasses.replace(self.base, stage=stage, replica_axis=name, **levels)

    def _levels(self, stage: Stage, num_replicas: int) -> list[dict[str, Any]]:
        """Returns the fields to try for hops between nodes and within them; none of them changes a sum's terms."""
        is_fixed = self.mesh is not None or self.base.node_axis is not None or not self.base.reduce_scatter
        if stage == 0 or is_fixed or self._num_nodes // num_replicas < 2:
            return [{}]
        hops = {"node_axis": next(name for name in ("node", "nodes") if name not in batch_axes(self.base))}
        keeps = self.base.offload.params == "none"
        once = {**hops, "secondary_params": stage == 3 and keeps, "secondary_grads": True}
        return [{}, hops, *([once] if stage > 1 else [])]

    def _passes(self, stage: Stage, recompute: Remat | None) -> list[dict[str, Any]]:
        """Returns the fields to try for parameters between the passes: gathered again or, in place of stage 2, kept."""
        may_stay = self.base.reshard_after_forward and self.base.offload.params == "none"
        if stage < 3 or not may_stay or recompute != self._remats[0]:  # `fill` keeps them beside what is recomputed
            return [{}]
        return [{}, {"reshard_after_forward": False}]

    def saved_by_integers(self, x: Candidate) -> list[str]:
        """Returns a note on what integers on the links would save, if that is much."""
        kinds = Quantization(gather="int8" if x.config.stage == 3 else "none", reduce="int8")
        changes = x.config.stage > 0 and x.config.quantization == Quantization() and x.config.reduce_scatter
        if not changes or x.config.offload.params == "host" or not x.cost():
            return []
        config = dataclasses.replace(x.config, quantization=kinds)
        num_replicas = x.mesh_shape.get(str(x.config.replica_axis), 1)
        logging.getLogger("jzero").info("Tracing the choice with integers on the links.")
        memory = self.memory(config, num_replicas, x.accumulate_steps, x.remat)
        saved = 1 - dataclasses.replace(x, memory=memory).cost() / x.cost()
        if saved < WORTH_A_NOTE:
            return []
        gather = "gather='int8', " if x.config.stage == 3 else ""
        return [
            f"Integers on the links, `Quantization({gather}reduce='int8')`, would save {saved:.0%} of the "
            "step. They change the numbers, so they are not searched."
        ]

    @property
    def _num_nodes(self) -> int:
        return 1 if self.hardware is None else max(1, self.num_devices // self.hardware.devices_per_node)

    def _replicas(self) -> list[int]:
        if self.mesh is not None:
            return [int(self.mesh.shape.get(self.base.replica_axis, 1))]
        if self.hardware is None:
            return [1]
        return sorted({1, self.hardware.num_devices // self.hardware.devices_per_node})

    @functools.cached_property
    def _remats(self) -> list[Remat | None]:
        """The options that change something."""
        distinct: dict[tuple[float, ...], Remat | None] = {}
        logging.getLogger("jzero").info("Tracing the step.")
        num_replicas = self._replicas()[0]
        config = self._config(self.stages[0], num_replicas)
        for recompute in self.remat:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*changes nothing")  # then it is left out
                x = self.memory(config, num_replicas, 1, self._said(config, num_replicas, 1, recompute))
            distinct.setdefault((x.flops, x.temporaries, x.activation_bytes), recompute)
        return list(distinct.values())

    def _micro_batches(
        self, config: ZeroConfig, num_replicas: int, recompute: Remat | None, first: int = 1
    ) -> Iterator[Candidate]:
        """Yields candidates with `first` micro-batches, then twice as many each time, until an estimate fits."""
        plan = plan_of_argument(self.placed(config, num_replicas))
        assert plan is not None
        check_batch(self.batch, plan)
        steps = first
        while steps <= self.max_steps and self._splits(plan, steps):
            try:
                remat = self._said(config, num_replicas, steps, recompute)
                memory = self.memory(config, num_replicas, steps, remat)
            except ValueError as error:
                if steps == 1:
                    raise
                self.untried[steps] = str(error)  # the loss may divide its rows further
                return
            shape = {str(name): int(size) for name, size in plan.mesh.shape.items()}
            once = config.secondary_grads and (steps > 1 or self.base.secondary_grads)  # of one, it changes nothing
            yield Candidate(
                dataclasses.replace(config, secondary_grads=once),
                shape,
                steps,
                remat,
                memory,
                lacks=self.host.lacks(memory, config.offload),
                disk_seconds=self.host.disk_seconds(memory, config.offload),
                host_seconds=self.host.host_seconds(memory, config.offload, self.hardware),
            )
            if memory.peak <= self.limit or memory.arguments > self.limit:
                return
            steps *= 2

    def _splits(self, plan: ZeroPlan, steps: int) -> bool:
        try:
            check_batch(self.batch, plan, steps)
        except ValueError:
            return False
        return True

    def _cut_further(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates at stage 3 that cut parameters of any size, if they have not been tried."""

        def cut_further(config: ZeroConfig) -> ZeroConfig:
            return dataclasses.replace(config, persistence_threshold=0, padding_threshold=config.most_unpadded)

        done = [x.config.offload for x in tried if x.config.persistence_threshold == 0]
        layouts = {
            (x.mesh_shape.get(str(x.config.replica_axis), 1), recomputation_rank(x.remat), x.config): x
            for x in tried
            if x.config.stage == 3 and x.config.offload not in done
        }
        return self._traced([(cut_further(config), n, like.remat) for (n, _, config), like in layouts.items()])

    def memory(self, config: ZeroConfig, num_replicas: int, steps: int, recompute: Remat | None) -> StepMemory:
        """Returns the estimated memory and time of a candidate's step, which is traced once."""
        key = config, num_replicas, steps, recompute
        if key not in self._memories:
            arguments = self.placed(config, num_replicas), self.batch, self.rng
            self._memories[key] = memory_of_step(self.step(steps, recompute), arguments, self.hardware)
        return self._memories[key]

    def _said(self, config: ZeroConfig, num_replicas: int, steps: int, recompute: Remat | None) -> Remat:
        """Returns an option `remat` as a candidate says it: for `None`, what a step would keep within the limit."""
        if recompute is not None:
            return recompute
        placed = self.placed(config, num_replicas)
        step = self.step(steps, None).resolved(
            placed, self.batch, rng=self.rng, hardware=self.hardware, hbm_bytes=self.limit
        )
        plan = plan_of_argument(placed)
        assert plan is not None
        if step.remat is not None:
            return step.remat
        return "cheap" if plan.regathers else "as_written"

    def step(self, steps: int, recompute: Remat | None) -> TrainStep:
        """Returns the step of a candidate."""
        return make_train_step(self.loss_fn, accumulate_steps=steps, remat=recompute, check_rows=False, **self.options)

    def placed(self, config: ZeroConfig, num_replicas: int) -> State:
        """Returns the state of a candidate, as shapes with shardings."""
        mesh = self._mesh(config, num_replicas) if self.mesh is None else self.mesh
        return relaid(self.state, mesh=mesh, config=config, trainable=self.trainable, hardware=self.hardware)

    def _mesh(self, config: ZeroConfig, num_replicas: int) -> AnyMesh:
        nodes = self._num_nodes // num_replicas or 1
        axes = axes_of_config(config, self.num_devices // num_replicas, num_replicas, nodes)
        if self.devices is None:
            return abstract_mesh(self.num_devices, axes)
        mesh: Mesh = make_mesh(devices=self.devices, **axes)
        return mesh
