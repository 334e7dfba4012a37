"""Train states of every kind: sharded, gathered, born, edited, moved and replaced by the next one.

Read `train_state` (what jzero takes for a state), `shard` and `gather` (the public calls), `init` (states that are born
sharded), `next_state` (what becomes of gradients), then `inspect`, `offload`, `model_size`. Nothing here calls a loss.
"""
