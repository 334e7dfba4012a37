"""The engine: loss and gradients on shards, in five passes over one program.

Read the files in the order of the passes: `trace` (the loss as a jaxpr), `recompute` (checkpoints, repeated layers),
`differentiate` (forward and backward pass as one jaxpr), `reductions` (which values are gradients on their way out),
`walk` (gathers parameters where they are used, reduces gradients where they are made). `roles` says how the stages
differ, `lazy` and `on_shard` what a partitioned parameter is, `rules` and `loops` how equations with jaxprs inside are
walked, `order` what a gather waits for, `gradients` puts the passes together. No optimizer comes in here.
"""
