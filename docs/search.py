"""A hook of mkdocs: which pages the search puts first, which it leaves out, and that it finds "W&B"."""

import pathlib
from typing import Any

from mkdocs.plugins import event_priority

FIRST = (
    "guides/",
    "concepts.md",
    "data.md",
    "migrating",
    "monitoring.md",
    "recipes.md",
    "start.md",
)
LEFT_OUT = ("results/", "changelog.md")


def on_page_markdown(_: str, *, page: Any, **__: object) -> None:
    """Says in a page's metadata what the search makes of it; mkdocs calls this for each page."""
    if page.file.src_uri.startswith(LEFT_OUT):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(FIRST):
        page.meta["search"] = {"boost": 3}


@event_priority(
    -50
)  # after the search has written its index, before it is copied for reading from disk
def on_post_build(*, config: Any, **__: object) -> None:
    """Lets the index have "W&B" as people type it; mkdocs calls this once."""
    index = pathlib.Path(config.site_dir, "search/search_index.json")
    index.write_text(index.read_text().replace("W&amp;B", "W&B"))
