"""Checkpoints: saves, restores, exports. Only these modules import orbax and safetensors.

Read `leaves` (a state on disk), `saving` and `restoring`, `manager` with `writer`, `retention`, `lock` and
`preemption`. Then `uninterrupted` (Ctrl-C), `sharing` (several processes), `contents`, `matching`, `checksum` and
`damage` (reading and checking), `extras`, `orbax_io` (Orbax's handlers), `loading` with `mapped` and
`pieces`, `exporting` with `draft`, `outline` and `layers`, `peft`, `safetensors_files`, and `inspecting`.
"""
