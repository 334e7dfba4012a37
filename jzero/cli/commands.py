"""The command line: reads arguments, calls the library, prints what it returns as text or as JSON.

Every command ends with 0 if all is well, with 1 if a check failed, and with 2 if it could not be done.
What a command returns has `__str__` and `to_json()`; everything else that is written goes to stderr. Functions import
what is slow to import, so that `--help` is there at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback as tracebacks
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

import jzero

if TYPE_CHECKING:
    from jzero.cli.user_model import UserModel

__all__ = ["app"]

EXPECTED = (ValueError, TypeError, ImportError, OSError, RuntimeError)
"""What the library, jax and the file system raise for what a user can cause; their messages say enough."""

app = typer.Typer(
    name="jzero",
    help="ZeRO for JAX: what it will cost, what the compiler makes of it, and what works here.",
    epilog="Exit status: 0 if all is well, 1 if a check failed, 2 if it could not be done.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

# Options that commands share.

_MODEL = typer.Argument(
    metavar="MODULE:FUNCTION",
    help="A function without arguments that returns `(state, loss_fn, batch)`; the module is installed or in the "
    "current directory. `state` may be abstract, or a function that makes one from a PRNG key.",
    show_default=False,
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Stage = Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")]
PrecisionName = Annotated[Literal["fp32", "bf16", "fp16"], typer.Option("--precision", help="Precision policy.")]
Threshold = Annotated[
    int,
    typer.Option("--persistence-threshold", min=0, help="Parameters of up to so many elements stay whole at stage 3."),
]
CpuDevices = Annotated[
    int | None, typer.Option("--cpu-devices", min=1, help="Use so many virtual CPU devices, whatever else is there.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]


@app.command()
def estimate(
    model: OptionalModel = None,
    *,
    params: Annotated[
        float | None, typer.Option(help="Parameters of the model, e.g. `2851e6`, where none is named.")
    ] = None,
    largest_layer: Annotated[
        float | None, typer.Option(help="Parameters of its largest layer, e.g. `32e6`; needed at stage 3 only.")
    ] = None,
    stage: Annotated[int, typer.Option(min=1, max=3, help="ZeRO stage.")] = 3,
    num_gpus_per_node: Annotated[int, typer.Option(help="Devices per node.")] = 1,
    num_nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    additional_buffer_factor: Annotated[
        float, typer.Option(help="Factor on host memory for what the formulas leave out.")
    ] = 1.5,
    formulas: Annotated[
        Literal["documented", "deepspeed-0.19"],
        typer.Option(help="Those of DeepSpeed's documentation, or of its code."),
    ] = "documented",
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints the memory that model states need by DeepSpeed's formulas, under each choice of options."""
    with _messages(traceback):
        counted = _count(model, params, largest_layer, stage)
        how = "cold" if model is None else "live"
        function = getattr(jzero, f"estimate_zero{stage}_model_states_mem_needs_all_{how}")
        result = function(
            *counted, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas=formulas, verbose=False
        )
    _show(result, as_json)


