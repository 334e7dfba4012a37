"""The command line: reads arguments, calls the library, and prints the result as text or JSON.

Every command exits with 0 on success, 1 if a check failed, and 2 if it could not run. Results have `__str__` and
`to_json()`; all other output goes to stderr. Slow imports are inside functions, so that `--help` is fast.
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
"""Errors that users can cause, from the library, jax and the file system; their messages need no traceback."""

app = typer.Typer(
    name="jzero",
    help="ZeRO for JAX: estimate memory, inspect compiled steps, and check this machine.",
    epilog="Exit status: 0 on success, 1 if a check failed, 2 if the command could not run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

# Options shared by several commands.

_MODEL = typer.Argument(
    metavar="MODULE:FUNCTION",
    help="A function that takes no arguments and returns `(state, loss_fn, batch)`. The module must be installed or in "
    "the current directory. `state` may be abstract, or a function that makes a state from a PRNG key.",
    show_default=False,
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Stage = Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")]
PrecisionName = Annotated[Literal["fp32", "bf16", "fp16"], typer.Option("--precision", help="Precision policy.")]
Threshold = Annotated[
    int,
    typer.Option(
        "--persistence-threshold", min=0, help="At stage 3, keep parameters of up to this many elements whole."
    ),
]
CpuDevices = Annotated[
    int | None, typer.Option("--cpu-devices", min=1, help="Use this many virtual CPU devices and ignore any others.")
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON to stdout.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")]


@app.command()
def estimate(
    model: OptionalModel = None,
    *,
    params: Annotated[
        float | None, typer.Option(help="Number of parameters, e.g. `2851e6`, instead of a model.")
    ] = None,
    largest_layer: Annotated[
        float | None, typer.Option(help="Parameters in the largest layer, e.g. `32e6`. Only for stage 3.")
    ] = None,
    stage: Annotated[int, typer.Option(min=1, max=3, help="ZeRO stage.")] = 3,
    num_gpus_per_node: Annotated[int, typer.Option(help="Number of devices per node.")] = 1,
    num_nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    additional_buffer_factor: Annotated[
        float, typer.Option(help="Factor on host memory, for buffers that the formulas omit.")
    ] = 1.5,
    formulas: Annotated[
        Literal["documented", "deepspeed-0.19"],
        typer.Option(help="Use the formulas of DeepSpeed's documentation or of its code."),
    ] = "documented",
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Estimates the memory of model states by DeepSpeed's formulas, for each choice of options."""
    with _messages(traceback):
        counted = _estimator_arguments(model, params, largest_layer, stage)
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
            min=1, help="Plan for this many devices; they need not exist. Default: the devices of this machine."
        ),
    ] = None,
    threshold: Threshold = 100_000,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints the placement of every parameter, the bytes per device, and the arrays that stay whole, with reasons."""
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
        typer.Option(help="Compile for another machine, e.g. `h200:8` or `v5e:2x4`. Default: this machine."),
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
            help="Recompute the scans of the loss, or nothing. By default, stage 3 recomputes cheap activations.",
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Save a figure of memory and timeline; the extension sets the format."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Exit with 1 if the program departs from the plan.")] = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Compiles a training step without running it; prints its memory, collectives and departures from the plan."""
    with _messages(traceback):
        _choose_devices(topology, cpu_devices)
        user = _load(model)
        step = jzero.make_train_step(user.loss_fn, accumulate_steps=accumulate_steps, remat=remat)
        config = _config(stage, precision, threshold)
        report = jzero.analyze(step, user.state, user.batch, topology=topology, config=config, **user.keywords)
    _show(report, as_json)
    if report.num_devices == 1 and stage > 0:
        _warn("With one device, nothing is partitioned. Pass `--topology` or `--cpu-devices`.")
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
        str | None, typer.Option(help="The target machine, e.g. `h200:8` or `v5e:2x4`. Default: this machine.")
    ] = None,
    cpu_devices: CpuDevices = None,
    hbm_bytes: Annotated[
        float | None,
        typer.Option(help="Memory limit of a step per device, e.g. `80e9`. Default: 90 % of the device's memory."),
    ] = None,
    precision: PrecisionName = "fp32",
    threshold: Threshold = 100_000,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Compare optimizer state in host memory with all else. Default: try it last."),
    ] = False,
    host_bytes: Annotated[
        float | None, typer.Option(help="Host memory of a node that the state may take, e.g. `1e12`.")
    ] = None,
    confirm: Annotated[bool, typer.Option(help="Compile the best candidates; their schedules decide.")] = True,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Finds the configuration that fits and takes the least time per step; exits with 1 if nothing fits."""
    with _messages(traceback):
        if topology is None or cpu_devices is not None:
            _choose_devices(topology, cpu_devices)
        else:  # the search does not need that machine's compiler
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
            offload=offload,
            host_bytes=host_bytes,
            confirm=confirm,
            **user.keywords,
        )
    _show(result, as_json)
    if result.chosen is None:
        raise typer.Exit(1)


@app.command()
def deepspeed(
    config: Annotated[str, typer.Argument(help="A DeepSpeed configuration, e.g. `ds_config.json`.")],
    *,
    num_devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices that share the batch; it determines the batch sizes.")
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints a verdict on each key of a DeepSpeed configuration; exits with 1 if jzero refuses any key."""
    with _messages(traceback), warnings.catch_warnings():
        _use_cpu(None)
        warnings.simplefilter("ignore", UserWarning)  # about refused keys, which the report lists
        _, report = jzero.ZeroConfig.from_deepspeed(config, num_devices=num_devices)
    _show(report, as_json)
    if report.refused:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, or a `CheckpointManager` directory (its newest checkpoint).")
    ],
    output: Annotated[str, typer.Argument(help="A new `.safetensors` file or directory. It must not exist.")],
    *,
    dtype: Annotated[
        str | None, typer.Option(help="Convert floating-point parameters, e.g. to `bfloat16`. Default: as stored.")
    ] = None,
    paths: Annotated[
        str | None,
        typer.Option(help="Regular expression that must match whole paths, e.g. `decoder/.*`. Default: all."),
    ] = None,
    max_file_bytes: Annotated[
        float, typer.Option(help="Split a larger export into several files with an index.")
    ] = 5e9,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Writes a checkpoint's parameters as safetensors, one leaf at a time; needs no model and no devices."""
    with _messages(traceback):
        _use_cpu(None)
        exported = jzero.export_checkpoint(
            checkpoint, output, dtype=dtype, paths=paths, max_file_bytes=int(max_file_bytes)
        )
    _show(exported, as_json)


