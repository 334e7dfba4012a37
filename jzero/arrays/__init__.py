"""Arrays on a mesh, one leaf at a time: moved, cast, cut into chunks, compared between processes.

Read `collectives` (every gather and reduction of ZeRO), `placement`, `casts` and `misfits` (dtypes), `chunks`
(loops over arrays on the host), `processes` and `fingerprints` (agreement of processes). Nothing here knows a loss or
an optimizer.
"""
