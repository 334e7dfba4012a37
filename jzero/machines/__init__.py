"""Accelerators and machines made of them: their memory and rates, their compilers, and what a step may take of them.

Read `accelerators` (the table of devices), `names` (as people write them), `machine` (so many of them, and what joins
them), `topologies` (their compilers, without the devices) and `limits`.
"""
