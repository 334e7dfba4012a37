"""The steps that a user calls, on engine, update and state. A step does not choose what it keeps: who makes it does.

Read `train_step`, `eval_step`, `base` and `options`, `jitted` (a batch on its way to its program), `loss` (the user's
function, traced and checked) with `row_check`, `inputs` (checks and places arguments), `choice` (what the step keeps),
`agreement` (processes compare programs before they run them), `record_step` (updates state in records),
`compiler_options`, `metrics` (the names of what steps return) and `overflow`.
"""
