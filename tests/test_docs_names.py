"""What the documentation names is there: names, arguments, options, files, places to go to."""

import dataclasses
import importlib
import inspect
import pkgutil
import re

import pytest
import yaml
from typer.main import get_command

import jzero
import jzero.attention
import jzero.data
import jzero.hf
import jzero.lora
from jzero.cli.commands import app
from tests.pages import PAGES, ROOT
from tests.site_hooks import hook

OTHERS = ["README.md", "CONTRIBUTING.md", *(f"{x}/**/*.md" for x in ("examples", "benchmarks/gpu")), "benchmarks/*.md"]
TEXTS = {path: path.read_text() for path in [*PAGES.values(), *(p for x in OTHERS for p in sorted(ROOT.glob(x)))]}
PUBLIC = {
    name: getattr(room, name)
    for room in (jzero, jzero.attention, jzero.data, jzero.hf, jzero.lora)
    for name in room.__all__
}
COMMANDS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in get_command(app).commands.items()
}
ELSEWHERE = {"--help", "--durations", "--gpus-per-task", "--nodes"}
"""Options of other programs."""


def found_in_texts(pattern):
    """Returns what the first group matched in any text, each with its text's name and the text after it."""
    return [
        (match[1], f"{path.relative_to(ROOT)}: {match[0]}", text[match.end() :])
        for path, text in TEXTS.items()
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]


def is_there(name):
    """Whether a dotted name is public, or in a module."""
    try:
        importlib.import_module(name)
    except ImportError:
        above, _, last = name.rpartition(".")
        return last in jzero.__all__ if above == "jzero" else hasattr(pkgutil.resolve_name(above), last)
    return True


def test_names_of_the_library_exist():
    named = {name: where for name, where, _ in found_in_texts(r"(?<![\w/.-])(jzero(?:\.[A-Za-z]\w*)+)")}
    assert len(named) > 80
    assert not [where for name, where in named.items() if not is_there(name)]


def arguments_of(function):
    """Returns the names of the arguments, as a head shows them."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        names += ["*"] * (parameter.kind is parameter.KEYWORD_ONLY and "*" not in names) + [parameter.name]
    return ", ".join(name for name in names if name != "self")


def test_heads_of_modules_show_their_entry_points():
    """The lines of code after the first sentence: names and arguments, as they are now."""
    shown, wrong, signature = 0, {}, r"^    ([\w.]+)\(([^()]*)\)(?: -> .+)?$"
    for path in sorted((ROOT / "jzero").rglob("*.py")):
        _, *code = path.read_text().split('"""')[1].split("\n\n")
        for name, arguments in re.findall(signature, code[0] if code else "", re.MULTILINE):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found, shown = arguments_of(pkgutil.resolve_name(f"{module}:{name}")), shown + 1
            if found != arguments:
                wrong[f"{module}.{name}"] = found
    assert not wrong
    assert shown > 25


def keywords_of_call(after):
    """Returns the keywords of a call, of which the text begins behind the opening parenthesis."""
    depth, keywords = 1, []
    for match in re.finditer(r"[(\[{]|[)\]}]|(\w+)\s*=(?!=)", after):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth == 0:
            break
        if depth == 1 and match[1]:
            keywords.append(match[1])
    return keywords


def test_arguments_of_public_names_exist():
    kinds = {
        name: x for name, x in PUBLIC.items() if callable(x) and not (inspect.isclass(x) and issubclass(x, Exception))
    }
    del kinds["make_mesh"]  # whose arguments are names of axes
    signatures = {name: inspect.signature(x).parameters for name, x in kinds.items()}
    given = [
        (name, keyword, where)
        for name, where, after in found_in_texts(r"\b([A-Za-z]\w+)\(")
        if name in signatures
        for keyword in keywords_of_call(after)
    ]
    assert len(given) > 300
    assert not [where for name, keyword, where in given if keyword not in signatures[name]]


def test_fields_of_public_classes_exist():
    kinds = {name: x for name, x in PUBLIC.items() if inspect.isclass(x)}
    named = found_in_texts(rf"\b((?:{'|'.join(kinds)})\.[a-z]\w*)")
    assert len(named) > 50
    for name, where, _ in named:
        kind, field = name.split(".")
        fields = {x.name for x in dataclasses.fields(kinds[kind])} if dataclasses.is_dataclass(kinds[kind]) else set()
        assert field in fields or hasattr(kinds[kind], field), where


def options_of(text):
    return re.findall(r"(?<![\w-])(--[a-z][\w-]*)", text)


def test_options_of_the_command_exist():
    lines = found_in_texts(rf"\bjzero ({'|'.join(COMMANDS)})\b(?:\\\n|[^`\n#])*")
    given = [(name, option, where) for name, where, _ in lines for option in options_of(where)]
    assert len(given) > 50
    assert not [where for name, option, where in given if option not in COMMANDS[name]]


def test_options_of_scripts_exist():
    rooms = ("examples", "benchmarks", "tests")
    sources = {path: path.read_text() for room in rooms for path in ROOT.glob(f"{room}/**/*.py")}
    lines = found_in_texts(r"\bpython ((?:examples|benchmarks)/[\w/]+\.py)(?:\\\n|[^`\n#])*")
    assert len(lines) > 10
    for name, where, _ in lines:
        beside = "".join(text for path, text in sources.items() if path.parent == (ROOT / name).parent)
        assert not [option for option in options_of(where) if f'"{option}"' not in beside], where
    known = ELSEWHERE.union(*COMMANDS.values(), re.findall(r'"(--[\w-]+)', "".join(sources.values())))
    assert not [where for option, where, _ in found_in_texts(r"`(--[a-z][\w-]*)") if option not in known]


def test_files_and_modules_exist():
    files = found_in_texts(r"(?:`|\bpython )((?:jzero|examples|tests|benchmarks|docs|notebooks|\.ci)/[\w./*-]+)")
    modules = found_in_texts(r"\bpython -m ((?:jzero|benchmarks|tests)[\w.]*)")
    assert len(files) > 80
    assert len(modules) > 20
    assert not [where for name, where, _ in files if not list(ROOT.glob(name.rstrip("/.")))]
    assert not [where for name, where, _ in modules if importlib.util.find_spec(name) is None]


def numbers_of(text):
    """Returns the numbers of three digits and more, as written; not those of code, links and dates."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d", " ", text)
    return [x for x in re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?", text) if len(re.sub(r"\D", "", x)) >= 3]


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("memory", "In place of stages 1 and 2"),
        ("matrix_optimizers", "Gains"),
        ("offload", "Savings"),
        ("slow_links", "Gains"),
    ],
)
def test_figures_are_those_of_the_results_that_a_section_links(page, heading):
    path = PAGES[f"guides/{page}.md"]
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", path.read_text(), re.MULTILINE | re.DOTALL)[1]
    links = re.findall(r"\(\.\./results/([\w-]+\.md)\)", section)
    measured = [
        float(x.replace(",", ""))
        for link in links
        for x in re.findall(r"\d[\d,]*\.?\d*", (ROOT / "benchmarks/results" / link).read_text())
    ]
    figures = numbers_of(section)
    assert len(figures) > 2
    for figure in figures:
        decimals = len(figure.partition(".")[2])
        assert float(figure.replace(",", "")) in {round(x, decimals) for x in measured}, (figure, links)


# Links: relative in a checkout, and none is dead; elsewhere they begin with the address of the repository, if any.

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
