"""Runs an update's passes over records, outside of `jit`.

    work = RecordPass(records, programs, program, level, operands, arrays)
    work.run()                          new records, in the store's other slot
    work.results(), work.sums()         new parameters; numbers over all records

Every record has its own call of a jitted program, on the device whose part it is or on the host's CPU; Python drives it
while other records are read and written.

[Note: Records outside of a program]
A program of XLA should not wait for a disk: its callbacks stall a device, and what they raise ends the process. Only
rows of parameters, which it needs in between, are read so, see [Note: Rows for programs]. So a step with state on disk
runs several programs. The first computes loss and gradients and keeps the old state. The numbers of
the update (counters, learning rates, norms) come next, then this pass, then the rest of the state. Parameters with
equal updates share a program, and each shape of records has its own.

    update = RecordUpdate(tx, next_state, with_params)
    program = update.program(state, grads)                                analysed, from shapes
    operands, sums = update.scalars(program, level, state, grads, sums)   what a pass reads beside records
    state = update.finish(state, grads, changed, done)                    after the last pass
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jzero.core.base import compat
from jzero.core.base.types import PyTree, State
from jzero.core.config.precision import wide_dtype
from jzero.core.disk.pipeline import Pipeline, RunStats
from jzero.core.engine.written_variables import Changed
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import on_device
from jzero.core.plan.plan import ZeroPlan
from jzero.core.records.records import Records, first_holders
from jzero.core.update.columns import update_columns
from jzero.core.update.kernels import Part, PartKernel, SumTarget
from jzero.core.update.program import UpdateProgram, inputs_of, record_program
from jzero.core.update.run import Done, Operands, Run
from jzero.core.update.split import REDUCTIONS
from jzero.core.update.transformation import ZeroTransformation
from jzero.core.update.whole import Grad, StepGrads

PartsOnHost: TypeAlias = Mapping[jax.Device, jax.Array | np.ndarray]
RecordResult: TypeAlias = tuple[list[jax.Array], list[jax.Array], list[jax.Array]]
"""The new fields, the results and the numbers of a record."""


class StepArrays(NamedTuple):
    """Arrays of a step that kernels read, as stored: reduced gradients and parameters, by the parameter's number.

    Gradients may be parts on the host, by device.
    """

    grads: Mapping[int, jax.Array | PartsOnHost]
    params: Mapping[int, jax.Array]


class _Call(NamedTuple):
    """The operands of a kernel on one device.

    Attributes:
      arrays: Parts of arrays, one per source that is no field of a record, as stored; of NumPy if the host computes.
      scalars: Its scalars, where the update runs.
      parts: The parts of its results, into which those of records are pasted; NumPy arrays if they come up later.
      sums: Its numbers over the records so far.
    """

    arrays: list[jax.Array | np.ndarray]
    scalars: list[jax.Array]
    parts: list[jax.Array | np.ndarray]
    sums: list[jax.Array]


class RecordPrograms:
    """The jitted programs of records; one for all parameters that compute the same in a program."""

    def __init__(self, plan: ZeroPlan) -> None:
        self.plan = plan
        self._jitted: dict[Hashable, Callable[..., RecordResult]] = {}

    def of(self, program: UpdateProgram, kernel: PartKernel) -> Callable[..., RecordResult]:
        """Returns `_compute` for a kernel of a program."""
        leaf = self.plan.leaves[kernel.param].grad
        targets = tuple(x._replace(number=0) if isinstance(x, SumTarget) else x for x in kernel.targets)
        key = (program, kernel.structure, kernel.sources, targets, leaf.cut, leaf.shape)
        if key not in self._jitted:
            self._jitted[key] = jax.jit(functools.partial(_compute, kernel, leaf), static_argnames="shape")
        return self._jitted[key]


class RecordPass:
    """One pass over the records of a state: first everything that it reads beside them, then `run`, then the results.

    With `Offload(compute="host")`, `run` touches no device, so it can go on in a thread beside a step.

    Args:
      records: The records of the state.
      programs: Their programs.
      program: The update.
      level: Which of its passes.
      operands: What each kernel of the pass reads, as global arrays.
      step_arrays: What else they read.
    """

    def __init__(  # a program and its operands
        self,
        records: Records,
        programs: RecordPrograms,
        program: UpdateProgram,
        level: int,
        operands: Sequence[Operands],
        step_arrays: StepArrays,
    ) -> None:
        kernels = program.passes[level]
        self.records, self.plan = records, records.plan
        self.kernels = {kernel.param: kernel for kernel in kernels}
        self.compute = {kernel.param: programs.of(program, kernel) for kernel in kernels}
        self.cpu = host_cpu() if self.plan.config.offload.compute == "host" else None
        self.calls: dict[tuple[int, jax.Device], _Call] = {}
        for kernel, of_kernel in zip(kernels, operands, strict=True):
            self._prepare(kernel, of_kernel, step_arrays)

    @property
    def writes(self) -> bool:
        """Whether it makes new records, rather than numbers."""
        return not any(isinstance(x, SumTarget) for kernel in self.kernels.values() for x in kernel.targets)

    def run(self, pipeline: Pipeline | None = None) -> RunStats:
        """Visits all records from which something is computed, in their own pipeline or one of a copy.

        New ones are not committed.
        """
        numbers = [n for i in self.kernels for n in self.records.of_param[i]]
        pipeline = self.records.pipeline if pipeline is None else pipeline
        return pipeline.run(self._visit, None if self.writes else numbers, writes=self.writes)

    def _prepare(self, kernel: PartKernel, operands: Operands, step_arrays: StepArrays) -> None:
        """Splits the operands of a kernel over the devices that have a part of its parameter."""
        i, leaf = kernel.param, self.plan.leaves[kernel.param]
        read: dict[str, Callable[[int], jax.Array | PartsOnHost]] = {
            "array": operands.arrays.__getitem__,
            "grads": lambda _: step_arrays.grads[i],
            "params": lambda _: step_arrays.params[i],
        }
        arrays = [_by_device(read[x.kind](x.number)) for x in kernel.sources if x.kind in read]
        counts = [_by_device(operands.scalars[x.number]) for x in kernel.sources if x.kind == "scalar"]
        dtypes = [x for x in kernel.targets if not isinstance(x, int | SumTarget)]
        shape = leaf.grad.part_shape
        on_host = self.cpu is not None or leaf.param.array_memory == "host"
        for device in dict.fromkeys(first_holders(self.plan, leaf.grad).values()):
            at = self.cpu or device
            sums = [
                jax.device_put(np.asarray(REDUCTIONS[x.how].neutral, x.dtype), at)
                for x in kernel.targets
                if isinstance(x, SumTarget)
            ]
            self.calls[i, device] = _Call(
                arrays=[jax.device_get(x[device]) if self.cpu else x[device] for x in arrays],
                scalars=jax.device_put([x[device] for x in counts], at),
                parts=[np.zeros(shape, x) if on_host else _zeros(shape, x, device) for x in dtypes],
                sums=sums,
            )

    def _visit(self, number: int, buffer: np.ndarray) -> Callable[[np.ndarray], None] | None:
        """Starts the computation of a record; returns what waits for it and writes its results into the buffer."""
        record = self.records.index[number]
        kernel = self.kernels.get(record.param)
        if kernel is None:  # nothing changes: the record is copied
            return None
        call, views, place = self.calls[record.param, record.device], self.records.views(number, buffer), record.place
        at, starts = self.cpu or record.device, (np.array(x, np.int32) for x in (place.start, record.stored.start))
        fields = [views[x.number] for x in kernel.sources if x.kind == "record"]
        fields, start, begin = jax.device_put((fields, *starts), at)
        slices = [
            jax.device_put(x[place.slices], at) if isinstance(x, np.ndarray) else _cut(x, start, shape=place.shape)
            for x in call.arrays
        ]
        new, results, sums = self.compute[record.param](fields, slices, call.scalars, begin, shape=place.shape)
        joins = [REDUCTIONS[x.how].join for x in kernel.targets if isinstance(x, SumTarget)]
        call.sums[:] = [join(x, y) for join, x, y in zip(joins, call.sums, sums, strict=True)]
        waits = [isinstance(part, np.ndarray) for part in call.parts]
        for k, x in enumerate(results):
            call.parts[k] = call.parts[k] if waits[k] else _paste(call.parts[k], x, start)
        replaced = [k for k in kernel.targets if isinstance(k, int)]

        def finish(buffer: np.ndarray) -> None:
            for k, x in zip(replaced, new, strict=True):
                views[k][...] = jax.device_get(x)
            for k, x in enumerate(results):
                if waits[k]:
                    call.parts[k][place.slices] = jax.device_get(x)
            jax.block_until_ready(sums)  # the record's bytes may be the operands themselves

        return finish

    def results(self) -> dict[int, jax.Array]:
        """Returns the new parameters, laid out like their gradients."""
        results = {}
        for i in self.kernels:
            leaf = self.plan.leaves[i]
            parts = {d: call.parts[0] for (j, d), call in self.calls.items() if j == i and call.parts}
            if parts:
                results[i] = self.records.assembled(leaf.grad, parts, leaf.param.array_memory)
        return results

    def sums(self) -> dict[int, jax.Array]:
        """Returns the numbers over all records of all processes."""
        sums = {}
        for i, kernel in self.kernels.items():
            targets = [x for x in kernel.targets if isinstance(x, SumTarget)]
            for k, target in enumerate(targets):
                values = {d: call.sums[k] for (j, d), call in self.calls.items() if j == i}
                sums[target.number] = _over_devices(self.plan, self.plan.leaves[i].grad, values, target.how)
        return sums


def host_cpu() -> jax.Device:
    """Returns the host's CPU as a device of jax."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "`Offload(compute='host')` runs on jax's CPU backend, which this program has switched off: add 'cpu' to "
            "`JAX_PLATFORMS` (such as 'cuda,cpu'), or use `compute='device'`."
        ) from error


