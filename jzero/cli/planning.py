"""The memory commands: `estimate` from sizes, `plan` leaf by leaf, `fit` by search, `analyze` by the compiler.

All take a `PlanRequest` and print an `Account`, whose states are the same to the byte.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jzero
from jzero.cli.request import MOST, PlanRequest, takes_request
from jzero.cli.terminal import DOES_NOT_FIT, Json, Traceback, choose_devices, messages, show, warn

Plot = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Draw the memory of a step over time, and layouts or collectives: `.png`, `.svg`."
    ),
]

if TYPE_CHECKING:
    from jzero.cli.account import Account
    from jzero.cli.source import ModelSource


@takes_request
def estimate(
    request: PlanRequest,
    *,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="Print DeepSpeed's own table instead, for each choice of its options.")
    ] = False,
    largest_layer: Annotated[
        str | None,
        typer.Option(help="With `--deepspeed`: parameters of the largest layer, of a model of `--params` in all."),
    ] = None,
    num_gpus_per_node: Annotated[
        int | None, typer.Option(help="With `--deepspeed`: devices per node. Default: those of the machine, or 1.")
    ] = None,
    num_nodes: Annotated[int | None, typer.Option(help="With `--deepspeed`: nodes, likewise.")] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Computes the memory of the states from sizes, at once, and what it leaves on the device."""
    with messages(traceback):
        choose_devices(request.topology, request.devices, plans_only=True)
        if deepspeed:
            per_node, nodes = request.hosts
            per_node = per_node if num_gpus_per_node is None else num_gpus_per_node
            nodes = nodes if num_nodes is None else num_nodes
            table = _deepspeeds_table(request, largest_layer, per_node, nodes)
        elif largest_layer is not None:
            raise ValueError("`--largest-layer` is an input of DeepSpeed's formulas: pass `--deepspeed`, too.")
        else:
            result = _planned(request)
    if deepspeed:
        show(table, as_json)
    else:
        _finish(result, as_json)


@takes_request
def plan(request: PlanRequest, *, as_json: Json = False, traceback: Traceback = False) -> None:
    """Prints the placement of every parameter, the bytes per device, and the arrays that stay whole, with reasons."""
    with messages(traceback):
        choose_devices(request.topology, request.devices, plans_only=True)
        result = _planned(request, with_leaves=True)
    _finish(result, as_json)


