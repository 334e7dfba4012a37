"""Analyzes compiled and traced steps: memory, collectives, timeline, departures from the plan."""
