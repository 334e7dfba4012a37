"""Runs optax on shards: computes new parameters and optimizer state from reduced gradients.

Read `whole` (the update as one function) and `split` (what its jaxpr needs: elements, sums, whole arrays), then the
runners: `run`, `chunks` (what is on the host), `owned` (each matrix on one device) with `slots` (exchanges unlike
ones), `gathered` (matrices on all devices); `transformation` wraps the user's optimizer. Nothing here knows the loss.
"""
