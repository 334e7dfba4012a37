"""`fit`: finds the layout that communicates least among those that fit a machine's memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from jzero.analysis.analyze import this_machine
from jzero.analysis.candidates import NEARLY, RECOMPUTED, Candidate, Fit, judge, recomputation_rank
from jzero.analysis.machines import Machine, machine
from jzero.analysis.node_memory import NodeMemory
from jzero.analysis.relocation import abstract_mesh, plan_of_argument, relaid
from jzero.analysis.stages import check_on_records, stages_of
from jzero.analysis.step_memory import StepMemory, gathers_more, memory_of_trace
from jzero.analysis.topologies import topology_devices, topology_options
from jzero.config.offload import Offload
from jzero.config.quantization import Quantization
from jzero.config.settings import FLAG, check, number, optional, some_of, whole
from jzero.config.zero import ZeroConfig
from jzero.engine.recompute import Remat
from jzero.plan.mesh import AnyMesh, axes_of_config, batch_axes, make_mesh, platform_of
from jzero.plan.plan import ZeroPlan
from jzero.state.train_state import adapt
from jzero.step.inputs import check_batch
from jzero.step.train_step import TrainStep, make_train_step

__all__ = ["fit"]

Stage: TypeAlias = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
USABLE = 0.9
"""Share of a machine's memory that a step may use; runtime, collectives and fragmentation take the rest."""
WORTH_A_NOTE = 0.1
"""Share of the communication that integers on the links must save to be worth a note."""
NEAR = 0.9
"""Share of the limit above which an estimated peak may not fit: the estimate can be 10 % low, or more."""
CLOSE = (
    "What was chosen is reckoned to take {share:.0%} of the limit, and what is reckoned can be 10 % low: compile it "
    "(`confirm=True`) before a long run, or leave room with a lower `hbm_bytes`."
)
RECKONED = "Nothing was compiled: the figures are reckoned."
FRACTION = (
    f"jax takes 75 % of a GPU's memory unless told otherwise: to train with {USABLE:.0%} of it, set "
    f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}."
)


