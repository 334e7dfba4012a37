"""State that programs do not see: records in the host's memory or on a disk, and how steps update them.

Read `records` (what a record holds), `run` (one pass over them), `programs` (what is computed around the passes),
`background` (a pass beside steps), `schedules` (when a step's gradients count), `zenflow` with `columns` (columns that
are on the devices meanwhile), `threads`, and `opening`.
"""
