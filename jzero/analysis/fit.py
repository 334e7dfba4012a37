"""`fit`: the layout that sends the least among those that a machine has the memory for."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import Mesh

from jzero._config import ZeroConfig
from jzero._grads import check_batch
from jzero._mesh import AnyMesh, make_mesh
from jzero._train_step import TrainStep, make_train_step
from jzero.analysis.analyze import this_machine
from jzero.analysis.machines import Machine, machine
from jzero.analysis.memory import memory_of
from jzero.analysis.placing import abstract_mesh, plan_of_argument, relaid
from jzero.analysis.step_memory import StepMemory, memory_of_trace
from jzero.analysis.table import format_bytes, format_rows
from jzero.analysis.topologies import topology_devices, topology_options

__all__ = ["Candidate", "Fit", "fit"]

Stage: TypeAlias = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
USABLE = 0.9
"""Share of a machine's memory that is planned with: its runtime, its collectives and fragmentation take some, too."""
NEARLY = 1.01
"""What differs by less counts as equal."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
      config: What to partition, and how.
      mesh_shape: The size of each mesh axis.
      accumulate_steps: For `make_train_step`.
      remat: For `make_train_step`.
      memory: What it needs as reckoned.
      compiled_peak: What it needs as compiled; `None` if it was not.
      verdict: Why it was chosen or passed over.
    """

    config: ZeroConfig
    mesh_shape: dict[str, int] = dataclasses.field(hash=False)
    accumulate_steps: int
    remat: bool | None
    memory: StepMemory
    compiled_peak: int | None = None
    verdict: str = ""

    @property
    def peak(self) -> int:
        """Bytes on one device: as compiled if that is known, else as reckoned."""
        return self.memory.peak if self.compiled_peak is None else self.compiled_peak

    def cost(self) -> float:
        """What it costs in communication: seconds, or bytes where no rates are known."""
        seconds = self.memory.communication_seconds
        return self.memory.sent_bytes if seconds is None else seconds

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "stage": self.config.stage,
            "persistence_threshold": self.config.persistence_threshold,
            "mesh": self.mesh_shape,
            "accumulate_steps": self.accumulate_steps,
            "remat": self.remat,
            "reckoned_peak": self.memory.peak,
            "compiled_peak": self.compiled_peak,
            "sent_bytes": self.memory.sent_bytes,
            "communication_seconds": self.memory.communication_seconds,
            "flops": self.memory.flops,
            "verdict": self.verdict,
        }


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `fit` found; `print` it for a table of what was tried.

    Attributes:
      machine: What it is for.
      limit: Bytes on one device that a step may take.
      tried: Every candidate, the cheapest in communication first.
      chosen: The first of them that fits, or `None`.
      notes: What could not be done.

    Example:
      >>> make_state = lambda key: plain_state
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> choice = jzero.fit(make_state, loss_fn, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> choice.config.stage, choice.accumulate_steps
      (0, 1)
    """

    machine: str
    limit: int
    tried: tuple[Candidate, ...]
    chosen: Candidate | None
    notes: tuple[str, ...]

    @property
    def _choice(self) -> Candidate:
        if self.chosen is None:
            raise ValueError(self._headline())
        return self.chosen

    @property
    def config(self) -> ZeroConfig:
        """The configuration to train with; raises a `ValueError` if nothing fits."""
        return self._choice.config

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The mesh to train on, for `make_mesh(**choice.mesh_shape)`."""
        return self._choice.mesh_shape

    @property
    def accumulate_steps(self) -> int:
        """For `make_train_step`."""
        return self._choice.accumulate_steps

    @property
    def remat(self) -> bool | None:
        """For `make_train_step`."""
        return self._choice.remat

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        data = {
            "machine": self.machine,
            "limit": self.limit,
            "chosen": self.chosen and self.chosen.to_dict(),
            "tried": [candidate.to_dict() for candidate in self.tried],
            "notes": self.notes,
        }
        return json.dumps(data, indent=2)

    def _headline(self) -> str:
        if self.chosen is not None:
            x = self.chosen
            how = "reckoned" if x.compiled_peak is None else "compiled"
            sizes = f"{format_bytes(x.peak)} ({how}) of {format_bytes(self.limit)} per device"
            return f"{self.machine}: {_describe(x)} fits: {sizes}"
        least = min(self.tried, key=lambda x: x.peak)
        excess = f"{format_bytes(least.peak - self.limit)} more than the {format_bytes(self.limit)} there are"
        need = f"{_describe(least)} with {format_bytes(least.peak)} per device"
        return f"{self.machine}: nothing fits. The least is {need}, {excess}."

    def __str__(self) -> str:
        header = ("stage", "mesh", "micro-batches", "remat", "whole up to", "reckoned", "compiled", "sends", "verdict")
        rows = [
            (
                str(x.config.stage),
                ",".join(f"{name}={size}" for name, size in x.mesh_shape.items()),
                str(x.accumulate_steps),
                {None: "", True: "loops", False: "none"}[x.remat],
                f"{x.config.persistence_threshold:,}",
                format_bytes(x.memory.peak),
                "" if x.compiled_peak is None else format_bytes(x.compiled_peak),
                format_bytes(x.memory.sent_bytes),
                x.verdict,
            )
            for x in self.tried
        ]
        table = format_rows([header, *rows], left=4, last_left=True)
        return "\n".join([self._headline(), "", *table, *([""] if self.notes else []), *self.notes])


def fit(  # noqa: PLR0913  # what is searched, and what is not
    make_state: Callable[[jax.Array], Any] | Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    topology: str | None = None,
    hbm_bytes: int | None = None,
    config: ZeroConfig | None = None,
    stages: Sequence[Stage] = STAGES,
    remat: Sequence[bool | None] = (None, True),
    max_accumulate_steps: int = 64,
    has_aux: bool = False,
    rng: Any = None,
    confirm: bool = True,
) -> Fit:
    """Finds the cheapest way to train a model that fits a machine.

    Searched are stage, replicas (one per host where there are several), micro-batches, recomputation, and at last
    smaller parameters cut as well, by `estimate_step_memory`. Cheapest is what takes least time in communication; of
    equals what computes least, has the fewest micro-batches and the lowest stage. The choice, and the cheaper candidate
    next to it that does not fit, are then compiled, and the compiler's figures decide. Offload is not searched.

    Args:
      make_state: From a PRNG key to a train state, as for `init_train_state`, or a state, concrete or abstract.
      loss_fn: As for `make_train_step`.
      batch: The global batch, concrete or abstract.
      topology: The machine, such as `"h200:8"`; by default the devices of this process.
      hbm_bytes: What a step may take of one device's memory. By default 90 % of what the machine has.
      config: Everything that is not searched, such as the precision.
      stages: The stages to search.
      remat: What to try for `make_train_step(remat=...)`; `None` is the loss as it is.
      max_accumulate_steps: The most micro-batches to try.
      has_aux: As for `make_train_step`.
      rng: As the step is called with it.
      confirm: Whether to compile. Without it, or without the compiler of `topology`, the figures are reckoned, and can
        be wrong by 10 % and more.

    Returns:
      A `Fit`. If nothing fits, `chosen` is `None`, and what was tried says by how much.

    Raises:
      ValueError: There is no such machine, its memory is not known, or the batch cannot be split over it.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> choice = jzero.fit(plain_state, loss_fn, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> new_state = jzero.shard_train_state(plain_state, config=choice.config)
      >>> step = jzero.make_train_step(loss_fn, accumulate_steps=choice.accumulate_steps, remat=choice.remat)
    """
    hardware, devices, notes = _hardware(topology, confirm=confirm)
    num_devices = hardware.num_devices if hardware is not None else len(devices or jax.devices())
    limit = _limit(hbm_bytes, hardware, devices)
    base = config or ZeroConfig(stage=0)
    state = jax.eval_shape(make_state, jax.random.key(0)) if callable(make_state) else make_state
    search = _Search(loss_fn, has_aux, batch, rng, topology, hardware, devices, num_devices, base, limit)
    tried = search.candidates(state, stages, remat, max_accumulate_steps)
    tried.sort(key=_order)
    if devices is not None and confirm:
        tried = search.confirmed(state, tried)
    chosen = next((x for x in tried if x.peak <= limit), None)
    name = hardware.name if hardware is not None else f"{num_devices} {jax.devices()[0].device_kind} devices"
    judged = tuple(_judged(tried, chosen, limit))
    return Fit(name, limit, judged, next((x for x in judged if x.peak <= limit), None), tuple(notes))


def _hardware(topology: str | None, *, confirm: bool) -> tuple[Machine | None, list[jax.Device] | None, list[str]]:
    """Returns what is known of a machine, its devices if its compiler is there, and notes."""
    if topology is None:
        devices = jax.devices()
        return this_machine(devices), devices, []
    hardware = machine(topology)
    if not confirm:
        return hardware, None, ["Nothing was compiled: the figures are reckoned."]
    try:
        return hardware, topology_devices(topology), []
    except ImportError as error:
        return hardware, None, [f"Nothing was compiled, so the figures are reckoned. {error}"]


def _limit(hbm_bytes: int | None, hardware: Machine | None, devices: list[jax.Device] | None) -> int:
    if hbm_bytes is not None:
        if isinstance(hbm_bytes, bool) or not hbm_bytes > 0:
            raise ValueError(f"`hbm_bytes` must be a number of bytes > 0: got {hbm_bytes!r}.")
        return int(hbm_bytes)
    if hardware is not None:
        return int(USABLE * hardware.hbm_bytes)
    stats = devices[0].memory_stats() if devices else None
    if not stats or "bytes_limit" not in stats:
        raise ValueError("The memory of these devices is not known: pass `hbm_bytes=`, or a `topology`.")
    return int(stats["bytes_limit"])


def _order(x: Candidate) -> tuple[float, float, int, int, int]:
    """Communication first, to within a percent; then arithmetic, micro-batches, stage."""
    return (_round_to(x.cost()), _round_to(x.memory.flops), x.accumulate_steps, x.config.stage,
            -x.config.persistence_threshold)  # fmt: skip


def _round_to(x: float, digits: int = 2) -> float:
    """Returns a number to so many digits."""
    return float(f"{x:.{digits - 1}e}")


@dataclasses.dataclass(frozen=True)
class _Search:
    loss_fn: Callable[..., Any]
    has_aux: bool
    batch: Any
    rng: Any
    topology: str | None
    hardware: Machine | None
    devices: list[jax.Device] | None
    num_devices: int
    base: ZeroConfig
    limit: int

    def candidates(
        self, state: Any, stages: Sequence[Stage], remat: Sequence[bool | None], max_steps: int
    ) -> list[Candidate]:
        """Reckons every layout; micro-batches only until one fits."""
        found: list[Candidate] = []
        thresholds = (self.base.persistence_threshold, 0)
        for threshold in dict.fromkeys(thresholds):
            layouts = itertools.product(stages, self._replicas(), self._remats(state, remat))
            for stage, num_replicas, recompute in layouts:
                if (stage == 0 and num_replicas > 1) or (stage < 3 and threshold != thresholds[0]):
                    continue
                config = dataclasses.replace(
                    self.base,
                    stage=stage,
                    persistence_threshold=threshold,
                    replica_axis="replica" if num_replicas > 1 else self.base.replica_axis,
                )
                found += self._micro_batches(state, config, num_replicas, recompute, max_steps)
            if any(x.peak <= self.limit for x in found):
                break
        return found

    def _replicas(self) -> list[int]:
        if self.hardware is None or self.base.replica_axis is not None:
            return [1]
        return sorted({1, self.hardware.num_devices // self.hardware.devices_per_node})

    def _remats(self, state: Any, remat: Sequence[bool | None]) -> list[bool | None]:
        """Those that change something, judging by the arithmetic of one device."""
        flops: dict[float, bool | None] = {}
        config = dataclasses.replace(self.base, stage=0)
        placed = relaid(state, mesh=self._mesh(config, 1), config=config)
        for recompute in remat:
            memory = self._memory(self._step(1, recompute), placed)
            flops.setdefault(memory.flops, recompute)
        return list(flops.values())

    def _micro_batches(
        self, state: Any, config: ZeroConfig, num_replicas: int, recompute: bool | None, max_steps: int
    ) -> Iterator[Candidate]:
        mesh = self._mesh(config, num_replicas)
        placed = relaid(state, mesh=mesh, config=config)
        plan = plan_of_argument(placed)
        assert plan is not None
        for steps in _powers_of_two(max_steps):
            try:
                check_batch(self.batch, plan, steps)
            except ValueError:
                if steps == 1:
                    raise
                return
            memory = self._memory(self._step(steps, recompute), placed)
            shape = {str(name): int(size) for name, size in mesh.shape.items()}
            yield Candidate(config, shape, steps, recompute, memory)
            if memory.peak <= self.limit or memory.arguments > self.limit:
                return

    def confirmed(self, state: Any, tried: list[Candidate]) -> list[Candidate]:
        """Compiles the first that fits and the one before it, until the compiler agrees with both."""
        tried = list(tried)
        while True:
            chosen = next((i for i, x in enumerate(tried) if x.peak <= self.limit), None)
            asked = [i for i in (chosen, None if chosen is None else chosen - 1) if i is not None and i >= 0]
            if chosen is None and tried:  # is the least really too much?
                asked = [min(range(len(tried)), key=lambda i: tried[i].peak)]
            open_ones = [i for i in asked if tried[i].compiled_peak is None]
            if not open_ones:
                return tried
            for i in open_ones[:1]:
                tried[i] = dataclasses.replace(tried[i], compiled_peak=self._compiled_peak(state, tried[i]))

    def _compiled_peak(self, state: Any, x: Candidate) -> int:
        assert self.devices is not None
        mesh = make_mesh(devices=self.devices, **x.mesh_shape)
        placed = relaid(state, mesh=mesh, config=x.config)
        lowered = self._step(x.accumulate_steps, x.remat).lower(placed, self.batch, rng=self.rng)
        try:
            options = topology_options(self.topology) if self.topology is not None else None
            return memory_of(lowered.compile(options or None), self.devices[0].platform).peak
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return max(x.memory.peak, self.limit + 1)  # the TPU compiler refuses what does not fit

    def _memory(self, step: TrainStep, placed: Any) -> StepMemory:
        plan = plan_of_argument(placed)
        assert plan is not None
        traced = step.trace(placed, self.batch, rng=self.rng)
        arguments = step.abstract_arguments(placed, self.batch, rng=self.rng)
        return memory_of_trace(traced, arguments, plan, self.hardware, gpu=self._gpu)

    def _step(self, steps: int, recompute: bool | None) -> TrainStep:
        return make_train_step(self.loss_fn, self.has_aux, accumulate_steps=steps, remat=recompute)

    def _mesh(self, config: ZeroConfig, num_replicas: int) -> AnyMesh:
        axes = {config.axis: self.num_devices // num_replicas}
        if num_replicas > 1:
            axes = {"replica": num_replicas, **axes}
        if self.devices is None:
            return abstract_mesh(self.num_devices, axes)
        mesh: Mesh = make_mesh(devices=self.devices, **axes)
        return mesh

    @property
    def _gpu(self) -> bool:
        return self.hardware is not None and self.hardware.kind == "gpu"


def _powers_of_two(most: int) -> Iterator[int]:
    steps = 1
    while steps <= most:
        yield steps
        steps *= 2


def _judged(tried: Sequence[Candidate], chosen: Candidate | None, limit: int) -> Iterator[Candidate]:
    for x in tried:
        if x is chosen:
            verdict = "chosen"
        elif x.peak > limit:
            verdict = f"{format_bytes(x.peak - limit)} too much"
        else:
            assert chosen is not None
            verdict = _why_not(x, chosen)
        yield dataclasses.replace(x, verdict=verdict)


def _why_not(x: Candidate, chosen: Candidate) -> str:
    if x.cost() > NEARLY * chosen.cost():
        return f"fits; {x.cost() / max(chosen.cost(), 1e-30):.2f}x the communication"
    if x.memory.flops > NEARLY * chosen.memory.flops:
        return f"fits; {x.memory.flops / max(chosen.memory.flops, 1):.2f}x the arithmetic"
    if x.accumulate_steps > chosen.accumulate_steps:
        return "fits; more micro-batches"
    return "fits; a higher stage for nothing"


def _describe(x: Candidate) -> str:
    parts = [f"stage {x.config.stage}"]
    if x.mesh_shape.get("replica", 1) > 1:
        parts.append(f"{x.mesh_shape['replica']} replicas")
    if x.accumulate_steps > 1:
        parts.append(f"{x.accumulate_steps} micro-batches")
    if x.remat is not None:
        parts.append("loops recomputed" if x.remat else "nothing recomputed")
    return ", ".join(parts)
