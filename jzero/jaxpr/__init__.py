"""Facts about programs, whoever wrote them.

Read `primitives` (what each operation does), then `liveness` (which equations an output needs), `repeats` (blocks that
occur again and again) and `structure` (which of them are the same). Nothing here knows a plan or a stage.
"""
