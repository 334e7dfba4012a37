"""The programs of a training step: one, or those around its passes over records, in their order.

In: a step and its arguments. Out: every program, traced and compiled, and the memory of a device while it runs, with
the results of other programs. See [Note: Records outside of a program] in `jzero.update.records`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jzero._types import PyTree, State, TrainStateLike
from jzero.analysis.hlo import Program, parse_hlo
from jzero.analysis.memory import Memory, memory_of
from jzero.analysis.relocation import plan_of_argument
from jzero.jaxpr.sizes import array_bytes
from jzero.layout.mesh import HOST_MEMORY, platform_of
from jzero.layout.records import Rectangle
from jzero.plan.plan import ZeroPlan
from jzero.state.disk import detached
from jzero.state.next_state import StepGrads
from jzero.step.inputs import optional_rng
from jzero.step.outside import OutsideStep
from jzero.step.train_step import TrainStep
from jzero.update.find_visits import NextPass
from jzero.update.visits import FromDisk, SumTarget, Visit, VisitOperands
from jzero.update.whole import Grad

Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]


class Stage(NamedTuple):
    """A program of a step.

    Attributes:
      name: What it computes.
      traced: The traced program.
      lowered: The lowered program.
      compiled: The compiled program.
      memory: Its memory by itself.
      beside: Bytes of other arrays on a device while it runs.
      times: How many runs of it a device has in flight.
    """

    name: str
    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    memory: Memory
    beside: int = 0
    times: int = 1

    @property
    def peak(self) -> int:
        """The most bytes on a device while it runs."""
        return self.beside + self.times * self.memory.peak

    @property
    def program(self) -> Program:
        """The compiled program as data."""
        logging.getLogger("jzero").info("Reading the program of %s.", self.name)
        text = self.compiled.as_text()
        assert text is not None
        return parse_hlo(text)

    @property
    def results(self) -> PyTree:
        """Its results, as shapes with shardings."""

        def shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(shape, self.lowered.out_info, self.compiled.output_shardings)


def arrays_on_host(plan: ZeroPlan) -> int:
    """Returns the bytes of one device's arrays in host memory; no program sees records."""
    host = plan.host_bytes_per_device
    return host.params if plan.has_files else host.total


def memory_of_stages(stages: Sequence[Stage], plan: ZeroPlan) -> Memory:
    """Returns the memory of a step in several programs: arguments of the first, results of the last, the largest peak.

    Args:
      stages: The programs.
      plan: The plan of the state.
    """
    first, last, peak = stages[0].memory, stages[-1].memory, max(x.peak for x in stages)
    arguments = first.arguments + stages[0].beside
    return dataclasses.replace(
        last,
        arguments=arguments,
        temporaries=max(0, peak - arguments - last.outputs + last.aliased),
        peak=peak,
        host=last.host + plan.host_bytes_per_device.total - arrays_on_host(plan),
    )


def stages_of(
    fn: Any, args: Sequence[Any], keywords: Mapping[str, Any], platform: str, compile_: Compile
) -> list[Stage]:
    """Returns the programs of a step, or the one of a jitted function.

    Args:
      fn: The step or function.
      args: Its arguments.
      keywords: Likewise.
      platform: The platform of the devices.
      compile_: Compiles a lowered program.
    """
    plan = plan_of_argument(args[0]) if args else None
    if plan is not None and plan.has_files and isinstance(fn, TrainStep):
        state, batch, rng = fn.abstract_arguments(*args, **keywords)
        return _Stages(fn.program(state), detached(state), compile_).all(batch, rng)
    traced = fn.trace(*args, **keywords)
    lowered = traced.lower()
    compiled = compile_(lowered)
    host_state = arrays_on_host(plan) if plan is not None and isinstance(fn, TrainStep) else 0
    return [Stage("the step", traced, lowered, compiled, memory_of(compiled, platform, host_state))]


def check_on_records(step: TrainStep, state: State, batch: PyTree, rng: jax.Array | None) -> None:
    """Raises a `ValueError` if the optimizer of a state in records cannot update it there; compiles nothing."""
    state, batch, rng = step.abstract_arguments(state, batch, rng=rng)
    outside, state = step.program(state), detached(state)
    step_grads, _, _ = outside.gradients.trace(state, batch, **optional_rng(rng)).out_info
    outside.update.next_pass.trace(state, step_grads, {})


class _Largest(NamedTuple):
    """The largest record that a program computes: its visit, its other operands, its place in a part."""

    visit: Visit
    operands: VisitOperands
    place: Rectangle


class _PassResults(NamedTuple):
    """The results of passes over records, for the rest of the update.

    Attributes:
      disk: Their results, as shapes.
      needs_grads: Whether the rest needs gradients of parameters in records.
      num_bytes: Bytes on a device.
    """

    disk: FromDisk
    needs_grads: bool
    num_bytes: int


