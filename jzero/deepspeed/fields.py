"""The layout of a configuration: fields of `ZeroConfig`, `Offload` and `Precision`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jzero.config.offload import ZenFlow
from jzero.config.precision import DtypeName, DynamicLossScale, Precision
from jzero.config.quantization import Quantization
from jzero.deepspeed.settings import Settings
from jzero.deepspeed.zero_keys import NO_CAP

ZERO = "zero_optimization"
OPTIMIZER_BLOCK, PARAM_BLOCK = f"{ZERO}.offload_optimizer.", f"{ZERO}.offload_param."
ZENFLOW_BLOCK = f"{ZERO}.zenflow."
STAGE_3_KEYS = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "memory_efficient_linear",
    "mics_shard_size",
    "mics_hierarchical_params_gather",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
)
STAGE_1_2_KEYS = ("allgather_partitions", "allgather_bucket_size", "use_multi_rank_bucket_allreduce")
ADAM_BYTES = 12
"""Per parameter: its fp32 master and Adam's two moments."""

CHUNK = "`Offload.chunk_bytes` = 16 MiB"

REPLICA_AXIS, NODE_AXIS = "replica", "node"


class ConfigFields(NamedTuple):
    """Arguments of `ZeroConfig` and of its `Offload`."""

    config: dict[str, Any]
    offload: dict[str, Any]


def config_fields(settings: Settings, num_devices: int | None) -> ConfigFields:
    """Returns the arguments of a `ZeroConfig`; changes verdicts that depend on other keys.

    Raises:
      ValueError: Two keys contradict each other.
    """
    stage = settings[f"{ZERO}.stage"]
    precision = _precision(settings, stage)
    fields: dict[str, Any] = {"stage": stage, "precision": precision}
    fields |= _gathering(settings, stage, precision) | _reducing(settings, stage, precision)
    if stage == 3:
        fields |= _thresholds(settings) | _prefetching(settings, precision)
        fields |= _replicas(settings, num_devices) | _nodes(settings, num_devices) | _quantized(settings)
    offload = _offload(settings, stage)
    _judge_by_stage(settings, stage)
    return ConfigFields(fields, offload)


def _judge_by_stage(settings: Settings, stage: int) -> None:
    """Ignores keys that DeepSpeed does not read at this stage."""
    for name in STAGE_3_KEYS if stage < 3 else STAGE_1_2_KEYS:
        which = "stage 3" if stage < 3 else "stages 1 and 2"
        settings.judge(f"{ZERO}.{name}", "ignored", f"DeepSpeed reads it at {which} only")
    if stage == 0:
        stage_row = settings.rows.get(f"{ZERO}.stage")
        settings.judge_all(f"{ZERO}.", "ignored", "stage 0 partitions nothing")
        if stage_row is not None:
            settings.rows[f"{ZERO}.stage"] = stage_row


def _gathering(settings: Settings, stage: int, precision: Precision) -> dict[str, Any]:
    size = settings.values.get(f"{ZERO}.allgather_bucket_size")
    if stage not in (1, 2) or size is None:
        return {}
    return {"all_gather_bucket_bytes": _bucket_bytes(size, precision.compute_dtype)}


def _reducing(settings: Settings, stage: int, precision: Precision) -> dict[str, Any]:
    if stage == 0:
        return {}
    size = settings.values.get(f"{ZERO}.reduce_bucket_size")
    dtype = precision.reduce_dtype or precision.compute_dtype
    bucket = {} if size is None else {"reduce_bucket_bytes": _bucket_bytes(size, dtype)}
    return {"reduce_scatter": settings[f"{ZERO}.reduce_scatter"], **bucket}


def _bucket_bytes(size: int, dtype: DtypeName | None) -> int:
    return max(1, size * _itemsize(dtype))  # 0: each leaf alone


def _itemsize(dtype: DtypeName | None) -> int:
    return jnp.dtype(dtype or "float32").itemsize


def _thresholds(settings: Settings) -> dict[str, Any]:
    cap = settings[f"{ZERO}.model_persistence_threshold"]
    return {
        "persistence_threshold": settings[f"{ZERO}.param_persistence_threshold"],
        "model_persistence_threshold": None if cap >= NO_CAP else cap,
    }


