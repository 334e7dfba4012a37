"""DeepSpeed's estimators of the memory of model states, with its names, arguments and tables."""

from __future__ import annotations

from jzero.core.base.types import PyTree
from jzero.core.state.model_size import count_params
from jzero.deepspeed.formulas import Formulas, MemoryEstimate, find_row, tabulate


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
    this. To compare stages use `formulas="deepspeed-0.19"`, which counts them here too, as that version's stage 2 does:
    GPU `4P + 16P/N`; CPU `P · max(4N, 16) · f` with the optimizer on the host.

    Takes the arguments of `estimate_zero3_model_states_mem_needs` except `largest_layer_params`, `cpu_offload_params`
    and `zero_init`.

    Returns:
      Bytes of host memory per node, and bytes per device.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> jzero.estimate_zero1_model_states_mem_needs(1_000_000, 4, cpu_offload=False)
      (24000000, 7000000)

    References:
      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, Figure 1.
    """
    estimate = tabulate(1, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas)
    row = find_row(estimate, cpu_offload=cpu_offload)
    return row.cpu_bytes, row.gpu_bytes


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
    on the host `2P`; CPU: `P · 4g · f` and `P · max(4g, 16) · f`. With `formulas="deepspeed-0.19"`, as in the code of
    that version, `2P + 18P/N` replaces the first and `P · max(4N, 16) · f` the last.

    Takes the arguments of `estimate_zero3_model_states_mem_needs` except `largest_layer_params`, `cpu_offload_params`
    and `zero_init`.

    Returns:
      Bytes of host memory per node, and bytes per device.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> jzero.estimate_zero2_model_states_mem_needs(1_000_000, 4, cpu_offload=False)
      (24000000, 8000000)
    """
    estimate = tabulate(2, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas)
    row = find_row(estimate, cpu_offload=cpu_offload)
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

    Takes the arguments of `estimate_zero3_model_states_mem_needs_all_cold` except `largest_layer_params`. The first row
    has the optimizer on the host, the second all on the device, by `estimate_zero2_model_states_mem_needs`.

    Example:
      >>> jzero.estimate_zero2_model_states_mem_needs_all_cold(7e9, 8, verbose=False).rows[1].gpu_bytes
      42000000000
    """
    return tabulate(2, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


def estimate_zero2_model_states_mem_needs_all_live(
    model: PyTree,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formulas: Formulas = "documented",
    verbose: bool = True,
) -> MemoryEstimate:
    """Prints and returns what stage 2 needs under each choice of options, for a model.

    Takes the arguments of `estimate_zero3_model_states_mem_needs_all_live`, and gives the rows of
    `estimate_zero2_model_states_mem_needs_all_cold`.

    Example:
      >>> estimate = jzero.estimate_zero2_model_states_mem_needs_all_live(plain_state, 4, verbose=False)
      >>> estimate.total_params, estimate.rows[1].gpu_bytes
      (262144, 2097152)
    """
    params, _ = count_params(model)
    return tabulate(2, params, None, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


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
      Bytes of host memory per node, bytes per device, and those of them that hold the largest layer, parameters and
      gradients in 16 bits.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> jzero.estimate_zero3_model_states_mem_needs(1_000_000, 50_000, 4, cpu_offload=False)
      (1200000, 4700000, 200000)
    """
    estimate = tabulate(
        3, total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas
    )
    row = find_row(estimate, cpu_offload=cpu_offload, cpu_offload_params=cpu_offload_params, zero_init=zero_init)
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
      A `MemoryEstimate` with six rows, for parameters and optimizer on the host, the optimizer alone, or nothing, each
      with parameters born in shards and made whole.

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
    return tabulate(3, *sizes, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)


def estimate_zero3_model_states_mem_needs_all_live(
    model: PyTree,
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
    return tabulate(3, *sizes, num_gpus_per_node, num_nodes, additional_buffer_factor, formulas, verbose)
