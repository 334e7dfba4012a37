"""Several processes of one program: they compare what they are about to do, and agree.

Read `agree`, on `key_value` and `presence` (who has ended, who is given up), and `fingerprints` (of what they compare).
"""
