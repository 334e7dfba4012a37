"""`fit`: finds the fastest layout among those that fit a machine's memory.

[Note: What fit searches]
Stage, micro-batches and recomputation; over several hosts, also one replica per host, and hops between and within them
(`ZeroConfig.node_axis`, `secondary_params`, `secondary_grads`). `estimate_step_memory` gives the memory and the time of
each candidate from its trace. If nothing fits, it cuts smaller parameters, too, and then keeps optimizer state in host
memory, unless what the step needs beside its state is too much. A step with state there waits for as long as it takes
over the link. With `disk_path`, it also tries optimizer state on that disk; a step then waits for as long as the state
takes to be read and written once. It searches no other offload, nor what changes numbers: a note tells what
`Quantization` would save.

Sizes of mesh axes that divide a model or rows (experts, tensors, `ZeroConfig.context_axis`) are not searched: they are
those of `mesh`, and with it all candidates are on that mesh, replicas and nodes included. Their states are exact.
Estimates count collectives that the model names, such as those in its `shard_map`; those that the compiler adds for a
sharding constraint are in compiled figures alone.

Then it compiles candidates, the fastest first, until three fit, and those that the estimate may wrongly rule out. It
chooses that of these whose usual step is the fastest by the compiled schedule, see [Note: A usual step], and spends the
remaining memory as `fill_memory` does: then `choice.remat` is a `Keep`. On devices whose rates are not known, the
cheapest is the one that sends least, then the one that computes least; only the choice, and what fills it, is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.analysis.candidates import CHOSEN, RECOMPUTED, SURE_SHARE, Candidate, choose, judge
from jzero.analysis.compiled_step import CompiledStep
from jzero.analysis.confirm import confirm as confirmed
from jzero.analysis.confirm import with_figures
from jzero.analysis.fill import Filling
from jzero.analysis.fit_report import Fit
from jzero.analysis.host_memory import HostMemory
from jzero.analysis.replanning import plan_of_argument
from jzero.analysis.search import Search, Stage
from jzero.core.base.text import few
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.keep import Keep
from jzero.core.config.offload import Offload
from jzero.core.config.settings import FLAG, check, integer, number, optional, some_of
from jzero.core.config.zero import ZeroConfig
from jzero.core.engine.recompute import Remat
from jzero.core.layout.mesh import AnyMesh, batch_axes, check_mesh
from jzero.core.plan.table import format_bytes
from jzero.core.state.adapter import adapt
from jzero.core.state.init import state_shapes
from jzero.core.state.request import check_sizes_are_known
from jzero.estimate.step_memory import gathers_more
from jzero.machines.limits import USABLE, hardware_of, limit_of

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
CLOSE = (
    "The choice is estimated at {share:.0%} of the limit, and estimates can be low: compile it "
    "(`confirm=True`) before a long run, or leave room with a lower `hbm_bytes`."
)
HOST = "The state takes {num_bytes} of each host's memory, pinned: pass `host_bytes` to limit it."
FRACTION = (
    f"jax takes 75 % of a GPU's memory unless told otherwise: to train with {USABLE:.0%} of it, set "
    f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}."
)
STEP_TOO_LARGE = (
    "What a step needs beside its state is alone too much, which no offload of state changes: share rows between "
    "devices (`ZeroConfig.context_axis`), compute the loss in parts of a row, put `jax.checkpoint` around each layer "
    "and around parts of attention, or take fewer rows."
)


def fit(  # noqa: PLR0913  # what is searched, and what is not
    make_state: Callable[[jax.Array], State] | State,
    loss_fn: Callable[..., Any],
    batch: PyTree,
    *,
    topology: str | None = None,
    mesh: AnyMesh | None = None,
    hbm_bytes: float | None = None,
    config: ZeroConfig | None = None,
    trainable: PyTree | str | None = None,
    stages: Sequence[Stage] = STAGES,
    remat: Sequence[Remat | None] = ("as_written", "cheap", True),
    max_accumulate_steps: int = 64,
    host_bytes: float | None = None,
    disk_path: str | None = None,
    disk_bytes: float | None = None,
    disk_bytes_per_s: float | None = None,
    offload: bool = False,
    has_aux: bool = False,
    mutable: Sequence[str] = (),
    merge: Mapping[str, str] | None = None,
    rng: Any = None,
    confirm: bool = True,
) -> Fit:
    """Finds the fastest way to train a model that fits a machine, see [Note: What fit searches].

    Args:
      make_state: From a PRNG key to a train state, as for `init_train_state`, or a state, concrete or abstract.
      loss_fn: As for `make_train_step`.
      batch: The global batch, concrete or abstract.
      topology: The machine, such as `"h200:8"`; by default the devices of `mesh`, or of this process.
      mesh: The mesh of all candidates, possibly abstract; needed if the loss or the state has axes that are not ZeRO's,
        or if `config` has a `context_axis`. By default `fit` chooses it.
      hbm_bytes: Most bytes of a step on one device. By default 90 % of the device's memory.
      config: Everything that is not searched, such as the precision.
      trainable: Which parameters are trained, as for `shard_train_state`.
      stages: The stages to search. Those that `config` excludes are left out.
      remat: The options to try for `make_train_step`; "offload" is not searched. `None`: what a step keeps by itself.
      max_accumulate_steps: Most micro-batches to try.
      host_bytes: What the state may take of one host's memory.
      disk_path: A folder on a local disk of every host, for `Offload(optimizer="disk")`.
      disk_bytes: What the state may take of that disk.
      disk_bytes_per_s: The disk's rate in each direction, both at once, as `jzero doctor --disk` measures it.
      offload: Whether to compare optimizer state in host memory with all else, rather than try it last.
      has_aux: As for `make_train_step`.
      mutable: As for `make_train_step`.
      merge: As for `make_train_step`.
      rng: The `rng` of the step.
      confirm: Whether to compile. Else, or without the compiler, figures are estimates, wrong by 10 % or more.

    Returns:
      A `Fit`. If nothing fits, `chosen` is `None`, and `tried` shows by how much.

    Raises:
      ValueError: An argument is out of range, unknown or contradicts another, or the batch cannot be split.
      TypeError: `make_state` gives no train state.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> choice = jzero.fit(plain_state, loss_fn, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> mesh = jzero.make_mesh(**choice.mesh_shape)
      >>> new_state = jzero.shard_train_state(plain_state, config=choice.config, mesh=mesh)
      >>> step = jzero.make_train_step(loss_fn, accumulate_steps=choice.accumulate_steps, remat=choice.remat)
    """
    stages = check("stages", stages, some_of(*STAGES))
    remat = check("remat", remat, some_of(*(x.remat for x in RECOMPUTED)))
    steps = check("max_accumulate_steps", max_accumulate_steps, integer(1))
    check("confirm", confirm, FLAG)
    check("offload", offload, FLAG)
    base = config or ZeroConfig(stage=0)
    state = _shapes_of(make_state, mesh, base)
    place, per_host, notes = _place(topology, mesh, hbm_bytes, confirm=confirm)
    search = Search(
        **place,
        state=state,
        trainable=trainable,
        loss_fn=loss_fn,
        options={"has_aux": has_aux, "mutable": mutable, "merge": merge},
        batch=batch,
        rng=rng,
        host=HostMemory(per_host, host_bytes, disk_path, disk_bytes, disk_bytes_per_s),
        base=base,
        stages=_allowed(stages, config),
        remat=remat,
        max_steps=steps,
    )
    return _search(search, notes, from_start=offload, compiles=confirm and search.devices is not None)


def _place(
    topology: str | None, mesh: AnyMesh | None, hbm_bytes: float | None, *, confirm: bool
) -> tuple[dict[str, Any], int, list[str]]:
    """Returns the facts of a `Search` about the machine, its devices per host, and notes."""
    hbm_bytes = check("hbm_bytes", hbm_bytes, optional(number("a number of bytes >= 1", lambda x: 1 <= x < math.inf)))
    hardware, devices, notes = hardware_of(topology, mesh, confirm=confirm)
    if hbm_bytes is None and hardware is not None and hardware.kind == "gpu":
        notes.append(FRACTION)
    num_devices = hardware.num_devices if hardware is not None else len(jax.devices()) if mesh is None else mesh.size
    per_host = hardware.devices_per_host if hardware is not None else 0
    if topology is None:
        per_host = max(per_host, jax.local_device_count())  # a host may have several processes
    place = {"topology": topology, "mesh": mesh, "hardware": hardware, "devices": devices, "num_devices": num_devices}
    limit = limit_of(hbm_bytes, topology, hardware)
    return {**place, "limit": limit}, min(per_host, num_devices), notes


def _search(search: Search, notes: list[str], *, from_start: bool, compiles: bool) -> Fit:
    """Returns the result of a search.

    Args:
      search: The search.
      notes: Remarks so far.
      from_start: Whether optimizer state on the host is compared with all else, rather than tried last.
      compiles: Whether to compile.
    """
    hardware, limit = search.hardware, search.limit
    offloads, last, remarks = _offloads(search, from_start=from_start)
    search, notes = dataclasses.replace(search, last=last), [*notes, *remarks]
    tried = search.estimate(offloads)
    if compiles:
        tried = confirmed(search, tried)
    chosen = choose(tried, limit, confirmed=compiles)
    if chosen is not None and (filled := _filled(search, chosen, compiles=compiles)) is not None:
        tried, chosen = [filled, *tried], filled
    name = hardware.name if hardware is not None else f"{search.num_devices} {jax.devices()[0].device_kind} devices"
    notes += [f"{steps} micro-batches were not tried: {error}" for steps, error in search.untried.items()]
    notes += [STEP_TOO_LARGE] if search.exceeded_by_step(tried) else []
    notes += [] if chosen is None else _notes_on(search, chosen)
    judged = tuple(judge(tried, chosen, limit))
    chosen = next((x for x in judged if x.verdict == CHOSEN), None)
    return Fit(name, limit, judged, chosen, tuple(notes), _workload(search.state, search.batch))


def _shapes_of(
    make_state: Callable[[jax.Array], State] | State, mesh: AnyMesh | None, base: ZeroConfig
) -> TrainStateLike:
    """Returns the state, as shapes if a function makes it; raises if the mesh lacks axes, or is missing."""
    if mesh is None:
        check_sizes_are_known(base, "context_axis")
    else:
        check_mesh(mesh, base)
    if not callable(make_state):
        return adapt(make_state).state
    state = state_shapes(make_state, mesh)
    known = batch_axes(base) if mesh is None else mesh.axis_names
    named = jax.tree.leaves([tuple(getattr(x.sharding, "spec", ())) for x in jax.tree.leaves(state)])
    if unknown := sorted({name for name in named if isinstance(name, str)} - {*known}):
        sizes = ", ".join(f"{name}=..." for name in (*unknown, *known))
        raise ValueError(
            f"`make_state` cuts the state over mesh axes {unknown}, whose sizes `fit` does not choose: pass a mesh "
            f"that has them, such as `mesh=jzero.make_mesh({sizes})`."
        )
    return state


def _filled(search: Search, x: Candidate, *, compiles: bool) -> Candidate | None:
    """Returns a candidate that keeps between its passes what still fits; `None` if nothing, or if it is slower."""
    if x.config.offload.params != "none":
        return None
    placed = search.placed(x.config, x.mesh_shape.get(str(x.config.replica_axis), 1))
    keeps = isinstance(x.remat, Keep)  # what a step keeps by itself: here it is chosen anew
    step = search.step(x.accumulate_steps, x.remat.remat if isinstance(x.remat, Keep) else x.remat)
    plan = plan_of_argument(placed)
    assert plan is not None
    known: dict[int, CompiledStep | None] = {}
    if not keeps and x.compiled_peak is not None:
        known[0] = CompiledStep(x.compiled_peak, x.compiled_seconds, x.most_seconds)
    filling = Filling(
        step=step,
        arguments=(placed, search.batch, search.rng),
        plan=plan,
        machine=search.hardware,
        topology=search.topology,
        compiled=known,
    )
    number = filling.confirmed(search.limit) if compiles else filling.longest(SURE_SHARE * search.limit)
    if not number:
        return None
    remat, memory = filling.step_keeping(number).remat, filling.estimated(number)
    filled = with_figures(dataclasses.replace(x, remat=remat, memory=memory), filling.compiled.get(number))
    return filled if filled.best_cost() <= x.best_cost() else None


def _notes_on(search: Search, chosen: Candidate) -> list[str]:
    memory, notes = chosen.memory, []
    if not chosen.is_compiled and chosen.peak > SURE_SHARE * search.limit:
        notes.append(CLOSE.format(share=chosen.peak / search.limit))
    if memory.host and search.host.host_bytes is None:
        notes.append(HOST.format(num_bytes=format_bytes(search.host.devices * memory.host)))
    return [*notes, *gathers_more(memory.gathered_bytes, memory.planned_bytes), *search.saved_by_integers(chosen)]


def _offloads(search: Search, *, from_start: bool) -> tuple[list[Offload], tuple[Offload, ...], list[str]]:
    """Returns the offloads to try, those to try if nothing fits, and notes on those that are impossible."""
    base, *on_disk = search.host.offloads(search.base.offload)
    offloads, notes = [base], []
    for offload in on_disk:
        why_not = search.why_not_on_disk(offload)
        offloads += [] if why_not else [offload]
        notes += [f"Optimizer state on disk was not tried: {why_not}"] if why_not else []
    if base.optimizer != "none":
        return offloads, (), notes
    host = dataclasses.replace(base, optimizer="host")
    return ([*offloads, host], (), notes) if from_start else (offloads, (host,), notes)


def _workload(state: TrainStateLike, batch: PyTree) -> str:
    size = sum(math.prod(np.shape(x)) for x in jax.tree.leaves(state.params))
    arrays = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(batch)]
    return f"{size:,} parameters; global batch {few(arrays, 3)}"


def _allowed(stages: Sequence[Stage], config: ZeroConfig | None) -> tuple[Stage, ...]:
    """Returns the stages that a configuration allows, by trying them."""
    allowed: list[Stage] = []
    for stage in stages:
        try:
            dataclasses.replace(config or ZeroConfig(), stage=stage)
        except ValueError as error:
            excluded = error
        else:
            allowed.append(stage)
    if not allowed:
        raise ValueError(f"`config` excludes all of `stages`, {tuple(stages)}: {excluded} Search other stages.")
    return tuple(allowed)