@app.command()
def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, or a `CheckpointManager` directory (its newest checkpoint).")
    ],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every leaf and verify its checksum; exit with 1 if any is damaged.")
    ] = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints the contents of a checkpoint: its leaves, the configuration that wrote it, and other saved data."""
    with _messages(traceback):
        _use_cpu(None)
        info = jzero.inspect_checkpoint(checkpoint, verify=verify)
    _show(info, as_json)
    if info.damaged:
        raise typer.Exit(1)


@app.command()
def doctor(
    *,
    disk: Annotated[
        str | None, typer.Option(metavar="PATH", help="Also measure the disk of this folder, a candidate for offload.")
    ] = None,
    disk_bytes: Annotated[float, typer.Option(help="Space to take there meanwhile.")] = 2**31,
    cpu_devices: CpuDevices = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints versions, devices and compilers, and runs checks on this machine."""
    with _messages(traceback):
        from jzero.cli.doctor import examine

        _choose_devices(None, cpu_devices)
        report = examine(disk, int(disk_bytes))
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
    """Turns errors into messages on stderr and exit status 2; redirects stdout to stderr meanwhile."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        if traceback or not isinstance(error, EXPECTED):
            tracebacks.print_exception(error)
        else:
            _warn(f"{str(error) or type(error).__name__}\n(`--traceback` prints the traceback.)")
        raise typer.Exit(2) from error


def _load(name: str) -> UserModel:
    from jzero.cli.user_model import load_model

    if os.getcwd() not in sys.path:  # unlike `python -m`, scripts do not search it
        sys.path.insert(0, os.getcwd())
    return load_model(name)


def _estimator_arguments(model: str | None, params: float | None, largest_layer: float | None, stage: int) -> list[Any]:
    """Returns an estimator's first arguments: a model, or one number, or two numbers at stage 3."""
    if (model is None) == (params is None):
        raise ValueError("Pass either a model (`module:function`) or `--params`.")
    if model is not None:
        if largest_layer is not None:
            raise ValueError(f"`--largest-layer` requires `--params`: the layers of {model!r} are counted.")
        return [_load(model).state]
    if stage < 3:
        return [params]
    if largest_layer is None:
        raise ValueError("Stage 3 gathers layers: pass `--largest-layer` with `--params`.")
    return [params, largest_layer]


def _config(stage: int, precision: Any, threshold: int) -> jzero.ZeroConfig:
    # typer does not support a Literal of numbers
    return jzero.ZeroConfig(stage=stage, precision=precision, persistence_threshold=threshold)  # type: ignore[arg-type]


def _choose_devices(topology: str | None, cpu_devices: int | None) -> None:
    """Selects the devices that jax will find. Call it before any code uses them, and so before users' modules load."""
    if topology is not None and cpu_devices is not None:
        raise ValueError(
            f"`--topology {topology}` means another machine, `--cpu-devices {cpu_devices}` means this one: "
            "pass only one of them."
        )
    if cpu_devices is not None:
        _use_cpu(cpu_devices)
    elif topology is not None:
        from jzero.analysis.topologies import topology_devices

        _use_cpu(None)
        topology_devices(topology)  # raises before the model is built


def _use_cpu(count: int | None) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        # Otherwise XLA's CPU client may have only one thread per core, and running programs deadlock.
        os.environ.setdefault("PJRT_NPROC", str(4 * count))
        jax.config.update("jax_num_cpu_devices", count)


if __name__ == "__main__":
    app(prog_name="jzero")
