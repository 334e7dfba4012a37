"""Decides where each leaf of a state lives, and why: arithmetic over shapes that touches no array.

Read `mesh` (axes and memories), `platform` (what compilers do differently), `layout` (where a leaf is cut), `comm` (how
its shards travel), `blocks` (as integers), `ways` (by which hops, and as which bits), `leaves` and `plan` (`ZeroPlan`,
the result), `planner` (how it is made), `opt_leaves`, `opt_state` and `trainable` (optimizers), `assignment` and
`matrices` (who computes which matrix), `table` (how a plan prints). Only `padded` holds arrays, leaves that are not
stored in their natural shape; `comm`, `blocks` and `parts` compute on them inside a step.
"""
