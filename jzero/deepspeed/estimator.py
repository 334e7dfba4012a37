"""Memory of model states by DeepSpeed's formulas: numbers first, the table that DeepSpeed prints second.

The formulas count parameters and nothing else: no activations, no layout, no compiler. `jzero.plan_train_state` knows
the bytes of a layout, leaf by leaf.

[Note: Bytes per parameter]
Mixed precision with Adam, per parameter: 2 bytes for its 16-bit value, 2 for its 16-bit gradient, 12 for the fp32
master and the two moments, 4 for the gradient cast to fp32 for the update. ZeRO's own table has 4 + 12/N bytes at
stage 1, 2 + 14/N at stage 2 and 16/N at stage 3; it leaves out the fp32 gradient. DeepSpeed counts it, and its
documentation takes the 16-bit gradients of stage 2 for whole, 4 + 16/N; its code has moved on to 2 + 18/N.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
from typing import Any, Literal, get_args

import numpy as np

from jzero.state.model_size import count_params

__all__ = [
    "MemoryEstimate",
    "MemoryRow",
    "estimate_zero1_model_states_mem_needs",
    "estimate_zero1_model_states_mem_needs_all_cold",
    "estimate_zero1_model_states_mem_needs_all_live",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

Formulas = Literal["documented", "deepspeed-0.19"]
FORMULAS = get_args(Formulas)
LIMIT = 2**63


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

    @property
    def options(self) -> str:
        """The options as DeepSpeed names them, e.g. `'offload_optimizer=none'`."""
        device = {True: "cpu", False: "none"}
        optimizer = f"offload_optimizer={device[self.cpu_offload]}"
        if self.cpu_offload_params is None or self.zero_init is None:
            return optimizer
        return f"offload_param={device[self.cpu_offload_params]:4}, {optimizer:22}, zero_init={self.zero_init:d}"


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
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

    def to_json(self) -> str:
        """Returns the estimate as JSON, the options of each row also as DeepSpeed names them."""
        rows = [{**dataclasses.asdict(row), "options": row.options} for row in self.rows]
        return json.dumps({**dataclasses.asdict(self), "rows": rows}, indent=2)

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        gpus = f"{self.num_gpus_per_node} GPU{'s' if self.num_gpus_per_node > 1 else ''}"
        model = f"{int(self.total_params / 1e6)}M total params"
        if self.largest_layer_params is not None:
            model += f", {int(self.largest_layer_params / 1e6)}M largest layer params"
        return "\n".join(
            [
                "Estimated memory needed for params, optim states and gradients for a:",
                f"HW: Setup with {nodes}, {gpus} per node.",
                f"SW: Model with {model}.",
                "  per CPU  |  per GPU |   Options",
                *(
                    f" {row.cpu_bytes / 2**30:7.2f}GB | {row.gpu_bytes / 2**30:6.2f}GB | {row.options}"
                    for row in self.rows
                ),
            ]
        )


# The table, and what reads it.

Needs = tuple[float, float, *tuple[bool, ...]]


def _table(P: float, L: float, g: int, n: int, f: float) -> dict[tuple[int, str], tuple[Needs, ...]]:  # noqa: N803
    """Returns all formulas, by stage and version: per choice of options host memory, device memory and the options.

    P parameters, L of them in the largest layer, on n nodes with g devices each; f is the buffer factor. Options are
    `cpu_offload` and, at stage 3, `cpu_offload_params` and `zero_init`. See [Note: Bytes per parameter].
    """
    # Floats round as in DeepSpeed only in these orders of operations.
    N = g * n  # noqa: N806
    made = P * 4 * g * f  # by each process of a node, whole and in fp32
    stage_3: tuple[Needs, ...] = (
        (P * 18 * (1 / n) * f, 4 * L, True, True, True),
        (P * max(4 * g, 18 * (1 / n)) * f, 4 * L, True, True, False),
        (P * 16 * (1 / n) * f, 4 * L + int(2 * P / N), True, False, True),
        (P * max(4 * g, 16 * (1 / n)) * f, 4 * L + int(2 * P / N), True, False, False),
        (L * 4 * g * f, 4 * L + int(18 * P / N), False, False, True),
        (made, 4 * L + int(18 * P / N), False, False, False),
    )
    return {  # with offload stage 1 holds whole gradients until the step, and stage 2 hands them over by parts
        (1, "documented"): ((P * max(4 * g, 16) * f, 4 * P, True), (made, 4 * P + int(12 * P / N), False)),
        (1, "deepspeed-0.19"): ((P * max(4 * N, 16) * f, 4 * P, True), (made, 4 * P + int(16 * P / N), False)),
        (2, "documented"): ((P * max(4 * g, 16) * f, 2 * P, True), (made, 4 * P + int(16 * P / N), False)),
        (2, "deepspeed-0.19"): ((P * max(4 * N, 16) * f, 2 * P, True), (made, 2 * P + int(18 * P / N), False)),
        (3, "documented"): stage_3,
        (3, "deepspeed-0.19"): stage_3,
    }


def _estimate(  # noqa: PLR0913  # the stage and DeepSpeed's arguments
    stage: int,
    total_params: Any,
    largest_layer_params: Any,
    num_gpus_per_node: Any,
    num_nodes: Any,
    additional_buffer_factor: Any,
    formulas: Formulas,
    verbose: bool = False,
) -> MemoryEstimate:
    """Returns, and prints, all rows of a stage. Raises a `ValueError` if an argument is out of range."""
    params = _check_params("total_params", total_params)
    layer = None
    if stage == 3:
        layer = _check_params("largest_layer_params", largest_layer_params)
        if layer > params:
            raise ValueError(
                f"`largest_layer_params` must not exceed `total_params`, which counts them too: got "
                f"{largest_layer_params!r} of {params!r}."
            )
    for name, value in (("num_gpus_per_node", num_gpus_per_node), ("num_nodes", num_nodes)):
        if not _is_number(value, numbers.Integral) or not 1 <= value < LIMIT:
            raise ValueError(f"`{name}` must be an integer >= 1 (and below 2**63): got {value!r}.")
    factor = additional_buffer_factor
    if not _is_number(factor, numbers.Real) or not 0 < factor < LIMIT:
        raise ValueError(f"`additional_buffer_factor` must be a number > 0 (and below 2**63): got {factor!r}.")
    if formulas not in FORMULAS:
        raise ValueError(f"`formulas` must be one of {FORMULAS}: got {formulas!r}.")
    setup = int(num_gpus_per_node), int(num_nodes), _plain(factor)
    needs = _table(params, layer or 0, *setup)[stage, formulas]
    rows = tuple(MemoryRow(int(cpu), int(gpu), *options) for cpu, gpu, *options in needs)
    estimate = MemoryEstimate(stage, rows, params, layer, *setup, formulas)
    if verbose:
        print(estimate)
    return estimate


def _row(estimate: MemoryEstimate, **switches: bool) -> MemoryRow:
    """Returns the row of an estimate with these options."""
    for name, value in switches.items():
        if not isinstance(value, bool | np.bool_ | int) or value not in (True, False):
            raise ValueError(f"`{name}` must be True or False: got {value!r}.")
    if "cpu_offload_params" in switches and not switches["cpu_offload"]:
        switches["cpu_offload_params"] = False  # parameters do not go to the host alone
    return next(row for row in estimate.rows if all(getattr(row, name) == x for name, x in switches.items()))


def _check_params(name: str, value: Any) -> float:
    if not _is_number(value, numbers.Real) or not 0 <= value < LIMIT:
        raise ValueError(f"`{name}` must be a number of parameters, from 0 to below 2**63: got {value!r}.")
    return _plain(value)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _plain(value: Any) -> float:
    """Returns a number as Python's own, whose integers do not overflow."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)


