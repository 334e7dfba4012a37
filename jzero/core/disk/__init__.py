"""Records of bytes on a local disk: read ahead, visited in order, written behind. Nothing here knows jax.

Read `files` (space that the kernel frees with the process), `stores` (records in two slots, of which a step reads one
and writes the other), `pipeline` (the threads and buffers between a store and whoever computes), `rows` (parameters for
programs that run) and `rates` (what the disk alone can do).
"""
