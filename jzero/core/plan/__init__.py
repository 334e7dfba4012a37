"""Decides where each leaf of a state lives, and why: arithmetic over shapes that touches no array.

Read `choice` (where a leaf is cut), `state_layout` (the result), `trees` (takes states apart and puts them together),
`planned_bytes` with `traffic` (what it costs), `plan` (`ZeroPlan`: both, and as text by `table`),
`planner` (how a plan is made) with `state_fields`, `param_leaves`, `opt_leaves`, `opt_state` and `trainable`,
`assignment` and `matrices` (who computes which matrix).
"""