@app.command()
def plan(
    model: Model,
    *,
    stage: Stage = 3,
    precision: PrecisionName = "fp32",
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Plan for so many devices, which need not be there. By default those of this machine."
        ),
    ] = None,
    threshold: Threshold = 100_000,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints where every parameter would live, the bytes per device, and what stays whole and why."""
    with _messages(traceback):
        mesh = None
        if devices is not None:
            from jzero.analysis.relocation import abstract_mesh

            _use_cpu(None)
            mesh = abstract_mesh(devices, {"data": devices})
        config = _config(stage, precision, threshold)
        result = jzero.plan_train_state(_load(model).state, config=config, mesh=mesh)
    _show(result, as_json)


@app.command()
def analyze(
    model: Model,
    *,
    topology: Annotated[
        str | None,
        typer.Option(help="Compile for a machine that is not here, e.g. `h200:8` or `v5e:2x4`. By default this one."),
    ] = None,
    cpu_devices: CpuDevices = None,
    stage: Stage = 3,
    precision: PrecisionName = "fp32",
    threshold: Threshold = 100_000,
    accumulate_steps: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    remat: Annotated[
        bool | None,
        typer.Option(
            "--remat/--no-remat",
            help="Recompute the scans of the loss, or nothing. By default at stage 3 what is cheap.",
        ),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(metavar="PATH", help="Draw memory and timeline there; the ending says which kind.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="End with 1 if the program departs from the plan.")] = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Compiles a training step, runs nothing, and prints its memory, its collectives and departures from the plan."""
    with _messages(traceback):
        _choose_devices(topology, cpu_devices)
        user = _load(model)
        step = jzero.make_train_step(user.loss_fn, accumulate_steps=accumulate_steps, remat=remat)
        config = _config(stage, precision, threshold)
        report = jzero.analyze(step, user.state, user.batch, topology=topology, config=config, **user.keywords)
    _show(report, as_json)
    if report.num_devices == 1 and stage > 0:
        _warn("There is one device, so nothing is partitioned: give `--topology` or `--cpu-devices`.")
    if figure is not None:
        with _messages(traceback):
            report.save_figure(figure)
    if verify:
        try:
            report.verify()
        except jzero.PlanViolation as violation:
            _warn(str(violation))
            raise typer.Exit(1) from violation


