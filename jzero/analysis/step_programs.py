"""The programs of a training step: one, or those around its passes over records, in their order.

    step_programs(fn, args, keywords, platform, compile_) -> list[StepProgram]

Each is traced and compiled, with the memory of a device while it runs beside the results of others. See
[Note: Records outside of a program] in `jzero.core.records.run`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jzero.analysis.hlo import HloProgram, parse_hlo
from jzero.analysis.memory import Memory, compiled_memory
from jzero.analysis.replanning import plan_of_argument
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.layout.box import Box
from jzero.core.layout.mesh import platform_of
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.record_states import detached
from jzero.core.step.inputs import bytes_on_device, optional_rng
from jzero.core.step.record_step import RecordStep
from jzero.core.step.train_step import TrainStep
from jzero.core.update.kernels import PartKernel, SumTarget
from jzero.core.update.program import UpdateProgram
from jzero.core.update.run import Done, Operands
from jzero.core.update.whole import Grad, StepGrads
from jzero.estimate.step_memory import arrays_on_host

Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]


class StepProgram(NamedTuple):
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
    def program(self) -> HloProgram:
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


def memory_of_programs(programs: Sequence[StepProgram], plan: ZeroPlan) -> Memory:
    """Returns the memory of a step in several programs: arguments of the first, results of the last, the largest peak.

    Args:
      programs: The programs.
      plan: The plan of the state.
    """
    first, last, peak = programs[0].memory, programs[-1].memory, max(x.peak for x in programs)
    arguments = first.arguments + programs[0].beside
    return dataclasses.replace(
        last,
        arguments=arguments,
        temporaries=max(0, peak - arguments - last.outputs + last.aliased),
        peak=peak,
        host=last.host + plan.host_bytes_per_device.total - arrays_on_host(plan),
    )


def step_programs(
    fn: Any, args: Sequence[Any], keywords: Mapping[str, Any], platform: str, compile_: Compile
) -> list[StepProgram]:
    """Returns the programs of a step, or the one of a jitted function.

    Args:
      fn: The step or function.
      args: Its arguments.
      keywords: Likewise.
      platform: The platform of the devices.
      compile_: Compiles a lowered program.
    """
    plan = plan_of_argument(args[0]) if args else None
    if plan is not None and plan.has_records and isinstance(fn, TrainStep):
        state, batch, rng = fn.abstract_arguments(*args, **keywords)
        return _StepPrograms(fn.program(state), detached(state), compile_).all(batch, rng)
    traced = fn.trace(*args, **keywords)
    lowered = traced.lower()
    compiled = compile_(lowered)
    host_state = arrays_on_host(plan) if plan is not None and isinstance(fn, TrainStep) else 0
    return [StepProgram("the step", traced, lowered, compiled, compiled_memory(compiled, platform, host_state))]


def check_update_of(step: TrainStep, state: State, batch: PyTree, rng: jax.Array | None) -> None:
    """Raises a `ValueError` if the optimizer of a state in records cannot update it there; compiles nothing."""
    state, batch, rng = step.abstract_arguments(state, batch, rng=rng)
    of_step, state = step.program(state), detached(state)
    step_grads, _, _ = of_step.gradients.trace(state, batch, **optional_rng(rng)).out_info
    of_step.update.program(state, step_grads)


class _Largest(NamedTuple):
    """The largest record that a program computes: its kernel, its other operands, its place in a part."""

    kernel: PartKernel
    operands: Operands
    place: Box


class _PassResults(NamedTuple):
    """The results of passes over records, for the rest of the update.

    Attributes:
      done: Their results, as shapes.
      num_bytes: Bytes on a device.
    """

    done: Done
    num_bytes: int


class _StepPrograms:
    """Traces and compiles the programs of an `RecordStep` as it would run them."""

    def __init__(self, step: RecordStep, state: TrainStateLike, compile_: Compile) -> None:
        self.step, self.update, self.state = step, step.update, state
        self.plan: ZeroPlan = state.tx.plan
        self.compile = compile_
        self.device = self.plan.mesh.devices.flat[0]

    def all(self, batch: PyTree, rng: jax.Array | None) -> list[StepProgram]:
        """Returns the programs in their order."""
        plan = self.plan
        # If programs do not distinguish host memory, neither do shapes.
        live = bytes_on_device((self.state, batch, rng)) - (0 if plan.names_host_memory else arrays_on_host(plan))
        traced = self.step.gradients.trace(self.state, batch, **optional_rng(rng))
        first = self._step_program("loss and gradients", traced, live, takes_params=True)
        step_grads, changed, _ = first.results
        passes, results = self._passes(step_grads, live + bytes_on_device((step_grads, changed)))
        ready = step_grads if results.done.program.needs_grads else self._near(step_grads)
        current = step_grads.without_grads if plan.config.offload.delay else ready
        done = dataclasses.replace(results.done, grads=ready)
        traced = self.update.finish.trace(self.state, current, changed, done)
        return [
            first,
            *passes,
            self._step_program("the rest of the update", traced, results.num_bytes, takes_params=True),
        ]

    def _passes(self, step_grads: StepGrads, live: int) -> tuple[list[StepProgram], _PassResults]:
        """Returns the programs of all passes, and their results; `live` bytes are on a device before."""
        programs: list[StepProgram] = []
        sums: dict[int, PyTree] = {}
        program, replicated = self.update.program(self.state, step_grads), self.plan.whole_sharding
        for level in range(program.num_levels + 1):
            traced = self.update.scalars.trace(program, level, self.state, step_grads, sums)
            programs.append(self._step_program("numbers of the update", traced, live))
            operands, sums = programs[-1].results
            kernels = program.passes[level]
            done = Done(program, step_grads, sums, self._results(kernels))
            beside = live + bytes_on_device((operands, sums)) + bytes_on_device(done.params)
            if self.plan.config.offload.compute == "device":
                programs += [x._replace(beside=beside) for x in self._records(program, level, operands, step_grads)]
            targets = [x for kernel in kernels for x in kernel.targets if isinstance(x, SumTarget)]
            sums = sums | {x.number: jax.ShapeDtypeStruct((), x.dtype, sharding=replicated) for x in targets}
        return programs, _PassResults(done, beside)

    def _records(
        self, program: UpdateProgram, level: int, operands: Sequence[Operands], step_grads: StepGrads
    ) -> list[StepProgram]:
        """Returns the programs of a pass over records, each for the largest record that it computes."""
        largest: dict[Any, _Largest] = {}
        for kernel, of_kernel in zip(program.passes[level], operands, strict=True):
            compute = self.update.programs.of(program, kernel)
            place = max(self.plan.record_boxes(kernel.param), key=lambda x: x.size)
            if compute not in largest or largest[compute].place.size < place.size:
                largest[compute] = _Largest(kernel, of_kernel, place)
        times = 2 * self.plan.config.offload.disk_threads + 1
        traces = [compute.trace(*self._operands(x, step_grads), shape=x.place.shape) for compute, x in largest.items()]
        return [self._step_program("records", traced)._replace(times=times) for traced in traces]

    def _operands(self, record: _Largest, step_grads: StepGrads) -> tuple[PyTree, ...]:
        """Returns the operands of the program of a record on one device, as shapes."""
        (kernel, operands, place), at = record, SingleDeviceSharding(self.device)
        sources: dict[str, Sequence[Any]] = {
            "record": self.plan.record_fields[kernel.param],
            "array": operands.arrays,
            "grads": [step_grads.grads[kernel.param].reduced],
            "params": [self.plan.view.params.flat(self.state.params)[kernel.param]],
            "scalar": operands.scalars,
        }

        def shapes(kinds: Sequence[str], shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
            dtypes = [sources[x.kind][x.number].dtype for x in kernel.sources if x.kind in kinds]
            return [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for dtype in dtypes]

        start = jax.ShapeDtypeStruct((len(place.shape),), np.int32, sharding=at)
        fields, slices = shapes(["record"], place.shape), shapes(["array", "grads", "params"], place.shape)
        return fields, slices, shapes(["scalar"], ()), start

    def _results(self, kernels: Sequence[PartKernel]) -> dict[int, PyTree]:
        """Returns the new parameters that a pass makes, as shapes."""
        new_params = {}
        for kernel in kernels:
            leaf = self.plan.leaves[kernel.param]
            stored = dataclasses.replace(leaf.grad, memory=leaf.param.array_memory)
            sharding = stored.sharding
            for dtype in kernel.targets:
                if not isinstance(dtype, int | SumTarget):
                    new_params[kernel.param] = jax.ShapeDtypeStruct(stored.stored_shape, dtype, sharding=sharding)
        return new_params

    def _near(self, step_grads: StepGrads) -> StepGrads:
        """Returns the gradients without those that only records need."""
        in_records = self.plan.record_fields
        grads: PyTree = [Grad(None, g.factors) if i in in_records else g for i, g in enumerate(step_grads.grads)]
        return step_grads._replace(grads=grads)

    def _step_program(
        self, name: str, traced: jax.stages.Traced, live: int = 0, *, takes_params: bool = False
    ) -> StepProgram:
        """Compiles a program, beside which `live` bytes are on a device, its arguments among them."""
        lowered = traced.lower()
        compiled = self.compile(lowered)
        memory = compiled_memory(compiled, platform_of(self.device), arrays_on_host(self.plan) if takes_params else 0)
        return StepProgram(name, traced, lowered, compiled, memory, max(0, live - memory.arguments))
