"""The user's settings, validated on construction. Nothing here knows a mesh, a state or an array.

Read `zero` (`ZeroConfig`) and its parts `offload` and `precision`; then `keep`, of a step.
`settings` checks values, and `documents` files that others wrote.
"""
