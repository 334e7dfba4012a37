"""Train states: creates, shards, gathers, edits, moves and updates them.

Read `train_state` (the kinds of states), `shard` and `gather` (the public calls), `init` (creates states in shards),
`next_state` (applies gradients), then `inspect`, `offload`, `model_size`. Nothing here calls a loss.
"""
