"""Runs optax on shards: new parameters and optimizer state from reduced gradients. Nothing here knows the loss.

Read `whole` (the update as one function), `split` (what its jaxpr needs: elements, sums, whole arrays) and `program`
(the update analysed, as a value) with `kernels` (what one pass over records computes), then who runs it: `run` (on the
devices), `chunks` (state on the host), `columns` (columns of state in records, on the devices), `owned` (each matrix on
one device); `jzero.core.records` runs it on records. `transformation` wraps the user's optimizer.
"""
