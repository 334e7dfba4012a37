"""Checkpoints of training states: saved, restored, checked. Only these modules import orbax.

Read `leaves` (a state on disk), `saving`, `restoring` with `matching` and `shards`, and `manager` with `writer`,
`retention`, `lock` (several processes) and `preemption`. Then `contents`, `opening`, `parts`, `damage` and `format_1`
(reading and checking), `extras`, `disk_saving`, `disk_restoring` and `disk_places` (records), `orbax_io` (what Orbax
writes), `uninterrupted` (Ctrl-C) and `inspecting`.
"""
