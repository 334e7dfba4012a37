"""State that programs do not see: records in the host's memory or on a disk, and how steps update them.

Read `records` (what a record holds), `run` (one pass over them, and what is computed around it), `schedules` (when
a step's gradients count; a pass beside steps), `zenflow` with `columns` (columns that are on the devices meanwhile).
"""
