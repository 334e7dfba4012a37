"""Train states: creates, shards, gathers, edits, moves and updates them. Nothing here calls a loss.

Read `train_state`, `adapter` (the states of each library), `shard` and `gather` (the public calls), `request` (what a
call asks for), `init` (creates states in shards), `next_state` (applies gradients), `record_states` (state in records),
`access` (before a state is read or edited), then `offload`, `disk_space` and `model_size`.
"""
