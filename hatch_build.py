"""What the package says about itself that needs the address of the repository: links, and a description with links."""

import pathlib
import runpy
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

URLS = {
    "Repository": "",
    "Documentation": "/blob/main/docs/index.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


class Links(MetadataHookInterface):
    """Fills `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Makes the description of README.md."""
        address = self.config["repository"]
        links = runpy.run_path(f"{self.root}/docs/links.py")
        text = links["absolute"](pathlib.Path(self.root, "README.md").read_text(encoding="utf-8"), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {name: address + path for name, path in URLS.items()} if address else {}
