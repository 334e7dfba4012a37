"""How one leaf of a state is stored, and how it travels. Nothing here knows a whole state or a program.

Read `box` (parts of arrays), `mesh` (axes, memories), `set_mesh` (what a program has set beside it), `platform` (what
compilers do differently), `cut` (over devices, with padding), `blocks` (as integers), `route` (how shards travel),
`lookups` (how rows of tables do), `stored` and `padded` (leaves that are not arrays of their natural shape),
`placement` (arrays in memories), `leaves` (all of that for one leaf, and conversions between its forms), `casts`
(dtypes).
"""
