"""The keys outside of `zero_optimization`, with jzero's verdicts. Defaults are DeepSpeed 0.19's.

Keys of `optimizer.params` and `scheduler.params` are with what they describe, in `optimizers.py` and `schedules.py`.
Older keys, which 0.19 has removed, are here as well: files outlive releases.
"""

from __future__ import annotations

from jzero.deepspeed.key import Key

BATCH = (
    Key("train_batch_size", "int", None, "honoured", "rows of the batch that a step is called with", least=1),
    Key("train_micro_batch_size_per_gpu", "int", None, "honoured", "`report.micro_batch_size`", least=1),
    Key("gradient_accumulation_steps", "int", None, "honoured", "`make_train_step(accumulate_steps=)`", least=1),
    Key(
        "managed_gradient_accumulation",
        "bool",
        True,
        "refused",
        "false leaves the micro-batches to the loop: give each step its whole batch and set `accumulate_steps`",
    ),
    Key("gradient_clipping", "number", 1.0, "honoured", "`make_train_step(clip_norm=)`; 0 is None"),
)

PRECISION = (
    Key("fp16.enabled", "bool", False, "honoured", "`Precision.compute_dtype='float16'`"),
    Key("fp16.loss_scale", "number", 0, "honoured", "`Precision.loss_scale`; 0 is a `DynamicLossScale`"),
    Key("fp16.initial_scale_power", "int", 16, "honoured", "`DynamicLossScale.initial`: two to its power"),
    Key("fp16.loss_scale_window", "int", 1000, "honoured", "`DynamicLossScale.window`"),
    Key("fp16.hysteresis", "int", 2, "honoured", "`DynamicLossScale.hysteresis`"),
    Key("fp16.consecutive_hysteresis", "bool", False, "honoured", "`DynamicLossScale.consecutive_hysteresis`"),
    Key("fp16.min_loss_scale", "int", 1, "honoured", "`DynamicLossScale.minimum`"),
    Key("fp16.auto_cast", "bool", False, "refused", "jzero does not cast the batch: cast it where the loss begins"),
    Key(
        "fp16.fp16_master_weights_and_grads",
        "bool",
        False,
        "refused",
        "fp16 masters lose small updates; with bf16 there are 16-bit masters, rounded stochastically",
    ),
    Key("bf16.enabled", "bool", False, "honoured", "`Precision.compute_dtype='bfloat16'`"),
    Key("bf16.check_grad_overflow", "bool", True, "honoured", "`Precision.skip_nonfinite`"),
    Key("bf16.immediate_grad_update", "bool", False, "compiler", "gradients are accumulated as they are made"),
    Key(
        "bf16.bf16_master_weights_and_grads",
        "bool",
        False,
        "honoured",
        "`Precision.master_dtype='bfloat16'`, rounded stochastically where DeepSpeed rounds to nearest",
    ),
    Key(
        "bf16.bf16_optimizer_states",
        "bool",
        False,
        "honoured",
        "`Precision.state_dtype='bfloat16'`, rounded stochastically where DeepSpeed rounds to nearest",
    ),
    Key("communication_data_type", "dtype", None, "honoured", "`Precision.reduce_dtype`"),
    Key("data_types.grad_accum_dtype", "dtype", None, "honoured", "`Precision.accumulate_dtype`"),
    Key("data_types.param_dtype", "dtype", None, "honoured", "must agree with `fp16` and `bf16`"),
    Key(
        "data_types.buffer_dtype",
        "dtype",
        None,
        "refused",
        "arrays that are not parameters keep their dtype: cast them before they enter the state",
    ),
    Key(
        "data_types.keep_in_fp32_modules",
        "any",
        "auto",
        "refused",
        "set `ZeroConfig.rules={path: LeafRule(compute_dtype='float32')}`",
        off=([],),
    ),
    Key("torch_autocast", "block", None, "refused", "it casts operation by operation: set `bf16` or `fp16` instead"),
)

_SAME_MEAN = "the same mean; only the order of divisions and sums differs"

GRADIENTS = (
    Key("prescale_gradients", "bool", False, "ignored", _SAME_MEAN),
    Key("gradient_predivide_factor", "number", 1.0, "ignored", _SAME_MEAN),
    Key(
        "gradient_allreduce_op",
        "string",
        "mean",
        "refused",
        "gradients are averaged over devices: multiply the loss by their number",
        choices=("mean", "sum"),
    ),
    Key("sparse_gradients", "bool", False, "ignored", "gradients are dense, with the same values"),
    Key("disable_allgather", "bool", False, "ignored", "DeepSpeed does not read it"),
)

OPTIMIZER = (
    Key("optimizer.type", "string", None, "honoured", "`report.optimizer`, of optax"),
    Key("optimizer.legacy_fusion", "bool", False, "ignored", "about DeepSpeed's kernels"),
    Key("scheduler.type", "string", None, "honoured", "`report.schedule`, with DeepSpeed's lr in each step"),
    Key("zero_allow_untested_optimizer", "bool", False, "ignored", "any optax transformation works"),
    Key("zero_force_ds_cpu_optimizer", "bool", True, "ignored", "any optax transformation works"),
)

