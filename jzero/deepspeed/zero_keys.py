"""The keys of `zero_optimization`, offload included, with jzero's verdicts. Defaults are DeepSpeed 0.19's."""

from __future__ import annotations

from jzero.deepspeed.key import PARAMS_ON_NVME, Key, below, stage_3

NO_CAP = 2**63 - 1
"""What DeepSpeed writes for "no limit" (`sys.maxsize`)."""

DEVICES = ("none", "cpu", "nvme")
PINNED = "offloaded arrays are always in pinned memory"
SCAN = "the compiler's schedule; a scanned stack is gathered layer by layer"

ZERO = below(
    "zero_optimization",
    Key("stage", "int", 0, "honoured", "`ZeroConfig.stage`"),
    Key("reduce_scatter", "bool", True, "honoured", "`ZeroConfig.reduce_scatter`"),
    Key(
        "reduce_bucket_size",
        "int",
        500_000_000,
        "honoured",
        "`ZeroConfig.reduce_bucket_bytes`: elements times the bytes of the dtype that is reduced; GPUs only",
    ),
    Key(
        "allgather_bucket_size",
        "int",
        500_000_000,
        "honoured",
        "`ZeroConfig.all_gather_bucket_bytes`: elements times the bytes of the dtype that is gathered; GPUs only",
    ),
    Key("contiguous_gradients", "bool", True, "compiler", "it lays out buffers"),
    Key("use_multi_rank_bucket_allreduce", "bool", True, "compiler", "it combines collectives"),
    Key("allgather_partitions", "bool", True, "compiler", "it chooses the collectives that gather"),
    Key("overlap_comm", "bool", None, "compiler", "it schedules collectives beside computation"),
    Key("compute_grad_norm", "bool", True, "ignored", "every step returns `grad_norm`, one sum over the gradients"),
    Key(
        "load_from_fp32_weights",
        "bool",
        True,
        "refused",
        "a restored state always has the masters that were saved; to start from 16-bit weights, load those",
    ),
    Key("elastic_checkpoint", "bool", False, "ignored", "jzero's checkpoints can be restored on any number of devices"),
    Key("sub_group_size", "int", 1_000_000_000, "ignored", "tiles of DeepSpeed's update"),
    *stage_3(
        Key(
            "prefetch_bucket_size",
            "int",
            50_000_000,
            "honoured",
            "`ZeroConfig.prefetch_bytes`: elements times the bytes of the dtype that is gathered",
        ),
        Key("param_persistence_threshold", "int", 100_000, "honoured", "`ZeroConfig.persistence_threshold`"),
        Key(
            "model_persistence_threshold",
            "int",
            NO_CAP,
            "honoured",
            "`ZeroConfig.model_persistence_threshold`, in elements; 2^63-1 is None",
        ),
        Key("max_live_parameters", "int", 1_000_000_000, "compiler", SCAN),
        Key(
            "max_reuse_distance",
            "int",
            1_000_000_000,
            "compiler",
            "parameters are freed after each use; `ZeroConfig.reshard_after_forward=False` keeps them",
        ),
        Key(
            "gather_16bit_weights_on_model_save",
            "bool",
            False,
            "ignored",
            "`jzero.export_params` writes whole weights, one leaf at a time",
            old_names=("stage3_gather_fp16_weights_on_model_save",),
        ),
        Key("module_granularity_threshold", "int", 0, "compiler", SCAN),
        Key("use_all_reduce_for_fetch_params", "bool", False, "compiler", "it chooses the collectives that gather"),
        Key(
            "allgather_sequential",
            "bool",
            False,
            "compiler",
            "it combines collectives; `ZeroConfig.all_gather_bucket_bytes` bounds that",
        ),
    ),
    Key("ignore_unused_parameters", "bool", True, "ignored", "an unused one has a gradient of zero"),
    Key("legacy_stage1", "bool", False, "ignored", "there is one stage 1"),
    Key("round_robin_gradients", "bool", False, "ignored", "every leaf is cut evenly"),
    Key("parameter_alignment", "bool", False, "ignored", "leaves are not packed into one buffer"),
    Key("memory_efficient_linear", "bool", True, "compiler", "only shards are kept for backward"),
    Key("pipeline_loading_checkpoint", "bool", False, "ignored", "about DeepSpeed's checkpoints"),
    Key("override_module_apply", "bool", True, "ignored", "about torch modules"),
    Key("log_trace_cache_warnings", "bool", False, "ignored", "there is no trace cache"),
    Key("enable_sanity_checks", "bool", False, "ignored", "`jzero.analyze(...).verify()`, `jzero.check_equivalence`"),
    Key("leaf_module", "block", None, "ignored", "there are no hooks on modules"),
    Key("save_muon_momentum_buffer_in_memory", "bool", False, "ignored", "Muon's momentum is never on NVMe"),
    Key("zero_hpz_partition_size", "int", 1, "honoured", "`ZeroConfig.node_axis`, `secondary_params`", off=(0,)),
    Key("zero_quantized_weights", "bool", False, "honoured", "`Quantization.gather` = 'int8', in blocks of up to 256"),
    Key("zero_quantized_nontrainable_weights", "bool", False, "honoured", "`Quantization.frozen` = 'int8'"),
    Key("zero_quantized_gradients", "bool", False, "honoured", "`Quantization.reduce` = 'int4', exact within a node"),
    Key(
        "zeropp_loco_param",
        "block",
        None,
        "ignored",
        "gradients are rounded without error feedback: Adam trained no better with it, and it takes memory",
    ),
    Key("mics_shard_size", "int", -1, "honoured", "`ZeroConfig.replica_axis`", off=(0,), least=-1),
    Key("mics_hierarchical_params_gather", "bool", False, "honoured", "`ZeroConfig.node_axis`"),
)