def _prefetching(settings: Settings, precision: Precision) -> dict[str, Any]:
    path = f"{ZERO}.prefetch_bucket_size"
    size = settings.values.get(path)
    if size is None:
        return {}
    if _device(settings, "offload_param", "cpu_offload_param") != "none":
        settings.judge(path, "compiler", "parameters that are offloaded are fetched where they are gathered")
        return {}
    return {"prefetch_bytes": size * _itemsize(precision.compute_dtype)}


def _replicas(settings: Settings, num_devices: int | None) -> dict[str, Any]:
    """Maps `mics_shard_size` to `replica_axis`: each group of devices holds all shards."""
    fields = {"replica_axis": REPLICA_AXIS}
    fields_of_groups = _groups(settings, "mics_shard_size", 1, num_devices, fields, "nothing is replicated")
    path = f"{ZERO}.mics_hierarchical_params_gather"
    if not settings[path]:
        return fields_of_groups
    if not fields_of_groups:
        settings.judge(path, "ignored", "`mics_shard_size` makes no groups")
        return fields_of_groups
    mesh = f"jzero.make_mesh({REPLICA_AXIS}=..., {NODE_AXIS}=..., data=...)"
    size = settings[f"{ZERO}.mics_shard_size"]
    settings.judge(
        path,
        "honoured",
        f"`node_axis={NODE_AXIS!r}`: needs `mesh={mesh}`, with the nodes of a group and {size} devices",
    )
    return {**fields_of_groups, "node_axis": NODE_AXIS}


def _nodes(settings: Settings, num_devices: int | None) -> dict[str, Any]:
    """Maps `zero_hpz_partition_size` to `node_axis`: each node holds secondary shards of all parameters (hpZ)."""
    fields = {"node_axis": NODE_AXIS, "secondary_params": True}
    return _groups(settings, "zero_hpz_partition_size", 2, num_devices, fields, "there is one node")


def _quantized(settings: Settings) -> dict[str, Any]:
    quantization = Quantization(
        gather="int8" if settings[f"{ZERO}.zero_quantized_weights"] else "none",
        reduce="int4" if settings[f"{ZERO}.zero_quantized_gradients"] else "none",
        frozen="int8" if settings[f"{ZERO}.zero_quantized_nontrainable_weights"] else "none",
    )
    return {} if quantization == Quantization() else {"quantization": quantization}


def _groups(
    settings: Settings, key: str, least: int, num_devices: int | None, fields: dict[str, Any], alone: str
) -> dict[str, Any]:
    """Returns the fields of a key that sets the devices of a group; the first is the mesh axis over groups.

    `least` is the smallest group, `alone` the note if one group has all devices.
    """
    path = f"{ZERO}.{key}"
    size = settings[path]
    if size < least:
        settings.judge(path, "ignored", "off")
        return {}
    if num_devices is not None and num_devices % size:
        raise ValueError(f"`{path}` ({size}) must divide the number of devices: got {num_devices}.")
    if size == num_devices:
        settings.judge(path, "honoured", f"all devices: {alone}")
        return {}
    number = "..." if num_devices is None else num_devices // size
    mesh = f"jzero.make_mesh({next(iter(fields.values()))}={number}, data={size})"
    arguments = ", ".join(f"`{name}={value!r}`" for name, value in fields.items())
    settings.judge(path, "honoured", f"{arguments}: needs `mesh={mesh}`")
    return fields


