"""The engine: computes loss and gradients on shards, in five passes over one program.

Read the files in the order of the passes:

  * `trace` traces the loss as a jaxpr;
  * `recompute` adds checkpoints, and turns repeated layers into calls of one function;
  * `differentiate` makes forward and backward pass one jaxpr;
  * `reductions` finds the gradients among its values, and how each is reduced;
  * `walk` evaluates it: gathers parameters where they are used, reduces gradients where they are made.

Then, by topic:

  * `roles`: how the stages differ;
  * `lazy`, `bundles`, `shard_rules`: partitioned parameters;
  * `rules`, `loops`, `prefetch`, `meshes`: equations that contain jaxprs, and sharding constraints;
  * `gradient_exits`, `gradient_rules`: how gradients are reduced;
  * `order`: what a gather waits for;
  * `outputs`, `written_variables`: values that a loss returns, and changes to a model's variables;
  * `norms`: the global norm;
  * `gradients`: runs all passes, inside `shard_map`.

The engine knows no optimizer.
"""