# What users call.


def estimate_zero1_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
) -> tuple[int, int]:
    """Returns the memory that the model states need at stage 1, in bytes. Not among DeepSpeed's estimators.

    With P parameters on N devices, g of them per node, and the buffer factor f:

    * GPU: `4P + 12P/N`, as in ZeRO's table: parameters and gradients stay whole in 16 bits; fp32 masters and Adam's
      moments are cut. With the optimizer on the host `4P` remains.
    * CPU: as at stage 2, `P · 4g · f` for the fp32 model that each process makes, and with the optimizer on the host
      `P · max(4g, 16) · f`.

    DeepSpeed's documented stage 2 also counts gradients cast to fp32 for the update, 4P/N, and so may come out above
    this. To compare stages use `formulas="deepspeed-0.19"`, which counts them here too: `4P + 16P/N`.

    Args:
      total_params: P, shared parameters once.
      num_gpus_per_node: g, devices per node.
      num_nodes: Nodes.
      cpu_offload: Whether the optimizer is on the host.
      additional_buffer_factor: f, for what the formulas leave out on the host.
      formulas: `"documented"`, or `"deepspeed-0.19"` for what that version's stage 2 counts, with whole gradients; the
        host then needs `P · max(4N, 16) · f`.

    Returns:
      `(cpu_mem, gpu_mem)`: bytes of host memory per node, bytes per device.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> jzero.estimate_zero1_model_states_mem_needs(1_000_000, 4, cpu_offload=False)
      (24000000, 7000000)

    References:
      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, Figure 1.
    """
    estimate = _estimate(1, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas)
    row = _row(estimate, cpu_offload=cpu_offload)
    return row.cpu_bytes, row.gpu_bytes


