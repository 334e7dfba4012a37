"""The core: plans, shards, differentiates, updates. It knows no tool around it, and no estimate.

Read `config` (what a user asks for), `layout` (one leaf), `plan` (all of them), `jaxpr` (facts about programs),
`engine` and `update` (the two halves of a step), `state` and `step` (what a user holds and calls). `arrays` is what
both use on the mesh, `records` and `disk` are for state outside of programs, `processes` for several of them, `base`
for what all of them use.
"""
