"""Checkpoints of training states: saved, restored, checked. Only these modules import orbax.

Read `leaves` (a state on disk), `saving` and `restoring`, `manager` with `writer`, `retention`, `lock` and
`preemption`. Then `uninterrupted` (Ctrl-C), `sharing` (several processes), `contents`, `matching`, `checksum`, `parts`
and `damage` (reading and checking), `extras`, `orbax_io` (Orbax's handlers), and `inspecting`.
"""
