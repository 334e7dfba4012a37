"""Links: relative in a checkout, and none is dead; elsewhere they begin with the address of the repository, if any."""

import pathlib
import posixpath
import re

import yaml

from tests.site_hooks import hook

ROOT = pathlib.Path(__file__).parents[1]
FILES = [
    path for folder in (".", ".github", "benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.md")
]
FILES = sorted({path for path in FILES if not any(part.startswith(".venv") for part in path.parts)})
CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
ADDRESS = re.compile(r"https?://[^\s\"')]*/jzero\b")
links = hook("links")


def targets(path):
    """Returns the relative targets of a file's links, as paths from the root, with their anchors."""
    found = ["".join(pair) for pair in LINK.findall(CODE.sub("", path.read_text()))]
    folder = path.parent.relative_to(ROOT).as_posix()
    for target in found:
        if ":" not in target:
            name, _, anchor = target.partition("#")
            yield (
                posixpath.normpath(posixpath.join(folder, name)) if name else path.relative_to(ROOT).as_posix(),
                anchor,
            )


def anchors(text):
    return {
        re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def test_in_a_checkout_every_link_leads_to_a_file_and_a_heading():
    """Of links within the site `mkdocs build --strict` knows more: its pages may be generated, their headings, too."""
    found = set()
    for path in FILES:
        for target, anchor in targets(path):
            if path.is_relative_to(ROOT / "docs") and target.startswith("docs/"):
                continue
            assert (ROOT / target).exists(), (path, target)
            assert not anchor or anchor in anchors((ROOT / target).read_text()), (path, target, anchor)
            found.add((path.name, target))
    assert sum(name == "README.md" for name, _ in found) > 20


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
