"""The steps that a user calls, built on engine, update and state. Only tools and the command line import this room.

Read `train_step`, `eval_step`, `jitted` (the base of all steps), `loss` (the user's function, traced and checked) with
`row_check`, `inputs` (checks and places arguments), `agreement` (processes compare programs before they run them),
`record_step` (updates state in records), `compiler_options`, `metrics` (the names of what steps return) and
`overflow`.
"""
