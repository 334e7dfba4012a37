"""The engine: loss and gradients on shards, in five passes over one program.

Read the files in the order of the passes: `trace` (the loss as a jaxpr), `recompute` (checkpoints, repeated layers),
`differentiate` (forward and backward pass as one jaxpr), `reductions` (which values are gradients on their way out),
`walk` (gathers parameters where they are used, reduces gradients where they are made). Then `written` (what the loss
changes in a model's variables), `roles` (how the stages differ), `lazy`, `bundles`, `on_shard` (partitioned
parameters), `rules`, `loops`, `ahead` (equations that hold jaxprs), `leaving` and `gradient_rules` (gradients on their
way out), `order` (what a gather waits for), and `gradients`, which puts the passes together. No optimizer comes in
here.
"""