def fit(  # noqa: PLR0913  # what is searched, and what is not
    make_state: Callable[[jax.Array], Any] | Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    topology: str | None = None,
    hbm_bytes: float | None = None,
    config: ZeroConfig | None = None,
    stages: Sequence[Stage] = STAGES,
    remat: Sequence[Remat | None] = ("as_written", "cheap", True),
    max_accumulate_steps: int = 64,
    host_bytes: float | None = None,
    disk_path: str | None = None,
    disk_bytes: float | None = None,
    disk_bytes_per_s: float | None = None,
    has_aux: bool = False,
    mutable: Sequence[str] = (),
    merge: Mapping[str, str] | None = None,
    rng: Any = None,
    confirm: bool = True,
) -> Fit:
    """Finds the cheapest way to train a model that fits a machine.

    It searches stage, micro-batches and recomputation; over several hosts, also one replica per host, and hops between
    and within them (`ZeroConfig.node_axis`, `secondary_params`, `secondary_grads`). Finally it cuts smaller parameters,
    too; `estimate_step_memory` gives the memory of each candidate. The cheapest candidate spends
    the least time in communication; among equals, it computes least, and has the fewest micro-batches and the lowest
    stage. Then it compiles the choice, and the next cheaper candidate that does not fit, and the compiler's figures
    decide. With `disk_path`, it also tries optimizer state on that disk; a step then waits for it as long as the state
    takes to be read and written once, which counts as communication does. It searches no other offload, nor what
    changes numbers: a note tells what `Quantization` would save.

    Args:
      make_state: A function from a PRNG key to a train state, as for `init_train_state`, or a state, concrete or
        abstract.
      loss_fn: As for `make_train_step`.
      batch: The global batch, concrete or abstract.
      topology: The machine, such as `"h200:8"`; by default the devices of this process.
      hbm_bytes: Most bytes of a step on one device. By default 90 % of the device's memory.
      config: Everything that is not searched, such as the precision.
      stages: The stages to search. Those that `config` excludes are left out, as `Offload(params="host")` excludes all
        but 3.
      remat: The options to try for `make_train_step(remat=...)`; "offload" is not searched.
      max_accumulate_steps: Most micro-batches to try.
      host_bytes: What the state may take of a node's memory, if `config` keeps a part of it there.
      disk_path: A folder on a local disk of every node, for `Offload(optimizer="disk")`.
      disk_bytes: What the state may take of that disk.
      disk_bytes_per_s: The disk's rate in each direction, both at once, as `jzero doctor --disk` tells it.
      has_aux: As for `make_train_step`.
      mutable: As for `make_train_step`.
      merge: As for `make_train_step`.
      rng: The `rng` of the step.
      confirm: Whether to compile. Without it, or without the compiler of `topology`, the figures are estimates, and can
        be wrong by 10 % or more.

    Returns:
      A `Fit`. If nothing fits, `chosen` is `None`, and `tried` shows by how much.

    Raises:
      ValueError: There is no such machine, its memory is unknown, an argument is out of range, `disk_path` comes
        without the disk's size and rate, `config` excludes all of `stages`, or the batch cannot be split over the
        machine.
      TypeError: `make_state` gives no train state.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> choice = jzero.fit(plain_state, loss_fn, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> mesh = jzero.make_mesh(**choice.mesh_shape)
      >>> new_state = jzero.shard_train_state(plain_state, config=choice.config, mesh=mesh)
      >>> step = jzero.make_train_step(loss_fn, accumulate_steps=choice.accumulate_steps, remat=choice.remat)
    """
    stages = check("stages", stages, some_of(*STAGES))
    remat = check("remat", remat, some_of(*RECOMPUTED))
    check("max_accumulate_steps", max_accumulate_steps, whole(1))
    check("hbm_bytes", hbm_bytes, optional(number("a number of bytes >= 1", lambda x: 1 <= x < math.inf)))
    check("confirm", confirm, FLAG)
    hardware, devices, notes = _hardware(topology, confirm=confirm)
    limit = _limit(hbm_bytes, hardware, devices)
    if hbm_bytes is None and hardware is not None and hardware.kind == "gpu":
        notes.append(FRACTION)
    state = make_state
    if callable(make_state):
        state = jax.eval_shape(lambda key: adapt(make_state(key)).state, jax.random.key(0))
    num_devices = hardware.num_devices if hardware is not None else len(jax.devices())
    per_node = hardware.devices_per_node if hardware is not None else jax.local_device_count()
    node = NodeMemory(
        devices=min(per_node, num_devices),
        host_bytes=host_bytes,
        disk_path=disk_path,
        disk_bytes=disk_bytes,
        disk_bytes_per_s=disk_bytes_per_s,
    )
    search = _Search(
        state=adapt(state).state,
        loss_fn=loss_fn,
        options={"has_aux": has_aux, "mutable": mutable, "merge": merge},
        batch=batch,
        rng=rng,
        topology=topology,
        hardware=hardware,
        devices=devices,
        num_devices=num_devices,
        node=node,
        base=config or ZeroConfig(stage=0),
        limit=limit,
        stages=_allowed(stages, config),
        max_steps=max_accumulate_steps,
    )
    offloads, remarks = search.offloads()
    notes += remarks
    tried = search.estimate(remat, offloads)
    if devices is not None and confirm:
        tried = search.confirm(tried)
    chosen = next((x for x in tried if x.fits(limit)), None)
    name = hardware.name if hardware is not None else f"{search.num_devices} {jax.devices()[0].device_kind} devices"
    if chosen is not None and not chosen.is_compiled and chosen.peak > NEAR * limit:
        notes.append(CLOSE.format(share=chosen.peak / limit))
    if chosen is not None:
        notes += gathers_more(chosen.memory.gathered_bytes, chosen.memory.planned_bytes)
        notes += search.saved_by_integers(chosen)
    found = tuple(judge(tried, chosen, limit))
    chosen = next((x for x in found if x.fits(limit)), None)
    return Fit(name, limit, found, chosen, tuple(notes), _workload(search.state, batch))