ZENFLOW = below(
    "zero_optimization.zenflow",
    Key("topk_ratio", "number", 0.1, "honoured", "`ZenFlow.topk_ratio`"),
    Key("select_strategy", "string", "auto", "honoured", "chooses columns by steps", choices=("auto", "step", "epoch")),
    Key("select_interval", "int", None, "honoured", "`ZenFlow.select_interval`", least=1),
    Key("update_interval", "int", None, "honoured", "`ZenFlow.update_interval`", least=1),
    Key("overlap_step", "bool", False, "honoured", "`ZenFlow.overlap`"),
    Key("full_warm_up_rounds", "int", 0, "honoured", "`ZenFlow.warm_up_steps`"),
    Key("offload", "bool", False, "ignored", "chosen columns stay on the devices"),
    Key("auto_ratio", "number", 0.99, "ignored", "intervals are numbers of steps"),
    Key("pt_reserved_cores_perc", "number", 0.5, "ignored", "XLA has its own threads"),
)

OFFLOAD = below(
    "zero_optimization",
    *below(
        "offload_optimizer",
        Key(
            "device",
            "string",
            "none",
            "honoured",
            "`Offload.optimizer`, nvme as 'disk'; the update runs on the device, chunk by chunk "
            "(`Offload.compute='host'`: on the CPU)",
            choices=DEVICES,
        ),
        Key("ratio", "number", 1.0, "honoured", "`Offload.ratio`"),
        Key("pin_memory", "bool", True, "ignored", PINNED),
        Key("pipeline_read", "bool", False, "compiler", "it overlaps copies"),
        Key("pipeline_write", "bool", False, "compiler", "it overlaps copies"),
        Key("nvme_path", "string", None, "honoured", "`Offload.path` for `device: nvme`; files there are unnamed"),
        Key("buffer_count", "int", 4, "ignored", "`2 * Offload.disk_threads + 1`, of `Offload.chunk_bytes` each"),
        Key("fast_init", "bool", False, "ignored", "what goes to NVMe is written once, parameter by parameter"),
        Key("super_offload", "bool", False, "refused", "it speculates on the host's CPU: leave it out"),
        Key("cpuadam_cores_perc", "number", 0.8, "ignored", "XLA has its own threads"),
    ),
    Key("cpu_offload", "bool", None, "honoured", "now `offload_optimizer.device`"),
    *below(
        "offload_param",
        Key(
            "device",
            "string",
            "none",
            "honoured",
            "`Offload.params`, at stage 3; nvme as 'disk', beside `offload_optimizer.device: nvme`",
            choices=DEVICES,
        ),
        Key("pin_memory", "bool", True, "ignored", PINNED),
        Key("nvme_path", "string", None, "ignored", PARAMS_ON_NVME),
        Key("buffer_count", "int", 5, "ignored", PARAMS_ON_NVME),
        Key("buffer_size", "int", 100_000_000, "ignored", PARAMS_ON_NVME),
        Key("max_in_cpu", "int", 1_000_000_000, "ignored", PARAMS_ON_NVME),
    ),
    Key("cpu_offload_param", "bool", None, "honoured", "now `offload_param.device`", old_names=("cpu_offload_params",)),
    Key("cpu_offload_use_pin_memory", "bool", None, "ignored", PINNED),
)
