"""Several processes of one program: they compare what they are about to do, and agree.

Read `agree` with `exchange`, on `presence` (a store of keys and values; who has ended, who is given up), and
`fingerprints` (of what they compare).
"""