def _workload(state: Any, batch: Any) -> str:
    size = sum(math.prod(np.shape(x)) for x in jax.tree.leaves(state.params))
    arrays = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(batch)]
    more = f" and {len(arrays) - 3} more" if len(arrays) > 3 else ""
    return f"{size:,} parameters; global batch {', '.join(arrays[:3])}{more}"


def _allowed(stages: Sequence[Stage], config: ZeroConfig | None) -> tuple[Stage, ...]:
    """Returns the stages that a configuration can have; it says itself which it cannot."""
    found: list[Stage] = []
    for stage in stages:
        try:
            dataclasses.replace(config or ZeroConfig(), stage=stage)
        except ValueError as error:
            excluded = error
        else:
            found.append(stage)
    if not found:
        raise ValueError(f"`config` excludes all of `stages`, {tuple(stages)}: {excluded}")
    return tuple(found)


def _hardware(topology: str | None, *, confirm: bool) -> tuple[Machine | None, list[jax.Device] | None, list[str]]:
    """Returns the facts about a machine, its devices if its compiler is installed, and notes."""
    if topology is None:
        devices = jax.devices()
        return this_machine(devices), devices, [] if confirm else [RECKONED]
    hardware = machine(topology)
    if not confirm:
        return hardware, None, [RECKONED]
    try:
        return hardware, topology_devices(topology), []
    except ImportError as error:
        return hardware, None, [f"{RECKONED} {error}"]


def _limit(hbm_bytes: float | None, hardware: Machine | None, devices: list[jax.Device] | None) -> int:
    if hbm_bytes is not None:
        return int(hbm_bytes)
    if hardware is not None:
        return int(USABLE * hardware.hbm_bytes)
    stats = devices[0].memory_stats() if devices else None
    if not stats or "bytes_limit" not in stats:
        raise ValueError("The memory of these devices is not known: pass `hbm_bytes=`, or a `topology`.")
    return int(stats["bytes_limit"])


def _order(x: Candidate) -> tuple[int, ...]:
    """Sorts by communication, in steps of a percent; then arithmetic, micro-batches, recomputation, stage."""
    knows_rates = x.memory.communication_seconds is not None
    return (
        0 if knows_rates else _steps(x.disk_seconds),
        _steps(x.cost()),
        _steps(x.memory.flops),
        x.accumulate_steps,
        recomputation_rank(x),
        x.config.stage,
        -x.config.persistence_threshold,
    )


