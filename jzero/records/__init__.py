"""State that programs do not see: records in the host's memory or on a disk, and how steps update them.

Read `records` (what a record holds), `run` (one pass over them), `programs` (what is computed around the passes),
`background` (a pass beside steps), `schedules` (when a step's gradients count), `zenflow` with `columns` (columns that
are on the devices meanwhile), and `opening`.

[Note: States of records]
What each call does, by what waits for the records of a state. Only ZenFlow and `delay=1` know the three in the middle.

                   clean     gradients wait    ready          running          failed        released
    step           applies   prepares, runs    starts it      waits for it     starts it     RuntimeError
    read a leaf    reads     reads             reads          waits, reads     reads         RuntimeError
    save, move     copies    applies to a copy the same       waits, the same  the same      RuntimeError
    `release_disk` frees     frees             frees          waits, frees     frees         RuntimeError

*Ready*: everything that the pass reads beside records is known. *Failed* is ready once more: the pass wrote only the
other slot, so the next step starts it again, and raises before it changes anything if it fails again. Where there is
one slot (`delay=1` in the host's memory) a failed pass leaves the records torn, and each call says to restore a
checkpoint. Ctrl-C never ends a pass that runs: it goes on, and whoever needs the records next waits for it. Until the
last program of a step begins, an error or Ctrl-C changes nothing. That program consumes the state; the records count
when it has begun.
"""
