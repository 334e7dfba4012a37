"""Drawn faults that change nothing a test could see, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""Reasons by file, text before and text after, blanks as one."""