def _offload(settings: Settings, stage: int) -> dict[str, Any]:
    optimizer = _device(settings, "offload_optimizer", "cpu_offload")
    params = _device(settings, "offload_param", "cpu_offload_param")
    if params != "none" and stage < 3:
        settings.judge_all(f"{ZERO}.cpu_offload_param", "ignored", "DeepSpeed reads it at stage 3 only")
        settings.judge_all(PARAM_BLOCK, "ignored", "DeepSpeed reads it at stage 3 only")
        params = "none"
    if params == "disk" and optimizer != "disk" and stage:
        settings.judge(f"{PARAM_BLOCK}device", "refused", "it also needs `offload_optimizer.device: nvme`; or set cpu")
        params = "none"
    if stage == 0:
        _disk(settings, is_used=False)
        return {}
    if optimizer == "none":
        settings.judge_all(ZENFLOW_BLOCK, "ignored", "no optimizer state is offloaded")
        settings.judge(f"{OPTIMIZER_BLOCK}ratio", "ignored", "no optimizer state is offloaded")
        settings.judge(f"{ZERO}.sub_group_size", "ignored", "tiles of an update on the host")
        return {"params": params, **_disk(settings, is_used=False)}
    elements = settings[f"{ZERO}.sub_group_size"]
    settings.judge(
        f"{ZERO}.sub_group_size",
        "ignored",
        f"its tiles stay in host memory. jzero's chunks, {CHUNK}, pass through the device: at {ADAM_BYTES} bytes an "
        f"element (master and moments) this size would be {elements * ADAM_BYTES}",
    )
    ratio = settings[f"{OPTIMIZER_BLOCK}ratio"]
    if ratio > 1:
        raise ValueError(f"`{OPTIMIZER_BLOCK}ratio` must be from 0 to 1: got {ratio!r}.")
    fields = {"optimizer": optimizer, "params": params, "ratio": ratio}
    return {**fields, **_disk(settings, is_used=optimizer == "disk"), **_zenflow(settings, params)}


