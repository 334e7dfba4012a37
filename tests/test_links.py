"""Links: relative in a checkout, and none is dead; elsewhere they begin with the address of the repository, if any."""

import pathlib
import re

import yaml

from tests.site_hooks import hook

ROOT = pathlib.Path(__file__).parents[1]
FILES = [
    path for folder in (".", ".github", "benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.md")
]
FILES = sorted({path for path in FILES if not any(part.startswith(".venv") for part in path.parts)})
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`]*`", re.MULTILINE | re.DOTALL)
ADDRESS = re.compile(r"https?://[^\s\"')]*/jzero\b")
links = hook("links")


def slugs(text):
    """Returns the names of the headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*?)(?: \{ #([\w-]+) \})?$", text, re.MULTILINE)
    return {name or re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title, name in headings}


def test_in_a_checkout_every_link_leads_to_a_file_and_a_heading():
    """Without mkdocs, and in texts that are not in the site; names in the reference are for mkdocs to check."""
    links = [(path, "".join(pair)) for path in FILES for pair in LINK.findall(CODE.sub("", path.read_text()))]
    links = [(path, link) for path, link in links if ":" not in link]
    assert len(links) > 100
    for path, link in links:
        name, _, heading = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if target.parent.name == "notebooks":
            target = ROOT / "notebooks" / f"{target.stem}.ipynb"  # which docs/render.py makes a page of
        assert target.exists(), (path, link)
        assert not heading or "." in heading or heading in slugs(target.read_text()), (path, link)


def test_one_constant_names_the_repository():
    texts = [path for pattern in ("*.md", "*.yml", "*.toml", "*.cff", "docs/*.py") for path in ROOT.glob(pattern)]
    for path in {*texts, *FILES, *(ROOT / ".github").rglob("*.yml")} - {ROOT / "pyproject.toml", ROOT / "CITATION.cff"}:
        assert not ADDRESS.findall(path.read_text()), path
    assert set(ADDRESS.findall((ROOT / "pyproject.toml").read_text())) <= {links.repository()}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text()).get("repository-code", "")
    assert cited == links.repository()


def test_elsewhere_links_begin_with_the_address_of_the_repository():
    text = (ROOT / "README.md").read_text()
    num_links = len(re.findall(r"\]\(", text))
    made = links.absolute(text, "https://example.org/o/jzero")
    found = re.findall(r"\]\(https://example\.org/o/jzero/(blob|raw)/main/([^)#]+)", made)
    assert len(found) == num_links == len(re.findall(r"\]\(", made)) > 20
    assert all((ROOT / path).exists() for _, path in found)
    assert [path for kind, path in found if kind == "raw"] == ["docs/pictures/bytes.svg"]
    nowhere = links.absolute(text, "")
    assert "](" not in nowhere
    assert "\n[" not in nowhere
