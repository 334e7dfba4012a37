"""What a user calls: steps over the engine, the update and the state.

Read `train_step`, `jitted` (what all steps are), `inputs` (what goes in), `agreement` (what processes compare before
they run it), `compiler_options`, `overflow`, `equivalence` with its `reference`. Only tools and the command line import
this room.
"""
