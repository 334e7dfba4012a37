"""Tests. Their processes all import this package first."""

import gc

# Traces make many objects and few cycles: searching for these as often as Python does by default takes 8 % of the time.
gc.set_threshold(20_000, 20, 50)
