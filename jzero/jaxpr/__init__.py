"""Analyzes jaxprs of any origin.

Read `interpret` (what flows through a program) and `primitives` (traits of each operation), then `liveness` (the
equations that an output needs), `repeats` (finds repeated blocks), `structure` (compares them), `edit` (builds
programs) and `identity` (tables by jaxpr or array). Of an optimizer's update, `regions` finds the matrix work of each
parameter, with `products` (which work that is), `flat` (takes programs apart) and `batches` (one slice of a stack).
`rows` says how values depend on the rows of a batch; below it are `row_layouts` (where an array has rows),
`row_values` (what becomes of them where values meet), and the rules of each operation in `row_rules` and `row_moves`.
Nothing here knows a plan or a stage.
"""
