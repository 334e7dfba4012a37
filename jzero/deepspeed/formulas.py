"""Memory of model states by DeepSpeed's formulas: numbers first, the table that DeepSpeed prints second.

The formulas count parameters and nothing else: no activations, no layout, no compiler. `jzero.plan_train_state` knows
the bytes of a layout, leaf by leaf.

[Note: Bytes per parameter]
Mixed precision with Adam, per parameter: 2 bytes for its 16-bit value, 2 for its 16-bit gradient, 12 for the fp32
master and the two moments, 4 for the gradient cast to fp32 for the update. ZeRO's own table has 4 + 12/N bytes at
stage 1, 2 + 14/N at stage 2 and 16/N at stage 3; it leaves out the fp32 gradient. DeepSpeed counts it, and its
documentation counts the 16-bit gradients of stage 2 unsharded, 4 + 16/N; its code has moved on to 2 + 18/N.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from jzero.core.base.text import Part, Report
from jzero.core.config.settings import check, integer, number, one_of

Formulas = Literal["documented", "deepspeed-0.19"]
FORMULAS = get_args(Formulas)
LIMIT = 2**63
BUFFER_FACTOR = 1.5
"""DeepSpeed's default factor on host memory."""
SIZE = number("a number of parameters, from 0 to below 2**63", lambda x: 0 <= x < LIMIT)
COUNT = integer(1, says="an integer >= 1 (and below 2**63)", most=LIMIT - 1)
FACTOR = number("a number > 0 (and below 2**63)", lambda x: 0 < x < LIMIT)
SWITCH = one_of(True, False, 0, 1, says="True or False")
"""A flag; DeepSpeed's are also 0 and 1."""


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """The needs of one choice of options, in bytes.

    Attributes:
      cpu_bytes: Host memory of one node.
      gpu_bytes: Memory of one device.
      cpu_offload: Whether the optimizer is on the host.
      cpu_offload_params: Whether the parameters are as well; `None` below stage 3, which has no such option.
      zero_init: Whether parameters are born in shards; `None` below stage 3.
    """

    cpu_bytes: int
    gpu_bytes: int
    cpu_offload: bool
    cpu_offload_params: bool | None = None
    zero_init: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures as plain data, the options also as DeepSpeed names them."""
        return {**dataclasses.asdict(self), "options": self.options}

    @property
    def options(self) -> str:
        """The options as DeepSpeed names them, e.g. `'offload_optimizer=none'`."""
        device = {True: "cpu", False: "none"}
        optimizer = f"offload_optimizer={device[self.cpu_offload]}"
        if self.cpu_offload_params is None or self.zero_init is None:
            return optimizer
        return f"offload_param={device[self.cpu_offload_params]:4}, {optimizer:22}, zero_init={self.zero_init:d}"


@dataclasses.dataclass(frozen=True)
class MemoryEstimate(Report):
    """What parameters, gradients and optimizer state need under each choice of options. `print` it for a table.

    Attributes:
      stage: The ZeRO stage.
      rows: One `MemoryRow` per choice of options: `cpu_bytes`, `gpu_bytes`, `options`.
      total_params: Parameters of the model.
      largest_layer_params: Parameters of its largest layer; `None` below stage 3, which gathers no layers.
      num_gpus_per_node: Devices per node.
      num_nodes: Nodes.
      additional_buffer_factor: Factor on host memory for what the formulas leave out.
      formulas: Which formulas the numbers are from.

    Example:
      >>> estimate = jzero.estimate_zero2_model_states_mem_needs_all_cold(2851e6, 8, verbose=False)
      >>> [(row.options, row.gpu_bytes) for row in estimate.rows]
      [('offload_optimizer=cpu', 5702000000), ('offload_optimizer=none', 17106000000)]
    """

    stage: int
    rows: tuple[MemoryRow, ...]
    total_params: float
    largest_layer_params: float | None
    num_gpus_per_node: int
    num_nodes: int
    additional_buffer_factor: float
    formulas: Formulas

    def parts(self) -> list[Part]:
        """Returns DeepSpeed's text."""
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        gpus = f"{self.num_gpus_per_node} GPU{'s' if self.num_gpus_per_node > 1 else ''}"
        model = f"{int(self.total_params / 1e6)}M total params"
        if self.largest_layer_params is not None:
            model += f", {int(self.largest_layer_params / 1e6)}M largest layer params"
        return [
            "Estimated memory needed for params, optim states and gradients for a:",
            f"HW: Setup with {nodes}, {gpus} per node.",
            f"SW: Model with {model}.",
            "  per CPU  |  per GPU |   Options",
            *(f" {row.cpu_bytes / 2**30:7.2f}GB | {row.gpu_bytes / 2**30:6.2f}GB | {row.options}" for row in self.rows),
        ]


