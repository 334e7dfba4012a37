"""Facts about programs, whoever wrote them.

Read `repeats` (blocks that occur again and again), then `structure` (which of them are the same). Nothing here knows a
plan or a stage.
"""
