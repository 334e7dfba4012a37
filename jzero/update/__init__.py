"""Runs optax on shards: computes new parameters and optimizer state from reduced gradients.

Read `transformation` (wraps the user's optimizer), `leaf` (updates one parameter), `walk` (evaluates an optimizer's
jaxpr over streamed and whole leaves), `owned` (computes each matrix on one device) with `slots` (exchanges unlike
ones). Nothing here knows the loss.
"""
