"""`analyze`: compiles a step, for this machine or another, and describes the compiled program."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jzero.analysis.collectives import program_collectives
from jzero.analysis.costs import Kernels
from jzero.analysis.replanning import mesh_of, move_to_mesh, plan_of_argument, relaid
from jzero.analysis.report import AnalysisReport, rows_of
from jzero.analysis.schedule import host_calls, simulate
from jzero.analysis.step_programs import Compile, StepProgram, memory_of_programs, step_programs
from jzero.analysis.violations import Compiled, axes_of, find_violations
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.types import PyTree, State
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.mesh import make_mesh, platform_of
from jzero.core.plan.plan import ZeroPlan
from jzero.core.step.eval_step import EvalStep
from jzero.core.step.train_step import TrainStep, ValueAndGrad
from jzero.estimate.buffers import Transfer
from jzero.estimate.step_memory import arrays_on_host, gathers_more, memory_of_trace
from jzero.estimate.traced import trace_alone
from jzero.estimate.traced_collectives import traced_collectives
from jzero.machines.limits import this_machine, usable_bytes
from jzero.machines.machine import Machine, machine
from jzero.machines.topologies import topology_devices, topology_options

RECOMPUTED = (
    "By default (`remat=None`), where keeping all does not fit, results of expensive operations are saved, and the "
    "rest of scans and repeated blocks is computed again in the backward pass. "
    '`remat="as_written"` keeps what the loss keeps.'
)

TILES_WORTH_A_NOTE = 0.02
"""Share of the arguments' memory above which the waste of tiles is noted."""


