"""The site: it builds without a warning, loads nothing from elsewhere, and its search leaves out what is dated."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys

import pytest

from tests.test_docs import ROOT, check_picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # Without --quiet, which hides warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?src=[\"']?([^\s\"'>]+)", text)
        loaded += re.findall(r"<link\b(?![^>]*rel=\"?(?:canonical|next|prev))[^>]*?href=[\"']?([^\s\"'>]+)", text)
        assert not [url for url in loaded if url.startswith(("http", "//"))], page
        assert "--8<--" not in text, page
        assert "<!-- picture" not in text, page
        for svg in re.findall(r'<svg [^>]*class="diagram".*?</svg>', text, re.DOTALL):
            check_picture(svg)


def test_the_search_leaves_out_what_is_dated(site):
    index = json.loads((site / "search/search_index.json").read_text())
    pages = {doc["location"].split("/")[0] for doc in index["docs"]}
    assert {"guides", "reference", "troubleshooting.html"} <= pages
    assert not {"results", "changelog.html"} & pages
    assert (site / "results").exists()
    assert (site / "changelog.html").exists()
