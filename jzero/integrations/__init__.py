"""Bridges to model libraries, which present their objects as train states. Only these modules import the libraries.

Read `flax_state`, then `nnx`.
"""
