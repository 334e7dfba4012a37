"""The command line. Only `jzero/__main__.py` imports this room.

Read `commands` with `terminal`, then the memory commands: `planning`, `request` (their options), `source`
(the model: a `user_model`, or a `decoder` by `sizes`), `parts` (what helps a decoder that does not fit) and `account`
(the answer); then `doctor`.
"""
