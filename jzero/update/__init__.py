"""Runs optax on shards: computes new parameters and optimizer state from reduced gradients.

Read `transformation` (wraps the user's optimizer), `leaf` (updates one parameter), `walk` (evaluates an optimizer's
jaxpr over streamed and whole leaves). Nothing here knows the loss.
"""