@app.command()
def fit(
    model: Model,
    *,
    topology: Annotated[
        str | None, typer.Option(help="The machine, e.g. `h200:8` or `v5e:2x4`. By default this one.")
    ] = None,
    cpu_devices: CpuDevices = None,
    hbm_bytes: Annotated[
        float | None,
        typer.Option(help="What a step may take of one device's memory, e.g. `80e9`. By default 90 % of what it has."),
    ] = None,
    precision: PrecisionName = "fp32",
    threshold: Threshold = 100_000,
    confirm: Annotated[
        bool, typer.Option(help="Compile the choice, and what was passed over for too little memory.")
    ] = True,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Searches the way to train that communicates least among those that fit; ends with 1 if nothing fits."""
    with _messages(traceback):
        if topology is None or cpu_devices is not None:
            _choose_devices(topology, cpu_devices)
        else:  # the search needs no compiler of that machine
            _use_cpu(None)
        user = _load(model)
        config = _config(0, precision, threshold)
        result = jzero.fit(
            user.state,
            user.loss_fn,
            user.batch,
            topology=topology,
            hbm_bytes=None if hbm_bytes is None else int(hbm_bytes),
            config=config,
            confirm=confirm,
            **user.keywords,
        )
    _show(result, as_json)
    if result.chosen is None:
        raise typer.Exit(1)


@app.command()
def deepspeed(
    config: Annotated[str, typer.Argument(help="A configuration of DeepSpeed, e.g. `ds_config.json`.")],
    *,
    num_devices: Annotated[
        int | None, typer.Option(min=1, help="Devices that the batch is split over; batch sizes follow from it.")
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints what jzero makes of each key of a DeepSpeed configuration; ends with 1 if it refuses any."""
    with _messages(traceback), warnings.catch_warnings():
        _use_cpu(None)
        warnings.simplefilter("ignore", UserWarning)  # of what is refused, which is in the report
        _, report = jzero.ZeroConfig.from_deepspeed(config, num_devices=num_devices)
    _show(report, as_json)
    if report.refused:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a manager's directory for its newest one.")],
    output: Annotated[str, typer.Argument(help="A file `….safetensors`, or a directory. Must not be there yet.")],
    *,
    dtype: Annotated[
        str | None, typer.Option(help="Of floating-point parameters, e.g. `bfloat16`. By default as they are.")
    ] = None,
    paths: Annotated[
        str | None, typer.Option(help="Regular expression over whole paths, e.g. `decoder/.*`. By default all.")
    ] = None,
    max_file_bytes: Annotated[float, typer.Option(help="Above this size there are several files and an index.")] = 5e9,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Writes the parameters of a checkpoint as safetensors, one leaf at a time; needs neither model nor devices."""
    with _messages(traceback):
        _use_cpu(None)
        exported = jzero.export_checkpoint(
            checkpoint, output, dtype=dtype, paths=paths, max_file_bytes=int(max_file_bytes)
        )
    _show(exported, as_json)


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a manager's directory for its newest one.")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every leaf and compare it; end with 1 if any is damaged.")
    ] = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints what is in a checkpoint: its leaves, who wrote it and how, what else was saved."""
    with _messages(traceback):
        _use_cpu(None)
        info = jzero.inspect_checkpoint(checkpoint, verify=verify)
    _show(info, as_json)
    if info.damaged:
        raise typer.Exit(1)


@app.command()
def doctor(*, cpu_devices: CpuDevices = None, as_json: Json = False, traceback: Traceback = False) -> None:
    """Prints versions, devices and compilers, and tries out what works here."""
    with _messages(traceback):
        from jzero.cli.doctor import examine

        _choose_devices(None, cpu_devices)
        report = examine()
    _show(report, as_json)
    if not report.ok:
        raise typer.Exit(1)


class _Result(Protocol):
    def to_json(self) -> str: ...


def _show(result: _Result, as_json: bool) -> None:
    typer.echo(result.to_json() if as_json else str(result))


def _warn(text: str) -> None:
    typer.echo(f"jzero: {text}", err=True)


@contextlib.contextmanager
def _messages(traceback: bool) -> Iterator[None]:
    """Makes errors messages on stderr and exit status 2; whatever is printed in the meantime goes to stderr as well."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        if traceback or not isinstance(error, EXPECTED):
            tracebacks.print_exception(error)
        else:
            _warn(f"{str(error) or type(error).__name__}\n(`--traceback` shows where this comes from.)")
        raise typer.Exit(2) from error


def _load(name: str) -> UserModel:
    from jzero.cli.user_model import load_model

    if os.getcwd() not in sys.path:  # scripts, unlike `python -m`, do not find modules there
        sys.path.insert(0, os.getcwd())
    return load_model(name)


def _count(model: str | None, params: float | None, largest_layer: float | None, stage: int) -> list[Any]:
    """Returns what an estimator takes first: a model, or one number, or at stage 3 two."""
    if (model is None) == (params is None):
        raise ValueError("Name a model (`module:function`) or give `--params`, one of the two.")
    if model is not None:
        if largest_layer is not None:
            raise ValueError(f"`--largest-layer` goes with `--params`: the layers of {model!r} are counted.")
        return [_load(model).state]
    if stage < 3:
        return [params]
    if largest_layer is None:
        raise ValueError("Stage 3 gathers layers: give `--largest-layer` with `--params`.")
    return [params, largest_layer]


def _config(stage: int, precision: Any, threshold: int) -> jzero.ZeroConfig:
    return jzero.ZeroConfig(stage=stage, precision=precision, persistence_threshold=threshold)  # type: ignore[arg-type]  # typer knows no Literal of numbers


def _choose_devices(topology: str | None, cpu_devices: int | None) -> None:
    """Settles which devices jax will find. Has to come before anything asks for them, so before users' modules."""
    if topology is not None and cpu_devices is not None:
        raise ValueError(
            f"`--topology {topology}` is another machine, `--cpu-devices {cpu_devices}` is this one: give one of them."
        )
    if cpu_devices is not None:
        _use_cpu(cpu_devices)
    elif topology is not None:
        from jzero.analysis.topologies import topology_devices

        _use_cpu(None)
        topology_devices(topology)  # raises, if need be, before a model is made


def _use_cpu(count: int | None) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        # Else XLA's CPU client may have as few threads as cores, and programs in flight wait for each other for ever.
        os.environ.setdefault("PJRT_NPROC", str(4 * count))
        jax.config.update("jax_num_cpu_devices", count)


if __name__ == "__main__":
    app(prog_name="jzero")
