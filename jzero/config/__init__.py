"""Settings: what the user asked for, validated where it is written.

Read `zero` (`ZeroConfig`, `Offload`, `LeafRule`), then `precision`; `settings` is the one check of their values.
Nothing here knows a mesh, a state or an array.
"""
