"""Watches a training loop: metrics to sinks, progress, step time, memory, profiles."""