def analyze(  # noqa: PLR0913  # a program, a machine, and how to place a plain state
    fn: Any,
    *args: Any,
    topology: str | None = None,
    mesh: Mesh | None = None,
    config: ZeroConfig | None = None,
    plan: ZeroPlan | None = None,
    trainable: PyTree | str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> AnalysisReport:
    """Compiles a step and reports its memory, its collectives, and its departures from the plan.

    It runs nothing and moves no array. With `topology` it uses the compiler of a machine that you do not have.

    Args:
      fn: A step from `make_train_step`, `make_eval_step` or `value_and_grad`, or any function made by `jax.jit`.
      args: Its arguments, concrete or abstract (`jax.ShapeDtypeStruct`); for a step `state, batch`. Sharded states are
        laid out again for `topology`, `mesh` or `config`; a plain state needs `config`.
      topology: A machine such as `"h200:8"` or `"v5e:2x4"`, see `jzero.machines.machine.machine`; by default this one.
      mesh: The mesh. By default that of the state; for another machine the ZeRO axis takes all devices that the other
        axes leave.
      config: The configuration, if it differs from the state's plan.
      plan: The plan to verify against; by default that of the first state among the arguments.
      trainable: Which parameters are trained, as for `shard_train_state`, if the state does not say.
      compiler_options: As for `jax.jit(...).lower(...).compile`.
      keywords: Other arguments of `fn`, such as `rng=`.

    Returns:
      The report; print it, or call `report.verify()`.

    Raises:
      TypeError: `fn` is not jitted.
      ValueError: There is no such machine, or the arguments do not fit it.
      ImportError: The compiler of `topology` is not installed.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> report = jzero.analyze(step, state, jnp.ones((8, 512)))
      >>> report.verify()
      >>> report.communication_elements // 512**2
      2
    """
    if not hasattr(fn, "trace"):
        raise TypeError(
            f"`fn` must be a step of jzero or a function made by `jax.jit`: got {type(fn).__name__}. Say "
            "`jzero.analyze(jax.jit(fn), ...)`."
        )
    devices = None if topology is None else topology_devices(topology)
    placed = [relaid(x, devices=devices, mesh=mesh, config=config, trainable=trainable) for x in args]
    plans = [x for x in map(plan_of_argument, placed) if x is not None]
    if isinstance(fn, TrainStep | ValueAndGrad) and plans:
        plans[0] = fn.plan(*placed, **keywords)  # which knows what the loss writes, and what the step keeps
    mesh = mesh or (plans[0].mesh if plans and isinstance(plans[0].mesh, Mesh) else None)
    mesh = mesh or (make_mesh(devices=devices) if devices is not None else mesh_of((args, keywords)))
    if topology is not None and not isinstance(fn, TrainStep | EvalStep | ValueAndGrad):
        assert mesh is not None
        placed, keywords = move_to_mesh(placed, keywords, mesh)
    platform = platform_of(_devices_of(mesh)[0])
    used = plan or (plans[0] if plans else None)
    logging.getLogger("jzero").info("Tracing the step.")
    programs = step_programs(fn, placed, keywords, platform, _compiler(topology, compiler_options))
    facts = _facts(fn, placed, programs, platform)
    notes = [*_notes_on_programs(programs), *_notes_on_host(fn, facts, used)]
    if _recomputes_by_default(fn, placed, keywords):
        notes.append(RECOMPUTED)
    hardware = machine(topology) if topology is not None else this_machine(_devices_of(mesh))
    estimated = None
    if isinstance(fn, TrainStep | ValueAndGrad) and plans:
        gathered = [x.times * c.num_elements for x in facts.sent if x.gathers for c in x.collectives]
        planned = sum(
            c.num_elements
            for c in (*plans[0].traffic.gathers_before_loss, *fn.micro.steps * plans[0].traffic.gathers_of_loss)
        )
        notes += gathers_more(sum(gathered), planned)
    if isinstance(fn, TrainStep) and plans:
        arguments = fn.abstract_arguments(*placed, **keywords)
        estimated = memory_of_trace(
            programs[0].traced, arguments, plans[0], hardware, gpu=platform == "gpu", micro_batches=fn.micro.steps
        )
        excess = facts.memory.arguments / estimated.arguments - 1
        if excess > TILES_WORTH_A_NOTE:
            notes.append(
                f"State and batch take {100 * excess:.0f} % more than their elements: the compiler pads some shards to "
                "whole tiles."
            )
    limit, kernels = usable_bytes(hardware), trace_alone(programs[0].traced.jaxpr).kernels
    return dataclasses.replace(_report(facts, used, mesh, hardware, notes, kernels), estimated=estimated, limit=limit)


def _compiler(topology: str | None, compiler_options: Mapping[str, Any] | None) -> Compile:
    options = {**({} if topology is None else topology_options(topology)), **(compiler_options or {})}

    def compile_(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        logging.getLogger("jzero").info("Compiling for %s.", topology or "this machine")
        return lowered.compile(options or None)

    return compile_


def _facts(fn: Any, args: Sequence[Any], programs: Sequence[StepProgram], platform: str) -> Compiled:
    """Returns the facts to compare with the plan, of all programs of a step; records move nothing between devices.

    Args:
      fn: The step, or a jitted function.
      args: Its arguments.
      programs: Its programs.
      platform: The platform of the devices.
    """
    shared = [x for x in programs if x.times == 1]
    parsed = tuple(x.program for x in shared)
    jaxprs = [x.traced.jaxpr for x in shared]
    return Compiled(
        programs=parsed,
        collectives=tuple(c for x in parsed for c in program_collectives(x, unknown_trips=1)),
        sent=tuple(x for jaxpr in jaxprs for x in traced_collectives(jaxpr)),
        transfers=tuple(x for jaxpr in jaxprs for x in _transfers(jaxpr)),
        platform=platform,
        memory=programs[0].memory if len(programs) == 1 else memory_of_programs(programs, args[0].tx.plan),
        returns_state=isinstance(fn, TrainStep) or any(_returns(programs[-1].lowered.out_info, x) for x in args),
        micro_batches=fn.micro.steps if isinstance(fn, TrainStep | ValueAndGrad) else 0,
    )


def _transfers(jaxpr: AnyJaxpr) -> Sequence[Transfer]:
    return trace_alone(jaxpr).transfers


def _notes_on_programs(programs: Sequence[StepProgram]) -> list[str]:
    if len(programs) == 1:
        return []
    largest = max(programs, key=lambda x: x.peak)
    return [
        f"The step is {len(programs)} programs, since its update runs on records outside of programs. The peak is that "
        f"of {largest.name}, including what the others leave on a device. The timeline covers {programs[0].name} "
        "alone: the time of the records depends on the disk and on the host (`jzero doctor --disk`)."
    ]


def _notes_on_host(fn: Any, facts: Compiled, plan: ZeroPlan | None) -> list[str]:
    notes = []
    is_one_memory = facts.platform == "cpu" or (plan is not None and not plan.names_host_memory)
    if is_one_memory and plan is not None and isinstance(fn, TrainStep) and arrays_on_host(plan):
        notes.append(
            "The compiler for these devices does not distinguish host memory: host bytes are the plan's, and chunks in "
            "transit count as temporaries."
        )
    calls = host_calls(facts.programs[0])
    if calls.total:
        notes.append(
            f"The schedule overlaps {calls.covered} of {calls.total} calls of the host's CPU with other work; their "
            "time is not in the timeline."
        )
    return notes


def _recomputes_by_default(fn: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    is_training = isinstance(fn, TrainStep | ValueAndGrad)
    return is_training and fn.remat is None and fn.recomputation(*args, **keywords) == "cheap"


def _report(
    facts: Compiled,
    plan: ZeroPlan | None,
    mesh: Mesh | None,
    hardware: Machine | None,
    notes: list[str],
    kernels: Kernels,
) -> AnalysisReport:
    if _has_unknown_loops(facts):
        notes.append("A loop of unknown trip count counts as one pass.")
    if plan is not None and plan.params_on_disk:
        notes.append(
            "Rows of parameters on disk count as available at once: only a run shows how long a program waits for "
            "them. Without the devices, an operation of a row's size replaces its read."
        )
    violations: list[str] = []
    if plan is not None:
        violations, remarks = find_violations(facts, plan)
        notes += remarks
    timeline = None
    if hardware is None:
        notes.append(f"No bandwidth figures for these {facts.platform} devices: exposed_communication is unavailable.")
    else:
        timeline, remarks = simulate(facts.programs[0], hardware, kernels)
        notes += [*remarks, *filter(None, [hardware.remark])]
    axes = ["+".join(axes_of(c.group, mesh)) if mesh is not None else "" for c in facts.collectives]
    nodes = [_num_nodes(c.group, hardware, plan) for c in facts.collectives]
    return AnalysisReport(
        machine=hardware.name if hardware is not None else facts.platform,
        num_devices=facts.programs[0].num_devices,
        memory=facts.memory,
        collectives=rows_of(zip(facts.collectives, axes, nodes, strict=True)),
        communication_elements=sum(c.elements for c in facts.collectives),
        exposed_communication=None if timeline is None else timeline.exposed_share,
        timeline=timeline,
        plan=plan,
        violations=tuple(violations),
        notes=tuple(dict.fromkeys(notes)),
    )


def _num_nodes(group: Sequence[int], hardware: Machine | None, plan: ZeroPlan | None) -> int:
    """Returns the number of nodes of a group: those of the machine, or of the plan's `node_axis`; 0 if unknown."""
    if hardware is not None:
        return len({i // hardware.devices_per_node for i in group})
    axis = None if plan is None else plan.config.node_axis
    if axis is None or plan is None:
        return 0
    sizes = tuple(plan.mesh.shape.values())
    along = np.unravel_index(np.asarray(group), sizes)[list(plan.mesh.shape).index(axis)]
    return len(set(along.tolist()))


def _returns(out: PyTree, state: State) -> bool:
    """Whether `out` holds a state like `state`, which carries a plan."""
    if plan_of_argument(state) is None:
        return False
    structure = jax.tree.structure(state)
    parts = [out, *(out if isinstance(out, tuple | list) else ())]
    return any(jax.tree.structure(part) == structure for part in parts)


def _devices_of(mesh: Mesh | None) -> list[jax.Device]:
    return list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]


def _has_unknown_loops(facts: Compiled) -> bool:
    return any(
        x.opcode == "while" and program.trip_count(x) is None
        for program in facts.programs
        for computation in program.computations.values()
        for x in computation.instructions
    )
