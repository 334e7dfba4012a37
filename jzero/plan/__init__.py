"""Decides where each leaf of a state lives, and why: arithmetic over shapes that touches no array.

Read `choice` (where a leaf is cut), `ways` (by which hops a parameter travels, and as which bits), `plan` (`ZeroPlan`,
the result), `planner` (how it is made), `opt_leaves`, `opt_state` and `trainable` (optimizers), `assignment` and
`matrices` (who computes which matrix), `table` (how a plan prints).
"""
