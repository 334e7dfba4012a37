"""Decides where each leaf of a state lives, and why: arithmetic over shapes that touches no array.

Read `choice` (where a leaf is cut), `plan` (the result, with its bytes), `trees` (takes states apart and puts them
together), `traffic` (what devices exchange), `table` (the rows of its text),
`planner` (how a plan is made) with `state_fields`, `param_leaves`, `opt_leaves`, `opt_state` and `trainable`,
`matrices`, `assignment` and `planned_matrices` (the matrices of an update; who computes which; what a plan says of it).
"""
