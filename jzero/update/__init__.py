"""Runs optax on shards: computes new parameters and optimizer state from reduced gradients.

Read `whole` (the update as one function), `split` (what its jaxpr needs: elements, sums, whole arrays), `run` and
`chunks` (run it where the arrays lie), `transformation` (wraps the user's optimizer). Nothing here knows the loss.
"""
