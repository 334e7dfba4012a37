"""All that one or several real GPUs can tell in ten minutes: `python -m benchmarks.gpu`; `__main__` has the command."""
