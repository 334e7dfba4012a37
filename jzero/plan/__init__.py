"""Decides where each leaf of a state lives, and why: arithmetic over shapes that touches no array.

Read `choice` (where a leaf is cut), `plan` (`ZeroPlan`, the result) with `state_bytes` and `traffic` (what
devices exchange), `planner` (how a plan is made) with `param_leaves`, `opt_leaves`, `opt_state` and `trainable`,
`assignment` and `matrices` (who computes which matrix), `table` (how a plan prints).
"""
