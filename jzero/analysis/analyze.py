"""`analyze`: compiles a step, for this machine or another, and reads off what the compiler made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero._config import ZeroConfig
from jzero._mesh import make_mesh
from jzero._optimizer import ZeroTransformation
from jzero._plan import ZeroPlan
from jzero._state import adapt
from jzero._train_state import abstract_train_state
from jzero._train_step import EvalStep, TrainStep, ValueAndGrad
from jzero.analysis.collectives import program_collectives
from jzero.analysis.hlo import parse_hlo
from jzero.analysis.machines import GPUS, Machine, machine
from jzero.analysis.memory import memory_of
from jzero.analysis.report import AnalysisReport, rows_of
from jzero.analysis.schedule import simulate
from jzero.analysis.topologies import topology_devices
from jzero.analysis.violations import Compiled, axes_of, find_violations

__all__ = ["analyze"]


def analyze(
    fn: Any,
    *args: Any,
    topology: str | None = None,
    mesh: Mesh | None = None,
    config: ZeroConfig | None = None,
    plan: ZeroPlan | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> AnalysisReport:
    """Compiles a step and returns what the compiler made of it: memory, collectives, and whether it keeps to the plan.

    Nothing is run, and no array is moved. With `topology` the compiler is that of a machine that is not there.

    Args:
      fn: What `make_train_step`, `make_eval_step` or `value_and_grad` returned, or any function made by `jax.jit`.
      args: What it is called with, concrete or abstract (`jax.ShapeDtypeStruct`); for a step `state, batch`. States
        that carry a plan are laid out anew for `topology`, `mesh` or `config`; a plain state needs `config`.
      topology: A machine such as `"h200:8"` or `"v5e:2x4"`, see `jzero.analysis.machines.machine`; by default this one.
      mesh: Over which devices. By default that of the state; for another machine the ZeRO axis takes all devices that
        the other axes leave.
      config: What to partition, and how, where it is not what the state's plan says.
      plan: What to verify against; by default the plan of the first state among the arguments.
      compiler_options: As for `jax.jit(...).lower(...).compile`.
      keywords: Further arguments of `fn`, such as `rng=`.

    Returns:
      An `AnalysisReport`: print it, or call `report.verify()`.

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
    relaid = [_relaid(x, devices, mesh, config) for x in args]
    plans = [found for x in relaid if (found := _plan(x)) is not None]
    mesh = mesh or (plans[0].mesh if plans and isinstance(plans[0].mesh, Mesh) else None)
    mesh = mesh or (make_mesh(devices=devices) if devices is not None else _mesh_of((args, keywords)))
    if topology is not None and not isinstance(fn, TrainStep | EvalStep | ValueAndGrad):
        assert mesh is not None
        relaid, keywords = _moved(relaid, keywords, mesh)
    lowered = fn.trace(*relaid, **keywords).lower()
    compiled = lowered.compile(None if compiler_options is None else dict(compiler_options))
    program = parse_hlo(compiled.as_text())
    platform = _platform(mesh)
    facts = Compiled(
        program=program,
        collectives=tuple(program_collectives(program, unknown_trips=1)),
        lowered=lowered.as_text(),
        platform=platform,
        memory=memory_of(compiled, platform),
        returns_state=isinstance(fn, TrainStep) or any(_returns(lowered.out_info, x) for x in relaid),
    )
    used = plan or (plans[0] if plans else None)
    notes = []
    if topology is not None and platform == "gpu":
        notes.append("Compile-only GPU devices list no memories: buffers on the host count as the device's.")
    hardware = machine(topology) if topology is not None else _this_machine(mesh)
    return _report(facts, used, mesh, hardware, notes)