def estimate_zero1_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
    verbose: bool = True,
) -> MemoryEstimate:
    """Prints and returns what stage 1 needs under each choice of options, from the number of parameters.

    Args:
      total_params: Parameters of the model, shared ones once.
      num_gpus_per_node: Devices per node.
      num_nodes: Nodes.
      additional_buffer_factor: Factor on host memory for what the formulas leave out.
      formulas: As for `estimate_zero1_model_states_mem_needs`, and so are errors.
      verbose: Whether to print the table.

    Returns:
      A `MemoryEstimate` with a row for the optimizer on the host and one for all on the device.

    Example:
      >>> jzero.estimate_zero1_model_states_mem_needs_all_cold(7e9, 8, verbose=False).rows[1].gpu_bytes
      38500000000
    """
    return _estimate(1, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


def estimate_zero1_model_states_mem_needs_all_live(
    model: Any,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
    verbose: bool = True,
) -> MemoryEstimate:
    """Prints and returns what stage 1 needs under each choice of options, for a model.

    Args:
      model: As for `estimate_zero3_model_states_mem_needs_all_live`, and so are errors.
      num_gpus_per_node: Devices per node.
      num_nodes: Nodes.
      additional_buffer_factor: Factor on host memory for what the formulas leave out.
      formulas: As for `estimate_zero1_model_states_mem_needs`.
      verbose: Whether to print the table.

    Returns:
      A `MemoryEstimate` as of `estimate_zero1_model_states_mem_needs_all_cold`.

    Example:
      >>> estimate = jzero.estimate_zero1_model_states_mem_needs_all_live(plain_state, 4, verbose=False)
      >>> estimate.total_params, estimate.rows[1].gpu_bytes
      (262144, 1835008)
    """
    params, _ = count_params(model)
    return _estimate(1, params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
) -> tuple[int, int]:
    """Returns the memory that the model states need at stage 2, in bytes. Called like DeepSpeed's.

    With P parameters on N devices, g of them per node, and the buffer factor f, GPU: `4P + 16P/N`, with the optimizer
    on the host `2P`; CPU: `P · 4g · f` and `P · max(4g, 16) · f`.

    Args:
      total_params: P, shared parameters once.
      num_gpus_per_node: g, devices per node.
      num_nodes: Nodes.
      cpu_offload: Whether the optimizer is on the host.
      additional_buffer_factor: f, for what the formulas leave out on the host.
      formulas: `"documented"`, or `"deepspeed-0.19"` for those in the code of that version: `2P + 18P/N`, and
        `P · max(4N, 16) · f` with the optimizer on the host.

    Returns:
      `(cpu_mem, gpu_mem)`: bytes of host memory per node, bytes per device.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> jzero.estimate_zero2_model_states_mem_needs(1_000_000, 4, cpu_offload=False)
      (24000000, 8000000)
    """
    estimate = _estimate(2, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas)
    row = _row(estimate, cpu_offload=cpu_offload)
    return row.cpu_bytes, row.gpu_bytes


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
    verbose: bool = True,
) -> MemoryEstimate:
    """Prints and returns what stage 2 needs under each choice of options, from the number of parameters.

    Args:
      total_params: Parameters of the model, shared ones once.
      num_gpus_per_node: Devices per node.
      num_nodes: Nodes.
      additional_buffer_factor: Factor on host memory for what the formulas leave out.
      formulas: As for `estimate_zero2_model_states_mem_needs`, and so are errors.
      verbose: Whether to print the table.

    Returns:
      A `MemoryEstimate` with a row for the optimizer on the host and one for all on the device.

    Example:
      >>> jzero.estimate_zero2_model_states_mem_needs_all_cold(7e9, 8, verbose=False).rows[1].gpu_bytes
      42000000000
    """
    return _estimate(2, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


def estimate_zero2_model_states_mem_needs_all_live(
    model: Any,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
    verbose: bool = True,
) -> MemoryEstimate:
    """Prints and returns what stage 2 needs under each choice of options, for a model.

    Args:
      model: As for `estimate_zero3_model_states_mem_needs_all_live`, and so are errors.
      num_gpus_per_node: Devices per node.
      num_nodes: Nodes.
      additional_buffer_factor: Factor on host memory for what the formulas leave out.
      formulas: As for `estimate_zero2_model_states_mem_needs`.
      verbose: Whether to print the table.

    Returns:
      A `MemoryEstimate` as of `estimate_zero2_model_states_mem_needs_all_cold`.

    Example:
      >>> estimate = jzero.estimate_zero2_model_states_mem_needs_all_live(plain_state, 4, verbose=False)
      >>> estimate.total_params, estimate.rows[1].gpu_bytes
      (262144, 2097152)
    """
    params, _ = count_params(model)
    return _estimate(2, params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


def estimate_zero3_model_states_mem_needs(  # noqa: PLR0913  # DeepSpeed's arguments
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
) -> tuple[int, int, int]:
    """Returns the memory that the model states need at stage 3, in bytes. Called like DeepSpeed's.

    With P parameters, L of them in the largest layer, on N devices on n nodes, g per node, and the buffer factor f:

    | on the host | GPU | CPU, born in shards | CPU, made whole |
    |---|---|---|---|
    | parameters and optimizer | `4L` | `P · 18/n · f` | `P · max(4g, 18/n) · f` |
    | optimizer | `4L + 2P/N` | `P · 16/n · f` | `P · max(4g, 16/n) · f` |
    | nothing | `4L + 18P/N` | `L · 4g · f` | `P · 4g · f` |

    Args:
      total_params: P, shared parameters once.
      largest_layer_params: L, the most parameters that one module owns itself, not through modules within it.
      num_gpus_per_node: g, devices per node.
      num_nodes: n, nodes.
      cpu_offload: Whether the optimizer is on the host.
      cpu_offload_params: Whether the parameters are as well; counts only with `cpu_offload`.
      zero_init: Whether parameters are born in shards, as by `init_train_state`.
      additional_buffer_factor: f, for what the formulas leave out on the host.
      formulas: `"documented"` or `"deepspeed-0.19"`; the same at stage 3.

    Returns:
      `(cpu_mem, gpu_mem, largest_layer_memory)`: bytes of host memory per node, bytes per device, and those of them
      that hold the largest layer, parameters and gradients in 16 bits.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> jzero.estimate_zero3_model_states_mem_needs(1_000_000, 50_000, 4, cpu_offload=False)
      (1200000, 4700000, 200000)
    """
    estimate = _estimate(
        3, total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas
    )
    row = _row(estimate, cpu_offload=cpu_offload, cpu_offload_params=cpu_offload_params, zero_init=zero_init)
    largest_layer_bytes = estimate.rows[0].gpu_bytes  # all that the device holds if the rest is on the host
    return row.cpu_bytes, row.gpu_bytes, largest_layer_bytes


def estimate_zero3_model_states_mem_needs_all_cold(  # noqa: PLR0913  # DeepSpeed's arguments
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
    verbose: bool = True,
) -> MemoryEstimate:
    """Prints and returns what stage 3 needs under each choice of options, from the numbers of parameters.

    Called like DeepSpeed's, which prints the same table and returns nothing.

    Args:
      total_params: Parameters of the model, shared ones once.
      largest_layer_params: The most parameters that one module owns itself, not through modules within it.
      num_gpus_per_node: Devices per node.
      num_nodes: Nodes.
      additional_buffer_factor: Factor on host memory for what the formulas leave out.
      formulas: `"documented"` or `"deepspeed-0.19"`; the same at stage 3.
      verbose: Whether to print the table.

    Returns:
      A `MemoryEstimate` with six rows: parameters and optimizer on the host, the optimizer alone, nothing; each with
      parameters born in shards and made whole.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> estimate = jzero.estimate_zero3_model_states_mem_needs_all_cold(7e9, 131e6, 8)
      Estimated memory needed for params, optim states and gradients for a:
      HW: Setup with 1 node, 8 GPUs per node.
      SW: Model with 7000M total params, 131M largest layer params.
        per CPU  |  per GPU |   Options
        176.02GB |   0.49GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
        312.92GB |   0.49GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
        156.46GB |   2.12GB | offload_param=none, offload_optimizer=cpu , zero_init=1
        312.92GB |   2.12GB | offload_param=none, offload_optimizer=cpu , zero_init=0
          5.86GB |  15.16GB | offload_param=none, offload_optimizer=none, zero_init=1
        312.92GB |  15.16GB | offload_param=none, offload_optimizer=none, zero_init=0
    """
    sizes = total_params, largest_layer_params
    return _estimate(3, *sizes, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


def estimate_zero3_model_states_mem_needs_all_live(
    model: Any,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
    verbose: bool = True,
) -> MemoryEstimate:
    """Prints and returns what stage 3 needs under each choice of options, for a model.

    A layer is what one module owns itself: leaves that are siblings in one dict (kernel and bias of a Dense), or the
    `nnx.Param` attributes of one module. Of a scanned stack one layer counts; it shows by two or more leaves under one
    node that share their leading size. Where that guess fails, give the numbers to
    `estimate_zero3_model_states_mem_needs_all_cold`.

    Args:
      model: Linen variables or parameters; an NNX module or its state; a train state, sharded or not; or any pytree of
        arrays. Shapes alone (`jax.eval_shape`, `nnx.eval_shape`) do, and then nothing is allocated. Parameters that
        share one array, or one `nnx.Param`, count once; two leaves of an abstract tree always count twice.
      num_gpus_per_node: Devices per node.
      num_nodes: Nodes.
      additional_buffer_factor: Factor on host memory for what the formulas leave out.
      formulas: `"documented"` or `"deepspeed-0.19"`; the same at stage 3.
      verbose: Whether to print the table.

    Returns:
      A `MemoryEstimate` as of `estimate_zero3_model_states_mem_needs_all_cold`.

    Raises:
      ValueError: An argument is out of range, or the model has no parameters.
      TypeError: The model holds leaves that are no arrays.

    Example:
      >>> model = {"dense": {"kernel": jax.ShapeDtypeStruct((1024, 4096), "float32")}}
      >>> estimate = jzero.estimate_zero3_model_states_mem_needs_all_live(model, 8, verbose=False)
      >>> estimate.total_params, estimate.largest_layer_params
      (4194304, 4194304)
    """
    sizes = count_params(model)
    return _estimate(3, *sizes, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)
