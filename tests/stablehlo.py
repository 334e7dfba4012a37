"""Lowered programs as text."""

import re


def in_line(text):
    """Returns the lines of a lowered program in which every call stands for the lines of what it calls."""
    functions = {}
    for line in text.splitlines():
        head = re.match(r" *func\.func \w+ @([^\s(]+)\(", line)
        if head:
            name = head[1]
            functions[name] = []
        elif functions:
            functions[name].append(line)

    def lines(name):
        for line in functions[name]:
            called = re.search(r"\bcall @([^\s(]+)\(", line)
            yield from lines(called[1]) if called else [line]

    return "\n".join(lines("main"))
