"""Runs optax on shards: computes new parameters and optimizer state from reduced gradients.

Read `whole` (the update as one function), `split` (what its jaxpr needs: elements, sums, whole arrays), `run` (runs it
where the arrays lie) with `chunks` (loops over what is on the host), `owned` (each matrix on one device) and `slots`
(exchanges unlike ones), `transformation` (wraps the user's optimizer). Nothing here knows the loss.
"""
