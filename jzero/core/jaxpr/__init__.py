"""Facts about jaxprs of any origin, and programs made of them. Nothing here knows a plan or a stage.

Read `interpret` (values flow through a program), `primitives` (traits of each operation), `equations` (searches
programs, also for what an output needs), `edit` (builds programs), `identity` (tables by jaxpr or array), `sizes`
(bytes and operations) and `references` (which functions must not hold). Then `repeats` (finds repeated blocks) with
`structure` (compares them); `regions` (the matrix work of each parameter in an update) with `flat` (takes programs
apart) and `batches` (one slice of a stack); `rows` (how values depend on the rows of a batch) with `row_facts`,
`row_rules` and `kernels` (what those compute), and `growth` (how they grow with their number); `lookups` (what a
program reads of tables).
"""
