"""What a step takes: compiled or traced programs, their memory, collectives and time. Nothing here runs a step.

Read `analyze` (of a compiled step) with `hlo`, `collectives`, `memory`, `schedule` (the timeline) and `costs`,
`traced_collectives` and `violations` (departures from the plan), `step_programs`, `report`, `figure` and `trace_file`.
Then `step_memory` (estimates from a trace) with `traced`, `buffers`, `sizes`, `footprint`, `postponed`,
`record_memory`, `memory_table` and `step_time`. Then `fit` and `fill` (search) with `search`, `candidates`,
`compiled_step` and `confirm`. All know machines from `accelerators`, `machines`, `topologies`, `limits`, `host_memory`
and `replanning`.
"""
