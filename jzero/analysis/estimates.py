"""`estimate_step_memory`: the memory of a training step, without a compiler or a device."""

from __future__ import annotations

from typing import Any

from jzero.analysis.replanning import plan_of_argument, relaid
from jzero.core.base.types import PyTree, State
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.mesh import AnyMesh
from jzero.core.step.train_step import TrainStep
from jzero.estimate.step_memory import StepMemory, memory_of_step
from jzero.machines.machine import machine


def estimate_step_memory(  # noqa: PLR0913  # the arguments of a step, and a machine
    step: TrainStep,
    state: State,
    batch: PyTree,
    *,
    rng: Any = None,
    topology: str | None = None,
    mesh: AnyMesh | None = None,
    config: ZeroConfig | None = None,
    trainable: PyTree | str | None = None,
) -> StepMemory:
    """Estimates the memory of a training step on one device from its trace; compiles nothing.

    The states are exact. The rest follows [Note: How memory is estimated]; the guide on memory says how far off it can
    be, and `analyze` has the compiler's own figure.

    Args:
      step: From `make_train_step`.
      state: The step's state, concrete or abstract; sharded, or plain if `config` is given.
      batch: The global batch, concrete or abstract.
      rng: The step's `rng`, if it takes one.
      topology: A machine such as `"h200:8"`, for its number of devices and its rates. Its compiler is not needed.
      mesh: The devices. Without `topology`, an abstract mesh counts as TPUs. By default the state's mesh, or all
        devices of `topology` on the ZeRO axis.
      config: The configuration, if it differs from the state's plan.
      trainable: Which parameters are trained, as for `shard_train_state`, if the state does not say.

    Returns:
      A `StepMemory`; `print` it for tables.

    Raises:
      TypeError: `step` is not a training step of jzero, or the state is plain and `config` is missing.
      ValueError: There is no such machine, or the batch does not fit it.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> memory = jzero.estimate_step_memory(step, state, jnp.ones((64, 512)), topology="h200:64")
      >>> memory.params == 512 * 512 * 4 // 64
      True
    """
    if config is not None and not isinstance(config, ZeroConfig):
        raise TypeError(f"`config` must be a `ZeroConfig`: got {config!r}.")
    if not isinstance(step, TrainStep):
        raise TypeError(f"`step` must be what `make_train_step` returned: got {type(step).__name__}.")
    hardware = None if topology is None else machine(topology)
    num_devices = None if hardware is None or mesh is not None else hardware.num_devices
    state = relaid(state, devices=num_devices, mesh=mesh, config=config, trainable=trainable, hardware=hardware)
    if plan_of_argument(state) is None:
        raise TypeError("The state is not sharded by jzero: pass `config=jzero.ZeroConfig(stage=...)`, too.")
    return memory_of_step(step, (state, batch, rng), hardware)
