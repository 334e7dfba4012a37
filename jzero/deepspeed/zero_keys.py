"""The keys of `zero_optimization`, offload included, and what jzero makes of each. Defaults are DeepSpeed 0.19's."""

from __future__ import annotations

from jzero.deepspeed.key import NVME, Key

__all__ = ["HAS_PREFETCH_BYTES", "NO_CAP", "OFFLOAD", "ZERO"]

HAS_PREFETCH_BYTES = False  # MERGE: True once there is `ZeroConfig.prefetch_bytes`

NO_CAP = 2**63 - 1
"""What DeepSpeed writes for "no limit" (`sys.maxsize`)."""

DEVICES = ("none", "cpu", "nvme")
PINNED = "what is offloaded is always in pinned memory"
SCAN = "the compiler's schedule; a scanned stack is gathered layer by layer"
STAGE3 = "stage3_"

ZERO = (
    Key("zero_optimization.stage", "int", 0, "honoured", "`ZeroConfig.stage`"),
    Key("zero_optimization.reduce_scatter", "bool", True, "honoured", "`ZeroConfig.reduce_scatter`"),
    Key(
        "zero_optimization.reduce_bucket_size",
        "int",
        500_000_000,
        "honoured",
        "`ZeroConfig.reduce_bucket_bytes`: elements times the bytes of the dtype that is reduced; GPUs only",
        least=1,
    ),
    Key(
        "zero_optimization.allgather_bucket_size",
        "int",
        500_000_000,
        "honoured",
        "`ZeroConfig.all_gather_bucket_bytes`: elements times the bytes of the dtype that is gathered; GPUs only",
    ),
    Key("zero_optimization.contiguous_gradients", "bool", True, "compiler", "it lays out buffers"),
    Key("zero_optimization.use_multi_rank_bucket_allreduce", "bool", True, "compiler", "it combines collectives"),
    Key("zero_optimization.allgather_partitions", "bool", True, "compiler", "how what is gathered travels"),
    Key("zero_optimization.overlap_comm", "bool", None, "compiler", "it schedules collectives beside computation"),
    Key(
        "zero_optimization.compute_grad_norm",
        "bool",
        True,
        "ignored",
        "every step returns `grad_norm`, which costs one sum over the gradients",
    ),
    Key(
        "zero_optimization.load_from_fp32_weights",
        "bool",
        True,
        "refused",
        "a restored state always has the masters that were saved; to start from 16-bit weights, load those",
    ),
    Key(
        "zero_optimization.elastic_checkpoint",
        "bool",
        False,
        "ignored",
        "every checkpoint of jzero can be restored on any number of devices",
    ),
    Key("zero_optimization.sub_group_size", "int", 1_000_000_000, "ignored", "tiles of DeepSpeed's update"),
    Key(
        "zero_optimization.prefetch_bucket_size",
        "int",
        50_000_000,
        "honoured" if HAS_PREFETCH_BYTES else "compiler",
        "`ZeroConfig.prefetch_bytes`: elements times the bytes of the dtype that is gathered"
        if HAS_PREFETCH_BYTES
        else "it schedules gathers ahead of their use; see `make_train_step(compiler_options='recommended')`",
        old_names=(STAGE3 + "prefetch_bucket_size",),
    ),
    Key(
        "zero_optimization.param_persistence_threshold",
        "int",
        100_000,
        "honoured",
        "`ZeroConfig.persistence_threshold`, in elements",
        old_names=(STAGE3 + "param_persistence_threshold",),
    ),
    Key(
        "zero_optimization.model_persistence_threshold",
        "int",
        NO_CAP,
        "honoured",
        "`ZeroConfig.model_persistence_threshold`, in elements; 2^63-1 is None",
        old_names=(STAGE3 + "model_persistence_threshold",),
    ),
    Key(
        "zero_optimization.max_live_parameters",
        "int",
        1_000_000_000,
        "compiler",
        SCAN,
        old_names=(STAGE3 + "max_live_parameters",),
    ),
    Key(
        "zero_optimization.max_reuse_distance",
        "int",
        1_000_000_000,
        "compiler",
        "parameters are freed after each use; `ZeroConfig.reshard_after_forward=False` keeps them",
        old_names=(STAGE3 + "max_reuse_distance",),
    ),
    Key(
        "zero_optimization.gather_16bit_weights_on_model_save",
        "bool",
        False,
        "ignored",
        "`jzero.export_params` writes whole weights, one leaf at a time",
        old_names=(STAGE3 + "gather_16bit_weights_on_model_save", STAGE3 + "gather_fp16_weights_on_model_save"),
    ),
    Key(
        "zero_optimization.module_granularity_threshold",
        "int",
        0,
        "compiler",
        SCAN,
        old_names=(STAGE3 + "module_granularity_threshold",),
    ),
    Key(
        "zero_optimization.use_all_reduce_for_fetch_params",
        "bool",
        False,
        "compiler",
        "how what is gathered travels",
        old_names=(STAGE3 + "use_all_reduce_for_fetch_params",),
    ),
    Key(
        "zero_optimization.allgather_sequential",
        "bool",
        False,
        "compiler",
        "it combines collectives; `ZeroConfig.all_gather_bucket_bytes` bounds that",
        old_names=(STAGE3 + "allgather_sequential",),
    ),
    Key("zero_optimization.ignore_unused_parameters", "bool", True, "ignored", "an unused one has a gradient of zero"),
    Key("zero_optimization.legacy_stage1", "bool", False, "ignored", "there is one stage 1"),
    Key("zero_optimization.round_robin_gradients", "bool", False, "ignored", "every leaf is cut evenly"),
    Key("zero_optimization.parameter_alignment", "bool", False, "ignored", "leaves are not packed into one buffer"),
    Key("zero_optimization.memory_efficient_linear", "bool", True, "compiler", "only shards are kept for backward"),
    Key("zero_optimization.pipeline_loading_checkpoint", "bool", False, "ignored", "about DeepSpeed's checkpoints"),
    Key("zero_optimization.override_module_apply", "bool", True, "ignored", "about torch modules"),
    Key("zero_optimization.log_trace_cache_warnings", "bool", False, "ignored", "there is no trace cache"),
    Key(
        "zero_optimization.enable_sanity_checks",
        "bool",
        False,
        "ignored",
        "see `jzero.analyze(...).verify()` and `jzero.check_equivalence`",
    ),
    Key("zero_optimization.leaf_module", "block", None, "ignored", "there are no hooks on modules"),
    Key("zero_optimization.save_muon_momentum_buffer_in_memory", "bool", False, "ignored", NVME),
    Key(
        "zero_optimization.zero_hpz_partition_size",
        "int",
        1,
        "refused",
        "jzero keeps no second shard per node; `replica_axis` shards inside of each node instead",
        off=(0,),
    ),
    Key("zero_optimization.zero_quantized_weights", "bool", False, "refused", "jzero gathers 16 or 32 bits"),
    Key(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "bool",
        False,
        "refused",
        "jzero keeps frozen parameters as they are: hand them in quantized",
    ),
    Key("zero_optimization.zero_quantized_gradients", "bool", False, "refused", "jzero reduces 16 or 32 bits"),
    Key("zero_optimization.zeropp_loco_param", "block", None, "refused", "it belongs to quantized gradients"),
    Key(
        "zero_optimization.mics_shard_size",
        "int",
        -1,
        "honoured",
        "`ZeroConfig.replica_axis`",
        off=(0,),
        least=-1,
    ),
    Key(
        "zero_optimization.mics_hierarchical_params_gather",
        "bool",
        False,
        "compiler",
        "it routes each gather over the machine's links",
    ),
    Key(
        "zero_optimization.zenflow",
        "block",
        None,
        "refused",
        "it changes the numbers; the nearest is `jzero.Offload(optimizer='host', compute='host', delay=1)`",
    ),
)

