"""Compiles a training step for its figures alone."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jzero.analysis.replanning import plan_of_argument
from jzero.analysis.schedule import simulate
from jzero.analysis.step_programs import step_programs
from jzero.core.base.types import PyTree, State
from jzero.core.layout.mesh import platform_of
from jzero.core.step.choice import EXHAUSTED
from jzero.core.step.train_step import TrainStep
from jzero.estimate.traced import trace_alone
from jzero.machines.machine import Machine
from jzero.machines.topologies import topology_options


class CompiledStep(NamedTuple):
    """The compiler's figures of a step.

    Attributes:
      peak: The most bytes on one device: in use at a time, or allocated, whichever is more.
      seconds: A usual step by the compiled schedule, see [Note: A usual step]; `None` if no rates are known.
      most_seconds: The step if each conditional runs its longest branch.
    """

    peak: int
    seconds: float | None
    most_seconds: float | None = None


def compile_step(
    step: TrainStep, arguments: tuple[State, PyTree, PyTree], topology: str | None, machine: Machine | None
) -> CompiledStep | None:
    """Returns the figures of a step; `None` if the compiler rejects it as out of memory, as that for TPUs does.

    Args:
      step: The step.
      arguments: Its state, batch and key.
      topology: The machine, if it is not this one.
      machine: Its specifications.
    """
    *placed, rng = arguments
    plan = plan_of_argument(placed[0])
    assert plan is not None
    platform = platform_of(plan.mesh.devices.flat[0])
    options = (None if topology is None else topology_options(topology)) or None
    try:
        programs = step_programs(step, placed, {"rng": rng}, platform, lambda x: x.compile(options))
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        return None
    peak = max(x.beside + x.times * max(x.memory.peak, x.memory.allocated) for x in programs)
    if machine is None:
        return CompiledStep(peak, None)
    timeline, _ = simulate(programs[0].program, machine, trace_alone(programs[0].traced.jaxpr).kernels)
    return CompiledStep(peak, timeline.least, timeline.seconds)
