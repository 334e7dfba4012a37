"""Tells griffe, which mkdocstrings reads docstrings with, what this project's headings of sections mean."""

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Takes `Example:`, which would be a box of running text, for griffe's `Examples:`, which knows doctests."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the sections of one docstring."""
        if obj.docstring is not None:
            text = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
            obj.docstring.value = re.sub(
                r"^References:$", "Note: References", text, flags=re.MULTILINE
            )
