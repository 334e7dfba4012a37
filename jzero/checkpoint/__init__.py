"""Checkpoints: saves, restores, exports. Only these modules import orbax and safetensors.

Read `leaves` (a state on disk), `saving` and `restoring`, `manager` with `retention`, `lock` and `preemption`. Then
`contents`, `matching`, `checksum` and `damage` (reading and checking), `extras`, `orbax_io` (Orbax's handlers),
`exporting` with `safetensors_files`, and `inspecting`.
"""
