"""Checks training against one device, and reads and writes single leaves of a state, whole.

Read `equivalence`, `reference` (training with plain jax and optax) and `deviations` (the report), then `inspect`.
"""
