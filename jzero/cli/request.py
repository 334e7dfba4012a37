"""The options that the memory commands share: a model, a workload and a machine."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import typer

import jzero
from jzero.machines.machine import MOST_DEVICES

DEFAULT_SEQ = 4096
MOST = 2**31 - 1
"""What a program of 32-bit indices can count."""
DEVICES = "So many virtual devices in place of those of this machine."


class Size(NamedTuple):
    """A size of a decoder: its option, its name in `config.json`, and what it counts."""

    option: str
    field: str
    noun: str


SIZES = {
    "d_model": Size("--d-model", "hidden_size", "Width of the stream"),
    "num_layers": Size("--layers", "num_hidden_layers", "Layers"),
    "num_heads": Size("--heads", "num_attention_heads", "Heads of queries"),
    "num_kv_heads": Size("--kv-heads", "num_key_value_heads", "Heads of keys and values"),
    "d_hidden": Size("--d-hidden", "intermediate_size", "Width of feed-forward blocks"),
    "vocab_size": Size("--vocab", "vocab_size", "Tokens of the vocabulary"),
}
"""The sizes that a request may give, by their name in `ModelConfig`."""


def _size(name: str) -> Any:
    size = SIZES[name]
    return typer.Option(size.option, min=1, help=f"{size.noun}, in place of what `--params` takes.", show_default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options that all memory commands take. One of `model`, `folder` and `params` is given."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that takes no arguments and returns `(state, loss_fn, batch)`, or a fourth element, "
            "`trainable`. The module must be installed or in the current directory. `state` may be abstract, or a "
            "function that makes a state from a PRNG key.",
            show_default=False,
        ),
    ] = None
    folder: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FOLDER", help="A Hugging Face model; its `config.json` will do. Or its name on the Hub."
        ),
    ] = None
    params: Annotated[
        str | None, typer.Option("--params", help="A decoder of so many parameters, e.g. `7B`: a Llama of that size.")
    ] = None
    num_layers: Annotated[int | None, _size("num_layers")] = None
    d_model: Annotated[int | None, _size("d_model")] = None
    num_heads: Annotated[int | None, _size("num_heads")] = None
    num_kv_heads: Annotated[int | None, _size("num_kv_heads")] = None
    d_hidden: Annotated[int | None, _size("d_hidden")] = None
    vocab_size: Annotated[int | None, _size("vocab_size")] = None
    batch: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Sequences per step over all devices. Default: one per device.")
    ] = None
    seq: Annotated[int | None, typer.Option(min=1, max=MOST, help=f"Tokens per sequence. Default: {DEFAULT_SEQ}.")] = (
        None
    )
    context: Annotated[int, typer.Option(min=1, max=MOST_DEVICES, help="Devices that share each sequence.")] = 1
    loss_chunks: Annotated[
        int, typer.Option(min=1, max=MOST, help="Parts of a sequence whose logits exist one at a time.")
    ] = 1
    experts: Annotated[
        int, typer.Option(min=1, max=MOST_DEVICES, help="Devices that share the experts of a mixture.")
    ] = 1
    stage: Annotated[
        int | None, typer.Option(min=0, max=3, help="ZeRO stage. Default: 3; `fit` searches all.", show_default=False)
    ] = None
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Precision policy.")] = "fp32"
    lora_rank: Annotated[
        int,
        typer.Option(
            min=0, max=2**16, help="Train adapters of this rank beside each kernel of a layer, and nothing else."
        ),
    ] = 0
    quantize: Annotated[
        Literal["none", "int8", "nf4"], typer.Option(help="How parameters that are not trained are stored.")
    ] = "none"
    threshold: Annotated[
        int,
        typer.Option(
            "--persistence-threshold",
            min=0,
            max=2**63 - 1,
            help="At stage 3, keep parameters of up to this many elements whole.",
        ),
    ] = 100_000
    topology: Annotated[
        str | None,
        typer.Option(help="The machine, e.g. `h100:8`, `2x8xH100`, `p5.48xlarge` or `v5e:2x4`. Default: this machine."),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option("--devices", "--num-devices", "--cpu-devices", min=1, max=MOST_DEVICES, help=DEVICES),
    ] = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were given, by their name in `ModelConfig`."""
        return {name: size for name in SIZES if (size := getattr(self, name)) is not None}

    @property
    def num_devices(self) -> int:
        """The devices of the machine."""
        if self.topology is not None:
            from jzero.machines.machine import machine

            return machine(self.topology).num_devices
        if self.devices is not None:
            return self.devices
        import jax

        return len(jax.devices())

    @property
    def hosts(self) -> tuple[int, int]:
        """The devices per host and the hosts of the machine that was named; 1 of each if none was."""
        if self.topology is None:
            return self.devices or 1, 1
        from jzero.machines.machine import machine

        named = machine(self.topology)
        return named.devices_per_host, named.num_devices // named.devices_per_host

    @property
    def where(self) -> str:
        """The machine in words."""
        number = self.num_devices
        if self.topology is None:
            return f"{number} device{'s' * (number > 1)}"
        from jzero.machines.machine import parse_machine

        return f"{number} x {parse_machine(self.topology)[0]}"

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh: those of a run of `examples/llm` with these options."""
        beside = self.context * self.experts
        if rest := self.num_devices % beside:
            options = [f"--{name} {size}" for name in ("context", "experts") if (size := getattr(self, name)) > 1]
            raise ValueError(
                f"`{' '.join(options)}` needs a multiple of {beside} devices: got {self.num_devices}; "
                f"{self.num_devices - rest or beside} would do."
            )
        sizes = {"experts": self.experts, "data": self.num_devices // beside, "context": self.context}
        return {name: size for name, size in sizes.items() if size > 1 or name == "data"}

    @property
    def mesh(self) -> Any:
        """A mesh without devices; `None` for those of this machine."""
        if self.topology is None and self.devices is None and len(self.axes) == 1:
            return None
        from jzero.analysis.replanning import abstract_mesh

        return abstract_mesh(self.num_devices, self.axes)

    @property
    def fixed_mesh(self) -> Any:
        """The mesh to compile for, if there are axes beside ZeRO's; without devices if there is no compiler for it."""
        if len(self.axes) == 1:
            return None
        from jzero.machines.limits import hardware_of

        _, devices, _ = hardware_of(self.topology, confirm=True)
        return self.mesh if devices is None else jzero.make_mesh(devices=devices, **self.axes)

    @property
    def config(self) -> jzero.ZeroConfig:
        """The configuration of the options."""
        return jzero.ZeroConfig(
            stage=3 if self.stage is None else self.stage,  # type: ignore[arg-type]  # typer has no Literal of numbers
            context_axis="context" if self.context > 1 else None,
            precision=self.precision,
            persistence_threshold=self.threshold,
            quantization=jzero.Quantization(frozen=self.quantize),
        )

    @property
    def limit(self) -> int | None:
        """The memory of a device that a step may use; `None` if unknown."""
        from jzero.machines.limits import limit_of
        from jzero.machines.machine import machine

        hardware = None if self.topology is None else machine(self.topology)
        try:
            return limit_of(None, self.topology, hardware)
        except ValueError:  # devices that do not say, such as CPUs: `limit_of` asks for a number then
            return None

    def sequences(self) -> tuple[int, int]:
        """Returns the global batch and the tokens of each sequence.

        Raises:
          ValueError: The devices do not divide the batch, or the sequence has no such parts.
        """
        number, batch, seq = self.axes["data"] * self.experts, self.batch, self.seq or DEFAULT_SEQ
        pieces = 1 if self.context == 1 else 2 * self.context  # a device takes two pieces, as balanced attention does
        for option, parts in (("context", pieces), ("loss-chunks", self.context * self.loss_chunks)):
            if rest := seq % parts:
                raise ValueError(
                    f"`--seq {seq}` must be a multiple of {parts}, for `--{option}`: {seq - rest or parts} is."
                )
        if batch is None:
            batch = number
        if rest := batch % number:
            fewer = math.gcd(batch, number)
            near = [str(x) for x in (batch - rest, batch - rest + number) if x]
            groups = "devices" if self.context == 1 else f"groups of {self.context} devices"
            shared = f"; `--context {self.num_devices // fewer}` shares them between devices" if batch < number else ""
            raise ValueError(
                f"`--batch {batch}` sequences cannot be shared out evenly over {number} {groups}: "
                f"{' or '.join(near)} sequences can, or {fewer} {groups if fewer > 1 else groups.replace('s', '', 1)}"
                f"{shared}."
            )
        return batch, seq


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a `PlanRequest`, the first parameter of a command, to its own."""
    hints = typing.get_type_hints(PlanRequest, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(PlanRequest)}
    _, *specific = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**options: Any) -> None:
        command(PlanRequest(**{name: options.pop(name) for name in hints}), **options)

    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in hints.items()
    ]
    # What typer reads; the annotations that `wraps` has copied are the command's.
    run.__signature__ = inspect.Signature([*shared, *specific])  # type: ignore[attr-defined]
    run.__annotations__ = {x.name: x.annotation for x in (*shared, *specific)}
    return run
