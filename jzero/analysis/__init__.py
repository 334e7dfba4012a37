"""What a step takes: compiled programs, their memory, collectives and time; layouts that fit. Nothing runs a step.

Read `analyze` (of a compiled step) with `hlo`, `collectives`, `memory`, `schedule` (the timeline, also as a trace),
`costs`, `violations` (departures from the plan), `step_programs`, `report` and `figure`. Then `estimates` with
`memory_table`. Then `fit` and `fill` (search) with `search`, `candidates` (and which are `alike`),
`fit_report`, `compiled_step`, `confirm`, `host_memory` and `replanning`.
"""