OFFLOAD = (
    Key(
        "zero_optimization.offload_optimizer.device",
        "string",
        "none",
        "honoured",
        "`Offload.optimizer`; the update runs on the device, chunk by chunk (`Offload.compute='host'`: on the CPU)",
        choices=DEVICES,
    ),
    Key(
        "zero_optimization.offload_optimizer.ratio",
        "number",
        1.0,
        "honoured",
        "`Offload.ratio`",
    ),
    Key(
        "zero_optimization.offload_optimizer.pin_memory",
        "bool",
        True,
        "ignored",
        PINNED,
    ),
    Key("zero_optimization.offload_optimizer.pipeline_read", "bool", False, "compiler", "it overlaps copies"),
    Key("zero_optimization.offload_optimizer.pipeline_write", "bool", False, "compiler", "it overlaps copies"),
    Key("zero_optimization.offload_optimizer.nvme_path", "string", None, "ignored", NVME),
    Key("zero_optimization.offload_optimizer.buffer_count", "int", 4, "ignored", NVME),
    Key("zero_optimization.offload_optimizer.fast_init", "bool", False, "ignored", NVME),
    Key(
        "zero_optimization.offload_optimizer.super_offload",
        "bool",
        False,
        "refused",
        "it speculates on the host's CPU; leave it out for the plain offload",
    ),
    Key("zero_optimization.offload_optimizer.cpuadam_cores_perc", "number", 0.8, "ignored", "XLA has its own threads"),
    Key(
        "zero_optimization.cpu_offload", "bool", None, "honoured", "`Offload.optimizer`; now `offload_optimizer.device`"
    ),
    Key(
        "zero_optimization.offload_param.device",
        "string",
        "none",
        "honoured",
        "`Offload.params`, at stage 3",
        choices=DEVICES,
    ),
    Key(
        "zero_optimization.offload_param.pin_memory",
        "bool",
        True,
        "ignored",
        PINNED,
    ),
    Key("zero_optimization.offload_param.nvme_path", "string", None, "ignored", NVME),
    Key("zero_optimization.offload_param.buffer_count", "int", 5, "ignored", NVME),
    Key("zero_optimization.offload_param.buffer_size", "int", 100_000_000, "ignored", NVME),
    Key("zero_optimization.offload_param.max_in_cpu", "int", 1_000_000_000, "ignored", NVME),
    Key(
        "zero_optimization.cpu_offload_param",
        "bool",
        None,
        "honoured",
        "`Offload.params`; now `offload_param.device`",
        old_names=("cpu_offload_params",),
    ),
    Key(
        "zero_optimization.cpu_offload_use_pin_memory",
        "bool",
        None,
        "ignored",
        PINNED,
    ),
)