def _zenflow(settings: Settings, params: str) -> dict[str, Any]:
    """Returns the fields of updates beside the steps of an interval."""
    if not any(path.startswith(ZENFLOW_BLOCK) for path in settings.rows):
        return {}
    if params != "none":
        settings.judge_all(ZENFLOW_BLOCK, "refused", "parameters are offloaded, too: it needs them on the devices")
        return {}
    if settings[f"{ZENFLOW_BLOCK}select_strategy"] == "epoch":
        settings.judge(f"{ZENFLOW_BLOCK}select_strategy", "refused", "steps do not know epochs: set it to step")
    every = settings[f"{ZENFLOW_BLOCK}update_interval"] or ZenFlow().update_interval
    multiples = {}
    if f"{ZENFLOW_BLOCK}update_interval" in settings.autos:
        settings.judge_auto(f"{ZENFLOW_BLOCK}update_interval", f"`ZenFlow.update_interval={every}`")
    for name, key in (("select_interval", "select_interval"), ("warm_up_steps", "full_warm_up_rounds")):
        steps = settings[f"{ZENFLOW_BLOCK}{key}"]
        steps = getattr(ZenFlow(), name) if steps is None else steps
        multiples[name] = -(-steps // every) * every
        if f"{ZENFLOW_BLOCK}{key}" in settings.autos:
            settings.judge_auto(f"{ZENFLOW_BLOCK}{key}", f"`ZenFlow.{name}={multiples[name]}`")
        if multiples[name] != steps:
            note = f"`ZenFlow.{name}={multiples[name]}`, the next multiple of `update_interval`"
            settings.judge(f"{ZENFLOW_BLOCK}{key}", "honoured", note)
    ratio, overlap = settings[f"{ZENFLOW_BLOCK}topk_ratio"], settings[f"{ZENFLOW_BLOCK}overlap_step"]
    flow = ZenFlow(topk_ratio=ratio, update_interval=every, overlap=overlap, **multiples)
    return {"compute": "host", "zenflow": flow}


def _disk(settings: Settings, *, is_used: bool) -> dict[str, Any]:
    """Returns the fields of optimizer state on NVMe."""
    if not is_used:
        settings.judge(f"{OPTIMIZER_BLOCK}nvme_path", "ignored", "no optimizer state goes to NVMe")
        settings.judge_all("aio.", "ignored", "no optimizer state goes to NVMe")
        return {}
    path, threads = settings[f"{OPTIMIZER_BLOCK}nvme_path"], settings["aio.intra_op_parallelism"]
    if not path:
        raise ValueError(
            f"`{OPTIMIZER_BLOCK}device` is nvme, which needs a folder on a local disk: set "
            f"`{OPTIMIZER_BLOCK}nvme_path`."
        )
    for direction in ("read", "write"):
        settings.judge(f"{OPTIMIZER_BLOCK}pipeline_{direction}", "ignored", "records are read ahead and written behind")
    settings.judge(f"{OPTIMIZER_BLOCK}pin_memory", "ignored", "records pass through buffers of their own")
    settings.judge(f"{ZERO}.sub_group_size", "ignored", f"a record is one request: {CHUNK}")
    if threads > 1:
        return {"path": path, "disk_threads": threads}
    settings.judge("aio.intra_op_parallelism", "ignored", "DeepSpeed's default; `Offload.disk_threads` stays 2")
    return {"path": path}


def _device(settings: Settings, block: str, old_name: str) -> str:
    """Returns "host", "disk" or "none"."""
    path, old_path = f"{ZERO}.{block}.device", f"{ZERO}.{old_name}"
    if old_path in settings.values:
        if any(row.startswith(f"{ZERO}.{block}") for row in settings.rows):
            raise ValueError(f"`{old_path}` is the old name of `{block}`: got both, keep `{ZERO}.{block}`.")
        return "host" if settings[old_path] else "none"
    return {"nvme": "disk", "cpu": "host"}.get(settings[path], "none")


def _precision(settings: Settings, stage: int) -> Precision:
    is_fp16, is_bf16 = settings["fp16.enabled"], settings["bf16.enabled"]
    if is_fp16 and is_bf16:
        raise ValueError("`fp16.enabled` and `bf16.enabled` are both true: turn one of them off.")
    for path, other in (("fp16.enabled", "bf16.enabled"), ("bf16.enabled", "fp16.enabled")):
        if path in settings.autos and settings[other]:
            settings.judge_auto(path, f"false, since `{other}` is true")
    compute: DtypeName | None = "float16" if is_fp16 else "bfloat16" if is_bf16 else None
    declared = settings["data_types.param_dtype"]
    if declared not in (None, compute or "float32"):
        raise ValueError(
            f"`data_types.param_dtype` is {declared!r}, but by `fp16.enabled` and `bf16.enabled` parameters are "
            f"{compute or 'float32'!r}: let them agree."
        )
    reduce, accumulate = settings["communication_data_type"], settings["data_types.grad_accum_dtype"]
    if reduce is not None and accumulate is None:  # jzero would accumulate in what it reduces in
        accumulate = compute or "float32"
    for name, is_on in (("fp16", is_fp16), ("bf16", is_bf16)):
        if not is_on:
            settings.judge_all(f"{name}.", "ignored", f"`{name}.enabled` is not true")
    return Precision(
        compute_dtype=compute,
        reduce_dtype=reduce,
        accumulate_dtype=accumulate,
        loss_scale=_loss_scale(settings) if is_fp16 else None,
        **(_bf16(settings, stage) if is_bf16 else {}),
    )


def _loss_scale(settings: Settings) -> float | DynamicLossScale:
    if (static := settings["fp16.loss_scale"]) != 0:
        dynamic = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
        for name in dynamic:
            settings.judge(f"fp16.{name}", "ignored", "the loss scale is static")
        return float(static)
    try:
        return DynamicLossScale(
            initial=2.0 ** settings["fp16.initial_scale_power"],
            window=settings["fp16.loss_scale_window"],
            hysteresis=settings["fp16.hysteresis"],
            minimum=settings["fp16.min_loss_scale"],
            consecutive_hysteresis=settings["fp16.consecutive_hysteresis"],
        )
    except (ValueError, OverflowError) as error:
        raise ValueError(f"The block `fp16` makes no loss scale: {error}") from error


def _bf16(settings: Settings, stage: int) -> dict[str, Any]:
    masters = settings["bf16.bf16_master_weights_and_grads"]
    states = settings["bf16.bf16_optimizer_states"]
    # DeepSpeed looks at its default, true, at stages 1 and 2 only.
    skips = settings["bf16.check_grad_overflow"] if stage in (1, 2) else settings.values.get("bf16.check_grad_overflow")
    if stage in (1, 2):
        settings.imply("bf16.check_grad_overflow", "honoured", "DeepSpeed's default, true: `Precision.skip_nonfinite`")
    return {
        "master_dtype": "bfloat16" if masters else None,
        "state_dtype": "bfloat16" if states else None,
        "skip_nonfinite": bool(skips),
    }