def _compute(  # noqa: PLR0913  # operands of a program, by kind
    kernel: PartKernel,
    leaf: StateLeaf,
    fields: Sequence[jax.Array],
    slices: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    start: jax.Array,
    *,
    shape: tuple[int, ...],
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Returns the new fields, the results and the numbers of one record.

    Args:
      kernel: What to compute.
      leaf: The layout of the parameter's gradient.
      fields: The fields that it reads, [*shape].
      slices: The same box of arrays, [*shape].
      scalars: 0-d arrays.
      start: Its place in the stored array, int32 [ndim].
      shape: The shape of the record.
    """
    part = Part(leaf, lambda dim: start[dim] + lax.broadcasted_iota(jnp.int32, shape, dim))
    operands = {"record": iter(fields), "array": iter(slices), "scalar": iter(scalars)}
    operands |= {"grads": operands["array"], "params": operands["array"]}
    done = list(zip(kernel.targets, kernel.on(part, lambda x: next(operands[x.kind]), shape), strict=True))
    new = [x for target, x in done if isinstance(target, int)]
    sums = [x for target, x in done if isinstance(target, SumTarget)]
    return new, [x for target, x in done if not isinstance(target, int | SumTarget)], sums


def _zeros(shape: Sequence[int], dtype: DTypeLike, device: jax.Device) -> jax.Array:
    """Returns zeros on a device; `jnp.zeros` sends its scalar there implicitly, see `jax.transfer_guard`."""
    return lax.broadcast(jax.device_put(np.zeros((), dtype), device), shape)


@functools.partial(jax.jit, static_argnames="shape")
def _cut(x: jax.Array, start: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Returns a box of a device's part, in the device's memory."""
    return on_device(lax.dynamic_slice(x, start, shape))


@functools.partial(jax.jit, donate_argnums=0)
def _paste(part: jax.Array, x: jax.Array, start: jax.Array) -> jax.Array:
    """Returns a device's part with a box replaced."""
    return lax.dynamic_update_slice(part, x, start)


def _by_device(x: jax.Array | PartsOnHost) -> PartsOnHost:
    """Returns the parts of an array by device; a dictionary has them already."""
    return x if isinstance(x, Mapping) else {shard.device: shard.data for shard in x.addressable_shards}


def _over_devices(plan: ZeroPlan, leaf: StateLeaf, values: dict[jax.Device, jax.Array], how: str) -> jax.Array:
    """Returns one number over those of all devices, 0-d and on each of them.

    Args:
      plan: The plan.
      leaf: The leaf; each number is one over a part of it.
      values: The numbers of the first devices of this process that have a part.
      how: A primitive of `REDUCTIONS`.
    """
    neutral = REDUCTIONS[how].neutral
    shards = []
    for device, first in first_holders(plan, leaf, everywhere=True).items():  # each part counts once
        x = values[device] if device == first else np.asarray(neutral, next(iter(values.values())).dtype)
        shards.append(jax.device_put(jnp.reshape(x, (1,)), device))
    sharding = NamedSharding(plan.mesh, PartitionSpec(tuple(plan.mesh.axis_names)))
    x = jax.make_array_from_single_device_arrays((plan.mesh.size,), sharding, shards)
    return _reduced(x, how, plan.whole_sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _reduced(x: jax.Array, how: str, sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(REDUCTIONS[how].reduce(x).astype(x.dtype), sharding)


class RecordUpdate:
    """The compiled update of all states with an optimizer and a plan; programs see states without records.

    Args:
      tx: The optimizer and the plan.
      next_state: Returns the state after a step, laid out as planned, inside `jit`.
      with_params: Returns a state with other parameters, likewise.
    """

    def __init__(
        self, tx: ZeroTransformation, next_state: Callable[..., State], with_params: Callable[[State, PyTree], State]
    ) -> None:
        self.tx, self.plan, self.programs = tx, tx.plan, RecordPrograms(tx.plan)
        self._next_state, self._with_params = next_state, with_params
        # Nothing reads the old parameters, whose memory the new ones take over: unused arguments would not be donated.
        self.finish = jax.jit(self._finish, donate_argnums=0, keep_unused=True)
        self.finish_columns = jax.jit(self._finish_columns, donate_argnums=(0, 1), keep_unused=True)
        self.apply_sums = jax.jit(self._apply_sums, donate_argnums=0)
        self.scalars = jax.jit(self._scalars, static_argnums=(0, 1))
        self._analysed = jax.jit(self._analyse, static_argnames="means")

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        for program in (x for x in vars(self).values() if hasattr(x, "clear_cache")):
            program.clear_cache()
        self.programs = RecordPrograms(self.plan)

    def program(self, state: State, step: StepGrads, *, means: bool = False) -> UpdateProgram:
        """Returns the update by the gradients of a step, or by means of gradients in float32, analysed."""
        program: UpdateProgram = self._analysed.eval_shape(state, step, means=means)  # jax knows all that it depends on
        return program

    def _analyse(self, state: State, step: StepGrads, *, means: bool) -> UpdateProgram:
        grads = [Grad(_mean(leaf.grad)) for leaf in self.plan.leaves] if means else step.grads
        return record_program(*self.tx.update_of_step(grads, state.opt_state, state.params, step.applied, step.value))

    def params(self, state: State) -> list[jax.Array]:
        """Returns the parameters as stored."""
        return self.plan.view.params.flat(state.params)

    def wait(self, x: PyTree) -> None:
        """Waits for arrays where programs in flight could deadlock."""
        if compat.starves_steps(self.plan.mesh):
            jax.block_until_ready(x)

    @jax.named_scope("zero_update")
    def _scalars(
        self, program: UpdateProgram, level: int, state: State, step: StepGrads, sums: Mapping[int, jax.Array]
    ) -> tuple[list[Operands], dict[int, jax.Array]]:
        grads = step.grads or [Grad(jnp.zeros(x.grad.stored_shape, _mean(x.grad).dtype)) for x in self.plan.leaves]
        _, before = self.tx.update_of_step(grads, state.opt_state, state.params, step.applied, step.value)
        run = Run(program, inputs_of(self.plan, before, StateLeaf.load), sums)
        run.evaluate(level)
        return list(map(run.operands, program.passes[level])), run.sums

    @jax.named_scope("zero_update")
    def _finish(self, state: State, step: StepGrads, changed: Changed, done: Done | None) -> State:
        """Returns the state after a step, and after an update if one is done."""
        return self._next_state(state, step, changed, None if done is None else done.grads, done)

    def _finish_columns(
        self,
        state: State,
        on_device: dict[int, list[jax.Array]],
        chosen: dict[int, jax.Array],
        changed: Changed,
        done: Done,
    ) -> tuple[State, dict[int, list[jax.Array]]]:
        operands, _ = self._scalars(done.program, 0, state, done.grads, done.sums)
        params, new_params, new = self.params(state), {}, {}
        for kernel, of in zip(done.program.passes[0], operands, strict=True):
            if (i := kernel.param) in chosen:
                grad = done.grads.grads[i].reduced
                new[i], new_params[i] = update_columns(self.plan, kernel, of, grad, params[i], chosen[i], on_device[i])
        light = done.grads.without_grads
        return self._finish(state, light, changed, dataclasses.replace(done, params=new_params)), new

    @jax.named_scope("zero_update")
    def _apply_sums(self, state: State, results: dict[int, jax.Array], chosen: dict[int, jax.Array]) -> State:
        return self._with_params(state, self.tx.with_record_results(state.params, results, chosen))


def _mean(leaf: StateLeaf) -> jax.ShapeDtypeStruct:
    """Returns the shape of a mean of gradients."""
    return jax.ShapeDtypeStruct(leaf.stored_shape, wide_dtype(leaf.dtype))
