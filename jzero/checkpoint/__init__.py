"""Checkpoints: saves, restores, exports. Only these modules import orbax and safetensors.

Read `leaves` (a state on disk), `saving` and `restoring`, `manager` with `writer`, `retention`, `lock` and
`preemption`. Then `uninterrupted` (Ctrl-C), `sharing` (several processes), `contents`, `matching`, `checksum` and
`damage` (reading and checking), `extras`, `orbax_io` (Orbax's handlers), `exporting` and `loading` with
`safetensors_files`, and `inspecting`.
"""
