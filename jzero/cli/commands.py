"""The command line: reads arguments, calls the library, and prints the result as text or JSON.

Every command exits with 0 on success, 1 if a check failed, 2 if it could not run, and 3 if a step does not fit.
Results have `__str__` and `to_json()`; all other output goes to stderr. Slow imports are inside functions, so that
`--help` is fast.
"""

from __future__ import annotations

import json
import warnings
from typing import Annotated, Any, Literal

import typer

import jzero
from jzero.cli.planning import analyze, estimate, fit, plan
from jzero.cli.request import DEVICES, MOST
from jzero.cli.terminal import Json, Traceback, choose_devices, messages, name_flags, show, use_cpu
from jzero.machines.machine import MOST_DEVICES

app = typer.Typer(
    name="jzero",
    epilog="Exit status: 0 on success, 1 if a check failed, 2 if the command could not run, 3 if a step does not fit.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jzero {jzero.__version__}")
        raise typer.Exit


Checkpoint = Annotated[
    str, typer.Argument(help="A checkpoint, or a `CheckpointManager` directory (its newest checkpoint).")
]


@app.callback()
def jzero_command(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print jzero's version.")
    ] = False,
) -> None:
    """ZeRO for JAX: estimate memory before a run, inspect compiled steps, and check this machine."""
    name_flags(context)


for memory_command in (estimate, plan, fit, analyze):
    app.command()(memory_command)


@app.command()
def deepspeed(
    config: Annotated[
        str, typer.Argument(help="A DeepSpeed configuration, e.g. `ds_config.json`, or Accelerate's YAML.")
    ],
    *,
    num_devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            "--num-devices",
            min=1,
            max=MOST_DEVICES,
            help="Devices that share the batch; they determine the batch sizes.",
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, max=MOST, help="Rows of a step over all devices.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Precision, if the configuration leaves it open.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "--auto",
            metavar="KEY=VALUE",
            help='A value for a key, "auto" or not, such as `optimizer.params.lr=2e-5`; or for what Hugging Face\'s '
            "trainer fills in by that name, such as `learning_rate=2e-5` or `bf16=true`. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints a verdict on each key of a DeepSpeed configuration; exits with 1 if any is refused, or left open."""
    with messages(traceback), warnings.catch_warnings():
        from jzero.deepspeed.auto_values import override
        from jzero.deepspeed.source import read_source

        use_cpu(None)
        warnings.simplefilter("ignore", UserWarning)  # about refused and open keys, which the report lists
        source = read_source(config)
        _, report = jzero.from_deepspeed(
            override(source.values, dict(map(_named_value, values or []))),
            num_devices=source.num_devices if num_devices is None else num_devices,
            batch_size=batch_size,
            precision=precision,
        )
    show(report, as_json)
    if report.refused or report.open:
        raise typer.Exit(1)


def _named_value(text: str) -> tuple[str, Any]:
    """Returns the name and the value of `KEY=VALUE`; the value is JSON, or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"`--set` takes KEY=VALUE, such as `learning_rate=2e-5`: got {text!r}.")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


@app.command()
def export(
    checkpoint: Checkpoint,
    output: Annotated[str, typer.Argument(help="A new `.safetensors` file or directory. It must not exist.")],
    *,
    dtype: Annotated[
        str | None, typer.Option(help="Convert floating-point parameters, e.g. to `bfloat16`. Default: as stored.")
    ] = None,
    paths: Annotated[
        str | None,
        typer.Option(help="Regular expression that must match whole paths, e.g. `decoder/.*`. Default: all."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write what `transformers` loads, as the published model in this folder."),
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(help="The family whose tensors parameters make, such as `llama`. Default: that of `--like`."),
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Writes a checkpoint's parameters as safetensors, one leaf at a time; needs no model and no devices."""
    with messages(traceback):
        use_cpu(None)
        exported = jzero.export_checkpoint(
            checkpoint,
            output,
            dtype=dtype,
            paths=paths,
            mapping=mapping or (None if like is None else "auto"),
            like=like,
        )
    show(exported, as_json)


@app.command()
def inspect(
    checkpoint: Checkpoint,
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every leaf and verify its checksums; exit with 1 if any is damaged.")
    ] = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints the contents of a checkpoint: its leaves, the configuration that wrote it, and other saved data."""
    with messages(traceback):
        use_cpu(None)
        info = jzero.inspect_checkpoint(checkpoint, verify=verify)
    show(info, as_json)
    if info.damaged:
        raise typer.Exit(1)


@app.command()
def doctor(
    *,
    disk: Annotated[
        str | None, typer.Option(metavar="PATH", help="Also measure the disk of this folder, a candidate for offload.")
    ] = None,
    disk_bytes: Annotated[float, typer.Option(min=1, max=2**50, help="Space to use there for it.")] = 2**31,
    cpu_devices: Annotated[
        int | None, typer.Option("--devices", "--cpu-devices", min=1, max=MOST_DEVICES, help=DEVICES)
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Prints versions, devices and compilers, and runs checks on this machine."""
    with messages(traceback):
        from jzero.cli.doctor import examine

        choose_devices(None, cpu_devices)
        report = examine(disk, disk_bytes)
    show(report, as_json)
    if not report.ok:
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="jzero")
