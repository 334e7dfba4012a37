"""The engine computes loss and gradients on shards, in six passes over one program. It knows no optimizer.

Read `gradients`, which runs the passes, and their files in this order: `trace` (the loss as a jaxpr), `recompute` (adds
checkpoints), `differentiate` (forward and backward pass become one jaxpr), `reduce_early` (each gradient is reduced
where it is made), `waits` (for reductions, on GPUs), `walk` (gathers parameters where they are used). The result is a
placed program, of the equations that `placed` defines.

Then, by topic: `roles` (how the stages differ); `lazy` and `shard_rules` (partitioned parameters); `rules` and `loops`
(equations that contain jaxprs); `kept_blocks` (what is not recomputed); `gradient_rules` (how gradients leave, and what
runs on their shards); `order` (what a gather waits for); `outputs`, `written_variables` and `merge` (what a loss
returns and writes); `norms`.
"""
