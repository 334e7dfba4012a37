"""Where each leaf of a state lies, and why: arithmetic over shapes that touches no array.

Read `mesh` (axes and memories), `layout` (where a leaf is cut), `leaves` and `plan` (`ZeroPlan`, the result), `planner`
(how it is made), `opt_state` and `trainable` (what it says about optimizers), `table` (how it prints). `padded` alone
holds arrays: leaves in another shape than their natural one.
"""
