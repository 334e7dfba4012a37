"""Analyzes jaxprs of any origin.

Read `interpret` (values flow through a program) and `primitives` (traits of each operation), then `liveness` (the
equations that an output needs), `equations` (searches programs), `repeats` (finds repeated blocks), `structure`
(compares them), `edit` (builds programs) and `identity` (tables by jaxpr or array).

`regions` finds the matrix work of each parameter in an optimizer's update, with `products` (which work that is), `flat`
(takes programs apart) and `batches` (one slice of a stack).

`rows` says how values depend on the rows of a batch: facts (`row_facts`), which each operation changes by its rule
(`row_rules`).

Nothing here knows a plan or a stage.
"""
