"""The user's settings, validated on construction.

Read `zero` (`ZeroConfig`) and its parts: `leaf_rule`, `offload`, `precision`, `quantization`. `settings` checks values.
Nothing here knows a mesh, a state or an array.
"""
