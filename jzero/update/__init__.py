"""Runs optax on shards: computes new parameters and optimizer state from reduced gradients.

Read `whole` (the update as one function) and `split` (what its jaxpr needs: elements, sums, whole arrays), then the
runners: `run`, `chunks` (state on the host), `find_visits`, `visits` and `records` (state on disk), `columns` (columns
of such state on the devices), `owned` (each matrix on one device) with `slots` (exchanges unlike ones), and `gathered`
(matrices on all devices). `fields` places the inputs, `extra_args` passes the arguments that an optimizer takes beside
gradients, and `transformation` wraps the user's optimizer. Nothing here knows the loss.
"""
