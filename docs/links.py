"""Relative links into the repository, where it is not at hand: on the site, and in the package's description.

`pyproject.toml` has the address of the repository, which links then begin with. Without it, of a link only the text is
left. Also a hook of mkdocs.
"""

import pathlib
import posixpath
import re
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(
    r"^```.*?^```$|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def repository() -> str:
    """Returns the address of the repository; an empty string while there is none."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return tools["hatch"]["metadata"]["hooks"]["custom"]["repository"]


def absolute(
    markdown: str, address: str, *, folder: str = "", site: str | None = None
) -> str:
    """Returns Markdown whose links into the repository are absolute.

    Args:
      markdown: The text; its code stays as it is.
      address: That of the repository.
      folder: Where the text lies in the repository.
      site: The folder of the site, within which links stay relative.
    """

    def replaced(link: re.Match[str]) -> str:
        target = link["target"]
        if target is None or ":" in target or target.startswith("#"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if site is not None and path.startswith(f"{site}/"):
            return link[0]
        kind = "raw" if link["image"] else "blob"
        return (
            f"{link['image']}[{link['text']}]({address}/{kind}/main/{path})"
            if address
            else link["text"]
        )

    return LINK.sub(replaced, markdown)


def on_config(config: Any) -> None:
    """Puts the repository's address into the head of each page; mkdocs calls this once."""
    if address := repository():
        config.repo_url, config.repo_name = (
            address,
            "/".join(address.split("/")[-2:]),
        )


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Replaces the links that leave the site; mkdocs calls this for each page."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    return absolute(markdown, repository(), folder=folder, site="docs")
