"""What a traced step takes: its memory, collectives and time, without a compiler or a device.

Read `step_memory` with `traced` (the step's trace as operations on buffers), `buffers` and `footprint` (the most
that lives at once); then `step_time`, `traced_collectives`, `block_costs` (of single blocks) and `keeping`
(chooses what a step keeps).
"""
