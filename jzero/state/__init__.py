"""Train states: creates, shards, gathers, edits, moves and updates them.

Read `train_state`, `adapter` (the states of each library), `shard` and `gather` (the public calls), `request` (what
`shard` does), `init` (creates states in shards), `next_state` (applies gradients), then `offload` and
`model_size`. Nothing here calls a loss.
"""
