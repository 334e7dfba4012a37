"""The engine: computes loss and gradients on shards, in seven passes over one program.

Read the files in the order of the passes:

  * `trace` traces the loss as a jaxpr;
  * `recompute` adds checkpoints, and turns repeated layers into calls of one function;
  * `differentiate` makes forward and backward pass one jaxpr;
  * `kernel_gradients` makes products of transposed products;
  * `reduce_early` reduces each gradient where it is made;
  * `waits` makes loops and blocks of the backward pass wait for these reductions, on GPUs;
  * `walk` evaluates it, and gathers parameters where they are used.

The result is a placed program: `placed` defines the equations for what travels.

Then, by topic:

  * `roles`: how the stages differ;
  * `lazy`, `shared_leaves`, `shard_rules`: partitioned parameters;
  * `rules`, `loops`, `prefetch`, `pipelined_reductions`, `meshes`: equations that contain jaxprs, and constraints;
  * `gradient_exits`, `def_use`, `gradient_rules`: how gradients leave, and what runs on their shards;
  * `order`: what a gather waits for;
  * `outputs`, `written_variables`: values that a loss returns, and changes to a model's variables;
  * `norms`: the global norm;
  * `gradients`: runs all passes, inside `shard_map`.

The engine knows no optimizer.
"""