Needs = tuple[float, float, *tuple[bool, ...]]


def _table(P: float, L: float, g: int, n: int, f: float) -> dict[tuple[int, str], tuple[Needs, ...]]:  # noqa: N803  # as papers write
    """Returns all formulas, by stage and version: per choice of options host memory, device memory and the options.

    P parameters, L of them in the largest layer, on n nodes with g devices each; f is the buffer factor. Options are
    `cpu_offload` and, at stage 3, `cpu_offload_params` and `zero_init`. See [Note: Bytes per parameter].
    """
    # Floats round as in DeepSpeed only in these orders of operations.
    N = g * n  # noqa: N806  # as papers write
    initialised = P * 4 * g * f  # by each process of a node, whole and in fp32
    stage_3: tuple[Needs, ...] = (
        (P * 18 * (1 / n) * f, 4 * L, True, True, True),
        (P * max(4 * g, 18 * (1 / n)) * f, 4 * L, True, True, False),
        (P * 16 * (1 / n) * f, 4 * L + int(2 * P / N), True, False, True),
        (P * max(4 * g, 16 * (1 / n)) * f, 4 * L + int(2 * P / N), True, False, False),
        (L * 4 * g * f, 4 * L + int(18 * P / N), False, False, True),
        (initialised, 4 * L + int(18 * P / N), False, False, False),
    )
    return {  # with offload stage 1 holds whole gradients until the step, and stage 2 hands them over by parts
        (1, "documented"): ((P * max(4 * g, 16) * f, 4 * P, True), (initialised, 4 * P + int(12 * P / N), False)),
        (1, "deepspeed-0.19"): ((P * max(4 * N, 16) * f, 4 * P, True), (initialised, 4 * P + int(16 * P / N), False)),
        (2, "documented"): ((P * max(4 * g, 16) * f, 2 * P, True), (initialised, 4 * P + int(16 * P / N), False)),
        (2, "deepspeed-0.19"): ((P * max(4 * N, 16) * f, 2 * P, True), (initialised, 2 * P + int(18 * P / N), False)),
        (3, "documented"): stage_3,
        (3, "deepspeed-0.19"): stage_3,
    }


def tabulate(  # noqa: PLR0913  # the stage and DeepSpeed's arguments
    stage: int,
    total_params: float,
    largest_layer_params: float | None,
    num_gpus_per_node: int,
    num_nodes: int,
    additional_buffer_factor: float,
    formulas: Formulas,
    verbose: bool = False,
) -> MemoryEstimate:
    """Returns the table of a stage; prints it if `verbose`. Raises a `ValueError` if an argument is out of range."""
    params = check("total_params", total_params, SIZE)
    layer = None
    if stage == 3:
        layer = check("largest_layer_params", largest_layer_params, SIZE)
        if layer > params:
            raise ValueError(
                f"`largest_layer_params` must not exceed `total_params`, which counts them too: got "
                f"{largest_layer_params!r} of {params!r}."
            )
    num_gpus, nodes = check("num_gpus_per_node", num_gpus_per_node, COUNT), check("num_nodes", num_nodes, COUNT)
    setup = int(num_gpus), int(nodes), check("additional_buffer_factor", additional_buffer_factor, FACTOR)
    check("formulas", formulas, one_of(*FORMULAS))
    check("verbose", verbose, SWITCH)
    needs = _table(params, layer or 0, *setup)[stage, formulas]
    rows = tuple(MemoryRow(int(cpu), int(gpu), *options) for cpu, gpu, *options in needs)
    estimate = MemoryEstimate(stage, rows, params, layer, *setup, formulas)
    if verbose:
        print(estimate)
    return estimate


def find_row(estimate: MemoryEstimate, **switches: bool) -> MemoryRow:
    """Returns the row of an estimate with these options."""
    for name, value in switches.items():
        check(name, value, SWITCH)
    if "cpu_offload_params" in switches and not switches["cpu_offload"]:
        switches["cpu_offload_params"] = False  # parameters do not go to the host alone
    return next(row for row in estimate.rows if all(getattr(row, name) == x for name, x in switches.items()))
