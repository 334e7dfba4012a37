"""Arrays on a mesh, one leaf at a time: gathered, reduced, cut into chunks. Nothing here knows a loss or an optimizer.

Read `collectives` (every gather and reduction of ZeRO), `chunks` (loops over arrays on the host), `host_compute` (what
the host runs inside of a program).
"""
