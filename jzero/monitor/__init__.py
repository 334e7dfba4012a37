"""Watches a training loop: its metrics go to sinks and to a line of progress. Nothing here runs a step.

Read `monitor`, `readings` (metrics as numbers), `sinks` and `trackers`, `progress` and `profiler`.
"""
