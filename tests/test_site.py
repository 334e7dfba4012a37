"""The site: it builds without a warning, loads nothing from elsewhere, and its search finds the guides."""

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

QUERIES = {
    "optimizer state on a disk": "guides/offload",
    "disk": "guides/offload",
    "offload optimizer": "guides/offload",
    "resume a checkpoint": "guides/checkpoints",
    "restore on a different number of devices": "guides/checkpoints",
    "out of memory": "guides/memory",
    "estimate memory": "guides/memory",
    "gradient accumulation": "guides/your_own_loop",
    "mixed precision bf16": "guides/precision",
    "LoRA fine-tune": "guides/fine_tuning",
    "multi host cluster": "guides/multi_host",
    "export hugging face": "guides/published_models",
    "evaluate": "start",
    "profile slow step": "monitoring",
}


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


BROWSER = """
var self = globalThis, console = {warn() {}}, handle, answer
function addEventListener(_, handler) { handle = handler }
function postMessage(message) { answer = message.data }
"""
SETUP, QUERY = 0, 2  # kinds of messages to the worker


def test_the_search_puts_guides_first(site):
    """Asks the script that searches in the browser, with the site's own index."""
    mini_racer = importlib.import_module("py_mini_racer").mini_racer
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.js")
    index = json.loads((site / "search/search_index.json").read_text())
    with mini_racer() as javascript:
        javascript.eval(BROWSER + worker.read_text())

        def ask(kind, data):
            javascript.eval(f"void handle({{data: {json.dumps({'type': kind, 'data': data})}}})")
            return json.loads(javascript.eval("JSON.stringify(answer ?? null)"))

        ask(SETUP, {**index, "options": {}})
        found = {query: [page[0]["location"] for page in ask(QUERY, query)["items"]] for query in QUERIES}
    assert not {
        query: pages[:3]
        for query, pages in found.items()
        if not any(page.startswith(QUERIES[query]) for page in pages[:2])
    }


def test_the_search_leaves_out_what_is_dated(site):
    index = json.loads((site / "search/search_index.json").read_text())
    pages = {doc["location"].split("/")[0] for doc in index["docs"]}
    assert {"guides", "reference", "troubleshooting.html"} <= pages
    assert not {"results", "changelog.html"} & pages
    assert (site / "results").exists()
    assert (site / "changelog.html").exists()
