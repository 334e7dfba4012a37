"""A hook of mkdocs: writes the table of every public name into the reference, from `jzero.__all__` and docstrings."""

import inspect
import pathlib
import re

import jzero

MARKER = "<!-- every public name -->"
REFERENCE = pathlib.Path(__file__).parent / "reference"


def pages() -> dict[str, str]:
    """Returns for each name the page that documents it."""
    return {
        name: path.name
        for path in sorted(REFERENCE.glob("*.md"))
        for name in re.findall(
            r"^::: jzero\.(\w+)$", path.read_text(), re.MULTILINE
        )
    }


def api_table() -> str:
    """Returns a row per name: a link, and the first line of the docstring."""
    rows = ["| name | summary |", "|---|---|"]
    of_name = pages()
    for name in jzero.__all__:
        line = (inspect.getdoc(getattr(jzero, name)) or "").splitlines()[0]
        line = line.replace("|", "\\|")
        rows.append(f"| [`{name}`]({of_name[name]}#jzero.{name}) | {line} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replaces the marker; mkdocs calls this for each page."""
    return markdown.replace(MARKER, api_table()) if MARKER in markdown else markdown
