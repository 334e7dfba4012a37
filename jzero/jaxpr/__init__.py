"""Analyzes jaxprs of any origin.

Read `primitives` (traits of each operation), then `liveness` (the equations that an output needs), `repeats` (finds
repeated blocks) and `structure` (compares them). Nothing here knows a plan or a stage.
"""