@takes_request
def analyze(
    request: PlanRequest,
    *,
    accumulate_steps: Annotated[int, typer.Option(min=1, max=MOST, help="Micro-batches per step.")] = 1,
    remat: Annotated[
        bool | None,
        typer.Option(
            "--remat/--no-remat",
            help="Recompute the scans of the loss, or nothing. By default, stage 3 recomputes cheap activations.",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Exit with 1 if the program departs from the plan.")] = False,
    plot: Plot = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Compiles a training step without running it; prints its memory, collectives and departures from the plan."""
    with messages(traceback):
        _check_plot(plot)
        choose_devices(request.topology, request.devices, compiles=True)
        source = _load(request)
        user, config = source.model, request.config
        report = jzero.analyze(
            jzero.make_train_step(user.loss_fn, accumulate_steps=accumulate_steps, remat=remat),
            user.state,
            user.batch,
            topology=request.topology,
            mesh=request.fixed_mesh,
            config=config,
            trainable=user.trainable,
            **user.keywords,
        )
        result = _account(request, source, report.ledger, config=config, result=report)
        if plot is not None:
            report.save_figure(plot)
    show(result, as_json)
    if report.num_devices == 1 and config.stage > 0:
        warn("With one device, nothing is partitioned. Pass `--topology` or `--devices`.")
    if verify:
        try:
            report.verify()
        except jzero.PlanViolation as violation:
            warn(str(violation))
            raise typer.Exit(1) from violation
    _check_fit(result)


@takes_request
def fit(
    request: PlanRequest,
    *,
    hbm_bytes: Annotated[
        float | None,
        typer.Option(help="Memory limit of a step per device, e.g. `80e9`. Default: 90 % of the device's memory."),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Compare optimizer state in host memory with all else. Default: try it last."),
    ] = False,
    host_bytes: Annotated[
        float | None, typer.Option(help="Memory of one host that the state may take, e.g. `1e12`.")
    ] = None,
    confirm: Annotated[bool, typer.Option(help="Compile the best candidates; their schedules decide.")] = True,
    every: Annotated[
        bool, typer.Option("--all", help="Print a row for each layout. Default: ten, alike ones as one.")
    ] = False,
    plot: Plot = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Finds the configuration that fits and takes the least time per step; exits with 3 if nothing fits."""
    with messages(traceback):
        _check_plot(plot)
        choose_devices(request.topology, request.devices)  # without its compiler, estimates decide
        source = _load(request)
        user = source.model
        choice = jzero.fit(
            user.state,
            user.loss_fn,
            user.batch,
            topology=request.topology,
            mesh=request.fixed_mesh,
            hbm_bytes=hbm_bytes,
            config=request.config,
            trainable=user.trainable,
            stages=(0, 1, 2, 3) if request.stage is None else (request.stage,),  # type: ignore[arg-type]  # as in `PlanRequest`
            offload=offload,
            host_bytes=host_bytes,
            confirm=confirm,
            **user.keywords,
        )
        if choice.chosen is None and source.sizes is not None:
            from jzero.cli.parts import with_parts

            choice = with_parts(choice, request)
        config = (choice.chosen or choice.least).config
        result = dataclasses.replace(
            _account(request, source, choice.ledger, config=config, result=choice), every=every
        )
        if plot is not None:
            choice.save_figure(plot)
    _finish(result, as_json)


def _finish(result: Account, as_json: bool) -> None:
    """Prints the answer of a command; its verdict is the exit status."""
    show(result, as_json)
    _check_fit(result)


def _check_fit(result: Account) -> None:
    if result.ledger.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def _check_plot(path: str | None) -> None:
    """Raises if a picture is asked for that cannot be drawn, before anything that takes long."""
    if path is not None:
        from jzero.analysis.figure import check_matplotlib

        check_matplotlib()
        if pathlib.Path(path).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"`--plot` must name a .png, .svg or .pdf file: got {path!r}.")


def _planned(request: PlanRequest, *, with_leaves: bool = False) -> Any:
    from jzero.analysis.memory_table import MemoryTable

    source = _load(request)
    user, config = source.model, request.config
    layout = jzero.plan_train_state(user.state, config=config, mesh=request.mesh, trainable=user.trainable)
    host, disk = layout.host_bytes_per_device.total, layout.disk_bytes_per_device
    ledger = MemoryTable(layout.bytes_per_device, limit=request.limit, host=host, disk=disk)
    return _account(request, source, ledger, config=config, result=layout if with_leaves else None)


def _load(request: PlanRequest) -> ModelSource:
    from jzero.cli.source import load_source

    return load_source(request)


def _account(request: PlanRequest, source: ModelSource, ledger: Any, *, config: jzero.ZeroConfig, result: Any) -> Any:
    from jzero.cli.account import account

    return account(request, source, ledger, config=config, result=result)


def _deepspeeds_table(
    request: PlanRequest, largest_layer: str | None, per_node: int, num_nodes: int
) -> jzero.MemoryEstimate:
    """Returns the table of a model, or that of two numbers."""
    from jzero.cli.sizes import parse_count
    from jzero.core.state.model_size import count_params
    from jzero.deepspeed.formulas import BUFFER_FACTOR, tabulate

    stage = 3 if request.stage is None else request.stage
    if stage == 0:
        raise ValueError("DeepSpeed has formulas for stages 1 to 3: got `--stage 0`.")
    params: int
    layer: int | None
    if largest_layer is None and (stage == 3 or request.params is None):
        params, layer = count_params(_load(request).model.state)
    elif request.params is None:
        raise ValueError("`--largest-layer` requires `--params`: the layers of a model are counted.")
    else:
        params, layer = parse_count(request.params), None if largest_layer is None else parse_count(largest_layer)
    return tabulate(stage, params, layer, per_node, num_nodes, BUFFER_FACTOR, "documented")
