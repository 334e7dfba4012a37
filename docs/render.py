"""A hook of mkdocs: draws pictures where pages ask for them, breaks code in tables, and adds a page for each notebook.

A page asks with `<!-- picture: NAME -->` on a line of its own; `draw_NAME` in `pictures/` draws it, from plans, arrays,
traced programs, estimates and committed results.
"""

import base64
import functools
import html
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
MARKER = re.compile(r"^<!-- picture: (\w+) -->$", re.MULTILINE)

# Before jax starts: pictures show eight devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("PJRT_NPROC", "32")
sys.path.insert(0, str(ROOT / "docs"))

from pictures import lifetimes, machines, programs, states, terminal  # noqa: E402

PICTURES: dict[str, Callable[[], str]] = {
    name.removeprefix("draw_"): function
    for module in (lifetimes, machines, programs, states, terminal)
    for name, function in vars(module).items()
    if name.startswith("draw_")
}


@functools.cache  # `mkdocs serve` builds again and again
def picture(name: str) -> str:
    """Returns a picture as HTML. Markdown takes an `svg` that stands alone for text, and puts paragraphs inside it."""
    return f"<figure>\n{PICTURES[name]().strip()}\n</figure>"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replaces the markers; mkdocs calls this for each page."""
    return MARKER.sub(lambda match: picture(match[1]), markdown)


# --- Code in tables ------------------------------------------------------------------------------------------------

CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
CODE = re.compile(r"<code\b.*?</code>", re.DOTALL)
PLACE = re.compile(r"<[^>]*>|(\s+)|(?<=[^\W\d])[._/=](?=\w)")


def on_post_page(output: str, **_: object) -> str:
    """Marks where code in tables may break; mkdocs calls this for each page."""
    return CELL.sub(
        lambda cell: CODE.sub(lambda code: mark_places(code[0]), cell[0]), output
    )


def mark_places(code: str) -> str:
    """Marks places between words, and those between parts of a name, which extra.css uses on phones alone."""

    def mark(match: re.Match[str]) -> str:
        if match[0].startswith("<"):
            return match[0]
        return match[0] + ("<wbr>" if match[1] else '<wbr class="part">')

    return PLACE.sub(mark, code)


# --- Notebooks -----------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Adds the notebooks as pages, and their pictures as files; mkdocs calls this once."""
    from mkdocs.structure.files import File  # noqa: PLC0415  # tests draw without mkdocs

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, images = render(path)
        page = File.generated(config, f"notebooks/{path.stem}.md", content=text)
        files.append(page)
        for name, content in images.items():
            files.append(
                File.generated(config, f"notebooks/{name}", content=content)
            )
    return files


def render(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook with its outputs as Markdown, and its pictures by the names of their files."""
    images: dict[str, bytes] = {}
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\((\w+)\.ipynb\)", r"(\1.md)", source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            parts.extend(_output(output, f"{path.stem}_{len(images) + 1}", images))
    parts.insert(
        1,
        f"[This notebook](../../notebooks/{path.name}) runs on eight virtual CPU devices.",
    )
    return "\n\n".join(parts) + "\n", images


def _output(
    output: dict[str, Any], name: str, images: dict[str, bytes]
) -> Iterator[str]:
    data = output.get("data", {})
    if "image/png" in data:
        images[f"{name}.png"] = base64.b64decode(data["image/png"])
        yield f'<figure>\n<img class="plot" alt="What the cell above draws" src="{name}.png">\n</figure>'
    elif "text/html" in data:
        yield '<div class="output">' + "".join(data["text/html"]) + "</div>"
    elif text := "".join(output.get("text", data.get("text/plain", []))):
        escaped = html.escape(text.rstrip())
        yield f'<pre class="output">{escaped}</pre>'.replace("\n\n", "\n&#8203;\n")
