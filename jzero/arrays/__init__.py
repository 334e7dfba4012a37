"""Arrays on a mesh, one leaf at a time: moved, cut into chunks, compared between processes.

Read `collectives` (every gather and reduction of ZeRO), `chunks` (loops over arrays on the host), `processes` and
`fingerprints` (agreement of processes, through `key_value`), `presence` (who has ended, who is given up),
`host_compute` and `python_calls` (what the host runs inside of a program). Nothing here knows a loss or an optimizer.
"""
