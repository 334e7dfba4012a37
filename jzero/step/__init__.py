"""The steps that a user calls, built on the engine, the update and the state.

Read `train_step`, `eval_step`, `jitted` (the base of all steps), `loss` (the user's function, traced and checked),
`inputs` (checks and places arguments), `agreement` (processes compare programs before they run them),
`compiler_options`, `metrics` (the names of what steps return), `overflow`. Only tools and the command line import
this room.
"""
