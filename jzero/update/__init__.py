"""Optax on shards: the new parameters and the optimizer's new state from reduced gradients.

Read `transformation` (the user's optimizer, wrapped), `leaf` (the update of one parameter), `walk` (an optimizer's
jaxpr over streamed and whole leaves). Nothing here knows a loss.
"""
