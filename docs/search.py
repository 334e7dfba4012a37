"""A hook of mkdocs: which pages the search puts first, and which it leaves out."""

from typing import Any

FIRST = (
    "guides/",
    "concepts.md",
    "data.md",
    "migrating.md",
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
