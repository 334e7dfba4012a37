"""The user's settings, validated on construction.

Read `zero` (`ZeroConfig`, `Offload`, `LeafRule`), then `precision` and `quantization`; `settings` checks their values.
Nothing here knows a mesh, a state or an array.
"""
