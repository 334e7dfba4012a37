"""Decides where each leaf of a state lives, and why: arithmetic over shapes that touches no array.

Read `choice` (where a leaf is cut), `plan` (the result, with its `planned_bytes`), `trees` (takes states apart and puts
them together), `traffic` (what devices exchange), `table` (the rows of a plan's text), `planner` (how a plan is made)
with `state_fields`, `param_leaves`, `opt_leaves`, `opt_state` and `trainable`, then `matrices` (the units of matrix
work), `assignment` (who computes which) and `planned_matrices` (what a plan says of that).
"""