def _steps(x: float) -> int:
    return round(math.log(max(x, 1e-12)) / math.log(NEARLY))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Search:
    """The facts that all candidates share; estimates and compiles candidates."""

    state: Any
    loss_fn: Callable[..., Any]
    options: dict[str, Any]
    batch: Any
    rng: Any
    topology: str | None
    hardware: Machine | None
    devices: list[jax.Device] | None
    num_devices: int
    node: NodeMemory
    base: ZeroConfig
    limit: int
    stages: tuple[Stage, ...]
    max_steps: int

    def offloads(self) -> tuple[list[Offload], list[str]]:
        """Returns where to keep optimizer state, and why not on the disk, if it cannot be there."""
        base, *more = self.node.offloads(self.base.offload)
        if not more:
            return [base], []
        config = dataclasses.replace(self._config(self.stages[-1], 1), offload=more[0])
        try:
            placed = relaid(self.state, mesh=self._mesh(config, 1), config=config)
            check_on_records(self._step(1, None), placed, self.batch, self.rng)
        except ValueError as error:
            return [base], [f"Optimizer state on disk was not tried: {error}"]
        return [base, *more], []

    def estimate(self, remat: Sequence[Remat | None], offloads: Sequence[Offload]) -> list[Candidate]:
        """Returns every layout, in order, with as many micro-batches as the estimates need."""
        remats = self._remats(remat)
        found = [
            x
            for stage, num_replicas, recompute, offload in itertools.product(
                self.stages, self._replicas(), remats, offloads
            )
            if stage > 0 or num_replicas == 1
            for levels in self._levels(stage, num_replicas)
            for x in self._micro_batches(
                self._config(stage, num_replicas, {**levels, "offload": offload}), num_replicas, recompute
            )
        ]
        if not any(x.fits(self.limit) for x in found):
            found += self._cut_further(found)
        return sorted(dict.fromkeys(found), key=_order)

    def confirm(self, tried: list[Candidate]) -> list[Candidate]:
        """Compiles the first that fits and the one before it, until the compiler agrees with both."""
        while True:
            chosen = next((i for i, x in enumerate(tried) if x.fits(self.limit)), None)
            if chosen is None:
                more = self._cut_further(tried)
                if more:
                    tried = sorted([*tried, *more], key=_order)
                    continue
            # If nothing fits: is the least really too much?
            least = min(range(len(tried)), key=lambda i: (tried[i].refused, bool(tried[i].lacks), tried[i].peak))
            cheaper = [i for i in range(chosen or 0) if not tried[i].lacks]
            asked = [least] if chosen is None else [chosen, *cheaper[-1:]]
            i = next((i for i in asked if not tried[i].is_compiled), None)
            if i is None:
                return tried
            tried[i] = self._compile(tried[i])
            if not tried[i].lacks and tried[i].memory.peak <= self.limit and not tried[i].fits(self.limit):
                # more micro-batches, then
                tried = sorted([*tried, *self._next_steps(tried[i])], key=_order)

    def _config(self, stage: Stage, num_replicas: int, levels: Mapping[str, Any] = {}) -> ZeroConfig:
        free = next(name for name in ("replica", "replicas") if name not in batch_axes(self.base))
        name = (self.base.replica_axis or free) if num_replicas > 1 else None
        return dataclasses.replace(self.base, stage=stage, replica_axis=name, **levels)

    def _levels(self, stage: Stage, num_replicas: int) -> list[dict[str, Any]]:
        """Returns the fields to try for hops between nodes and within them; none of them changes a sum's terms."""
        is_given = self.base.node_axis is not None or not self.base.reduce_scatter
        if stage == 0 or is_given or self._num_nodes // num_replicas < 2:
            return [{}]
        hops = {"node_axis": next(name for name in ("node", "nodes") if name not in batch_axes(self.base))}
        keeps = self.base.offload.params == "none"
        once = {**hops, "secondary_params": stage == 3 and keeps, "secondary_grads": True}
        return [{}, hops, *([once] if stage > 1 else [])]

    def saved_by_integers(self, x: Candidate) -> list[str]:
        """Returns a note on what integers on the links would save, if that is much."""
        kinds = Quantization(gather="int8" if x.config.stage == 3 else "none", reduce="int8")
        changes = x.config.stage > 0 and x.config.quantization == Quantization() and x.config.reduce_scatter
        if not changes or x.config.offload.params == "host" or not x.cost():
            return []
        config = dataclasses.replace(x.config, quantization=kinds)
        num_replicas = x.mesh_shape.get(str(x.config.replica_axis), 1)
        placed = relaid(self.state, mesh=self._mesh(config, num_replicas), config=config)
        memory = self._memory(self._step(x.accumulate_steps, x.remat), placed)
        saved = 1 - dataclasses.replace(x, memory=memory).cost() / x.cost()
        if saved < WORTH_A_NOTE:
            return []
        gather = "gather='int8', " if x.config.stage == 3 else ""
        return [
            f"Integers on the links, `Quantization({gather}reduce='int8')`, would save {saved:.0%} of the "
            "communication. They change the numbers, so they are not searched."
        ]

    @property
    def _num_nodes(self) -> int:
        return 1 if self.hardware is None else max(1, self.num_devices // self.hardware.devices_per_node)

    def _replicas(self) -> list[int]:
        if self.hardware is None:
            return [1]
        return sorted({1, self.hardware.num_devices // self.hardware.devices_per_node})

    def _remats(self, remat: Sequence[Remat | None]) -> list[Remat | None]:
        """Returns the options that change something."""
        found: dict[tuple[float, ...], Remat | None] = {}
        config = self._config(self.stages[0], 1)
        placed = relaid(self.state, mesh=self._mesh(config, 1), config=config)
        for recompute in remat:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*changes nothing")  # then it is left out
                x = self._memory(self._step(1, recompute), placed)
            found.setdefault((x.flops, x.temporaries, x.activation_bytes), recompute)
        return list(found.values())

    def _micro_batches(
        self, config: ZeroConfig, num_replicas: int, recompute: Remat | None, first: int = 1
    ) -> Iterator[Candidate]:
        """Yields candidates with `first` micro-batches, then twice as many each time, until an estimate fits."""
        mesh = self._mesh(config, num_replicas)
        placed = relaid(self.state, mesh=mesh, config=config)
        plan = plan_of_argument(placed)
        assert plan is not None
        check_batch(self.batch, plan)
        steps = first
        while steps <= self.max_steps and self._splits(plan, steps):
            memory = self._memory(self._step(steps, recompute), placed)
            shape = {str(name): int(size) for name, size in mesh.shape.items()}
            late = config.secondary_grads and (steps > 1 or self.base.secondary_grads)  # of one, it changes nothing
            yield Candidate(
                dataclasses.replace(config, secondary_grads=late),
                shape,
                steps,
                recompute,
                memory,
                lacks=self.node.lacks(memory, config.offload),
                disk_seconds=self.node.seconds(memory, config.offload, self.hardware),
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

    def _next_steps(self, x: Candidate) -> list[Candidate]:
        """Returns the candidates to try after one that takes more than its estimate."""
        num_replicas = x.mesh_shape.get(str(x.config.replica_axis), 1)
        is_searched = self.base.node_axis is None
        late = x.config.secondary_grads or (is_searched and x.config.secondary_params)  # see `_levels`
        config = dataclasses.replace(x.config, secondary_grads=late)
        return list(self._micro_batches(config, num_replicas, x.remat, first=2 * x.accumulate_steps))

    def _cut_further(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidate at stage 3 with every parameter cut, if it has not been tried."""
        if any(x.config.persistence_threshold == 0 for x in tried):
            return []
        layouts = {
            (x.mesh_shape.get(str(x.config.replica_axis), 1), x.remat, x.config): x.config
            for x in tried
            if x.config.stage == 3
        }
        return [
            x
            for (num_replicas, recompute, _), config in layouts.items()
            for x in self._micro_batches(dataclasses.replace(config, persistence_threshold=0), num_replicas, recompute)
        ]

    def _compile(self, x: Candidate) -> Candidate:
        assert self.devices is not None
        mesh = make_mesh(devices=self.devices, **x.mesh_shape)
        placed = relaid(self.state, mesh=mesh, config=x.config)
        step, platform = self._step(x.accumulate_steps, x.remat), platform_of(self.devices[0])
        options = (None if self.topology is None else topology_options(self.topology)) or None
        try:
            stages = stages_of(step, (placed, self.batch), {"rng": self.rng}, platform, lambda x: x.compile(options))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return dataclasses.replace(x, refused=True)
        return dataclasses.replace(x, compiled_peak=max(stage.peak for stage in stages))

    def _memory(self, step: TrainStep, placed: Any) -> StepMemory:
        plan = plan_of_argument(placed)
        assert plan is not None
        traced = step.trace(placed, self.batch, rng=self.rng)
        arguments = step.abstract_arguments(placed, self.batch, rng=self.rng)
        return memory_of_trace(traced, arguments, plan, self.hardware, gpu=self._gpu, micro_batches=step.micro.steps)

    def _step(self, steps: int, recompute: Remat | None) -> TrainStep:
        return make_train_step(self.loss_fn, accumulate_steps=steps, remat=recompute, check_rows=False, **self.options)

    def _mesh(self, config: ZeroConfig, num_replicas: int) -> AnyMesh:
        nodes = self._num_nodes // num_replicas or 1
        axes = axes_of_config(config, self.num_devices // num_replicas, num_replicas, nodes)
        if self.devices is None:
            return abstract_mesh(self.num_devices, axes)
        mesh: Mesh = make_mesh(devices=self.devices, **axes)
        return mesh

    @property
    def _gpu(self) -> bool:
        if self.hardware is not None:
            return self.hardware.kind == "gpu"
        return self.devices is not None and platform_of(self.devices[0]) == "gpu"
