"""What every room uses, and none is about: of jax and Flax, of text, types and checks.

Read `compat` (versions and private modules of jax), `types`, `guard` (checks that must not fail, warnings), `text`,
`extras` (packages that may be missing) and `flax_types` (jzero's types, known to Flax).
"""