AIO = (
    Key(
        "aio.intra_op_parallelism",
        "int",
        1,
        "honoured",
        "`Offload.disk_threads`, if it is more than 1; jzero's default is 2",
        least=1,
        old_names=("thread_count",),
    ),
    Key("aio.block_size", "int", 1_048_576, "ignored", "a record, of `Offload.chunk_bytes`, is one request"),
    Key("aio.queue_depth", "int", 8, "ignored", "as many requests at a time as threads"),
    Key("aio.single_submit", "bool", False, "ignored", "every request is submitted by itself"),
    Key("aio.overlap_events", "bool", True, "ignored", "requests always overlap"),
    Key("aio.use_gds", "bool", False, "ignored", "records pass through host memory"),
)

_LOGGING = (
    "a step returns its metrics; `jzero.Monitor` writes them to `JsonLines`, `TensorBoard` or a function of yours"
)
_MEASURING = "see `jzero.analyze` and `jzero.Monitor(profile_dir=)`"
_CHECKPOINTS = "see `jzero.CheckpointManager`"
_CHANGES_DATA = "it changes what is trained on: do it in the input pipeline"
_OTHER_PARALLEL = "jzero partitions over data-parallel devices: give the mesh a further axis and shard over it"
_COMPRESSION = "it changes the model: do it in the model"

REST = (
    Key("steps_per_print", "int", None, "ignored", "see `jzero.Monitor(every=)`"),
    Key("wall_clock_breakdown", "bool", False, "ignored", _MEASURING),
    Key("memory_breakdown", "bool", False, "ignored", _MEASURING),
    Key("dump_state", "bool", False, "ignored", "`print(jzero.plan_of(state))` shows the state"),
    Key("log_level", "any", None, "ignored", _LOGGING),
    Key("timers", "block", None, "ignored", _MEASURING),
    Key("flops_profiler", "block", None, "ignored", _MEASURING),
    Key("comms_logger", "block", None, "ignored", "see the collectives of `jzero.analyze`"),
    Key("tensorboard", "block", None, "ignored", _LOGGING),
    Key("wandb", "block", None, "ignored", _LOGGING),
    Key("csv_monitor", "block", None, "ignored", _LOGGING),
    Key("comet", "block", None, "ignored", _LOGGING),
    Key("disable_python_gc", "bool", False, "ignored", "about DeepSpeed's engine"),
    Key("vocabulary_size", "int", None, "ignored", "DeepSpeed only warns if 8 does not divide it"),
    Key("dataloader_drop_last", "bool", False, "ignored", "see `jzero.data.make_loader(drop_remainder=)`"),
    Key("checkpoint", "block", None, "ignored", _CHECKPOINTS),
    Key("datastates_ckpt", "block", None, "ignored", _CHECKPOINTS),
    Key("nebula", "block", None, "ignored", _CHECKPOINTS),
    Key("compile", "block", None, "compiler", "every step is compiled"),
    Key("graph_harvesting", "bool", False, "compiler", "every step is compiled"),
    Key(
        "activation_checkpointing",
        "block",
        None,
        "ignored",
        "for models that call DeepSpeed's checkpointing: `make_train_step(remat=)`, `jzero.offload_activations`",
    ),
    Key("autotuning", "block", None, "ignored", "see `jzero.fit`"),
    Key("hybrid_engine", "block", None, "ignored", "for generating in the loop: `jzero.make_eval_step`"),
    Key("pipeline", "block", None, "ignored", "for DeepSpeed's pipeline modules alone"),
    Key("use_data_before_expert_parallelism", "bool", False, "ignored", "about expert parallelism"),
    Key("seq_parallel_communication_data_type", "dtype", None, "ignored", "about sequence parallelism"),
    Key("allgather_size", "int", None, "ignored", "of a format that DeepSpeed has dropped"),
    Key("sequence_parallel_size", "int", 1, "refused", _OTHER_PARALLEL, least=1),
    Key("tensor_parallel", "block", None, "refused", _OTHER_PARALLEL, off=({"autotp_size": 0}, {"autotp_size": 1})),
    Key("expert_parallel", "block", None, "refused", _OTHER_PARALLEL),
    Key("amp", "block", None, "refused", "it casts operation by operation: set `bf16` or `fp16` instead"),
    Key("elasticity", "block", None, "refused", "it chooses the batch size: write the sizes down"),
    Key("data_efficiency", "block", None, "refused", _CHANGES_DATA),
    Key("curriculum_learning", "block", None, "refused", _CHANGES_DATA),
    Key("progressive_layer_drop", "block", None, "refused", _COMPRESSION),
    Key("compression_training", "block", None, "refused", _COMPRESSION),
    Key("weight_quantization", "block", None, "refused", _COMPRESSION),
    Key("quantize_training", "block", None, "refused", _COMPRESSION),
    Key("eigenvalue", "block", None, "refused", _COMPRESSION),
    Key("sparse_attention", "block", None, "refused", _COMPRESSION),
)