def _report(
    facts: Compiled, plan: ZeroPlan | None, mesh: Mesh | None, hardware: Machine | None, notes: list[str]
) -> AnalysisReport:
    if _has_unknown_loops(facts):
        notes.append("A loop of unknown trip count counts as one pass.")
    violations: list[str] = []
    if plan is not None:
        violations, found = find_violations(facts, plan)
        notes += found
    timeline = None
    if hardware is None:
        notes.append(f"No rates are known of these {facts.platform} devices: exposed_communication is not told.")
    else:
        timeline, found = simulate(facts.program, hardware)
        notes += found
    axes = ["+".join(axes_of(c.group, mesh)) if mesh is not None else "" for c in facts.collectives]
    return AnalysisReport(
        machine=hardware.name if hardware is not None else facts.platform,
        num_devices=facts.program.num_devices,
        memory=facts.memory,
        collectives=rows_of(zip(facts.collectives, axes, strict=True)),
        communication_elements=sum(c.elements for c in facts.collectives),
        exposed_communication=None if timeline is None else timeline.exposed_share,
        timeline=timeline,
        plan=plan,
        violations=tuple(violations),
        notes=tuple(dict.fromkeys(notes)),
    )


def _as_state(x: Any) -> Any:
    """Returns `x` seen as a train state, or `None` if it is none."""
    try:
        return adapt(x).state
    except (TypeError, ValueError):
        return None


def _plan(x: Any) -> ZeroPlan | None:
    state = _as_state(x)
    return state.tx.plan if state is not None and isinstance(state.tx, ZeroTransformation) else None


def _relaid(x: Any, devices: list[jax.Device] | None, mesh: Mesh | None, config: ZeroConfig | None) -> Any:
    """Returns a state as it would be laid out there, abstract; anything else as it is."""
    state = _as_state(x)
    if state is None or (devices is None and mesh is None and config is None):
        return x
    plan = _plan(x)
    config = config or (None if plan is None else plan.config)
    if config is None:  # a plain state of some plain function
        return x
    if mesh is None and devices is None and plan is not None and isinstance(plan.mesh, Mesh):
        mesh = plan.mesh
    if mesh is None:
        sizes = {str(name): int(size) for name, size in plan.mesh.shape.items()} if plan is not None else {}
        mesh = make_mesh(devices=devices, **{**sizes, config.axis: -1})
    # The state itself, not the objects that it was seen in: those of NNX hold no abstract arrays.
    return abstract_train_state(state, config=config, mesh=mesh)


def _moved(args: list[Any], keywords: dict[str, Any], mesh: Mesh) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments of a plain function for another machine: the same specs on its mesh."""

    def move(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return x
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh != mesh:
            names = jax.tree.leaves(tuple(sharding.spec))
            spec = sharding.spec if set(names) <= set(mesh.shape) else PartitionSpec()
            sharding = NamedSharding(mesh, spec)
        kept = sharding if isinstance(sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=kept)

    moved, named = jax.tree.map(move, (args, keywords))
    if any(getattr(x, "sharding", None) is not None for x in jax.tree.leaves((moved, named))):
        return moved, named

    def place(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(place, (moved, named))


def _mesh_of(args: Any) -> Mesh | None:
    """The mesh of the first argument that has one."""
    for x in jax.tree.leaves(args):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _returns(out: Any, state: Any) -> bool:
    """Whether `out` holds a state like `state`, which carries a plan."""
    if _plan(state) is None:
        return False
    wanted = jax.tree.structure(state)
    parts = [out, *(out if isinstance(out, tuple | list) else ())]
    return any(jax.tree.structure(part) == wanted for part in parts)


def _platform(mesh: Mesh | None) -> str:
    name = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).platform
    return "gpu" if name in ("cuda", "rocm") else str(name)


_TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}


def _this_machine(mesh: Mesh | None) -> Machine | None:
    """What is known about the machine that a mesh is of."""
    devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
    kind = devices[0].device_kind
    if kind in _TPU_KINDS:
        chip = _TPU_KINDS[kind]
        shape = f"{len(devices)}x1x1" if chip in ("v4", "v5p") else f"{len(devices)}x1"
    else:
        chip = next((name for name, facts in GPUS.items() if facts.name == kind), "")
        shape = str(len(devices))
    try:
        return machine(f"{chip}:{shape}")
    except ValueError:
        return None


def _has_unknown_loops(facts: Compiled) -> bool:
    computations = facts.program.computations.values()
    loops = (x for computation in computations for x in computation.instructions if x.opcode == "while")
    return any(facts.program.trip_count(x) is None for x in loops)
