"""A training loop watched: metrics to sinks, progress, step time, memory, profiles."""