class _Stages:
    """Traces and compiles the programs of an `OutsideStep` as it would run them."""

    def __init__(self, outside: OutsideStep, state: TrainStateLike, compile_: Compile) -> None:
        self.outside, self.update, self.state = outside, outside.update, state
        self.plan: ZeroPlan = state.tx.plan
        self.compile = compile_
        self.device = self.plan.mesh.devices.flat[0]

    def all(self, batch: PyTree, rng: jax.Array | None) -> list[Stage]:
        """Returns the programs in their order."""
        plan = self.plan
        # If programs do not distinguish host memory, neither do shapes.
        live = _num_bytes((self.state, batch, rng)) - (0 if plan.names_host_memory else arrays_on_host(plan))
        traced = self.outside.gradients.trace(self.state, batch, **optional_rng(rng))
        first = self._stage("loss and gradients", traced, live, takes_params=True)
        step_grads, changed, _ = first.results
        passes, results = self._passes(step_grads, live + _num_bytes((step_grads, changed)))
        ready = step_grads if results.needs_grads else self._near(step_grads)
        current = step_grads._replace(grads=[]) if plan.config.offload.delay else ready
        traced = self.update.rest.trace(self.state, current, changed, ready, results.disk)
        return [first, *passes, self._stage("the rest of the update", traced, results.num_bytes, takes_params=True)]

    def _passes(self, step_grads: StepGrads, live: int) -> tuple[list[Stage], _PassResults]:
        """Returns the programs of all passes, and their results; `live` bytes are on a device before."""
        stages: list[Stage] = []
        sums: dict[int, PyTree] = {}
        while True:
            traced = self.update.next_pass.trace(self.state, step_grads, sums)
            stages.append(self._stage("numbers of the update", traced, live))
            found: NextPass = stages[-1].results
            visits, sums = found.programs.visits, found.sums
            disk = FromDisk(sums, self._results(visits))
            results = _PassResults(disk, found.needs_grads, live + _num_bytes(found))
            results = results._replace(num_bytes=results.num_bytes + _num_bytes(results.disk.results))
            if self.plan.config.offload.compute == "device":
                records = self._records(found, step_grads)
                stages += [x._replace(beside=results.num_bytes) for x in records]
            targets = [x for visit in visits for x in visit.targets if isinstance(x, SumTarget)]
            if not targets:
                break
            replicated = self.plan.whole_sharding
            sums = sums | {x.number: jax.ShapeDtypeStruct((), x.dtype, sharding=replicated) for x in targets}
        return stages, results

    def _records(self, found: NextPass, step_grads: StepGrads) -> list[Stage]:
        """Returns the programs of a pass over records, each for the largest record that it computes."""
        largest: dict[Any, _Largest] = {}
        for visit, operand in zip(found.programs.visits, found.operands, strict=True):
            program = found.programs.compute(visit)
            place = max(self.plan.records_of(visit.param), key=lambda x: x.size)
            if program not in largest or largest[program].place.size < place.size:
                largest[program] = _Largest(visit, operand, place)
        times = 2 * self.plan.config.offload.disk_threads + 1
        traces = [program.trace(*self._operands(x, step_grads), shape=x.place.shape) for program, x in largest.items()]
        return [self._stage("records", traced)._replace(times=times) for traced in traces]

    def _operands(self, record: _Largest, step_grads: StepGrads) -> tuple[PyTree, ...]:
        """Returns the operands of the program of a record on one device, as shapes."""
        (visit, operands, place), at = record, SingleDeviceSharding(self.device)
        sources: dict[str, Sequence[Any]] = {
            "disk": self.plan.disk_fields[visit.param],
            "near": operands.near,
            "grads": [step_grads.grads[visit.param].reduced],
            "params": [self.plan.flat_params(self.state.params)[visit.param]],
            "number": operands.numbers,
        }

        def shapes(kinds: Sequence[str], shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
            dtypes = [sources[x.kind][x.number].dtype for x in visit.sources if x.kind in kinds]
            return [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for dtype in dtypes]

        start = jax.ShapeDtypeStruct((len(place.shape),), np.int32, sharding=at)
        fields, slices = shapes(["disk"], place.shape), shapes(["near", "grads", "params"], place.shape)
        return fields, slices, shapes(["number"], ()), start

    def _results(self, visits: Sequence[Visit]) -> dict[int, PyTree]:
        """Returns the new parameters that a pass makes, as shapes."""
        new_params = {}
        for visit in visits:
            leaf = self.plan.leaves[visit.param]
            stored = dataclasses.replace(leaf.grad, memory=leaf.param.array_memory)
            sharding = stored.sharding
            for dtype in visit.targets:
                if not isinstance(dtype, int | SumTarget):
                    new_params[visit.param] = jax.ShapeDtypeStruct(stored.stored_shape, dtype, sharding=sharding)
        return new_params

    def _near(self, step_grads: StepGrads) -> StepGrads:
        """Returns the gradients without those that only records need."""
        far = self.plan.disk_fields
        grads: PyTree = [Grad(None, g.factors) if i in far else g for i, g in enumerate(step_grads.grads)]
        return step_grads._replace(grads=grads)

    def _stage(self, name: str, traced: jax.stages.Traced, live: int = 0, *, takes_params: bool = False) -> Stage:
        """Compiles a program, beside which `live` bytes are on a device, its arguments among them."""
        lowered = traced.lower()
        compiled = self.compile(lowered)
        memory = memory_of(compiled, platform_of(self.device), arrays_on_host(self.plan) if takes_params else 0)
        return Stage(name, traced, lowered, compiled, memory, max(0, live - memory.arguments))


def _num_bytes(tree: PyTree) -> int:
    """Returns the bytes of arrays on one device, given as shapes with shardings."""
    near = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != HOST_MEMORY]
    return sum(array_bytes(math.prod(x.sharding.shard_shape(x.shape)), x.dtype) for x in near)
