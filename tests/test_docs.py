"""The documentation: its code runs, prints what it says, and leaves out no name and no note."""

import ast
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import jax.numpy as jnp
import pytest

import jzero
import jzero.attention
import jzero.data
import jzero.hf
import jzero.lora
from tests import pages
from tests.example_runs import run_example
from tests.pages import BLOCK, DOCS, PAGES, ROOT, blocks
from tests.site_hooks import hook

IN_TWO_PROCESSES = "guides/multi_host.md"
RUN_ELSEWHERE = {  # with more to say about what comes out
    IN_TWO_PROCESSES,
    "guides/command_line.md",  # test_cli.py
    "migrating.md",  # test_migrating.py
    "monitoring.md",  # test_monitor.py
}


@pytest.mark.slow  # CI runs them all
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in RUN_ELSEWHERE and "```" in PAGES[page].read_text()]
)
def test_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for title in filter(None, (title for _, title, _ in blocks(page))):
        monkeypatch.delitem(sys.modules, title.removesuffix(".py"), raising=False)
    pages.run(page)


@pytest.mark.slow  # as the other pages
def test_page_about_several_hosts_runs_in_two_processes(tmp_path):
    """The launcher of the examples starts them; the page has its own names for what that says."""
    names = {"COORDINATOR": "COORDINATOR_ADDRESS", "NUM_PROCESSES": "NUM_PROCESSES", "PROCESS_ID": "PROCESS_ID"}
    given = f"import os\nos.environ |= {{name: os.environ['JAX_' + of] for name, of in {names}.items()}}"
    script = tmp_path / "page.py"
    code = [text for language, _, text in blocks(IN_TWO_PROCESSES) if language == "python"]
    script.write_text("\n".join([given, *code]))
    launcher = ("multi_process/launch_local.py", "--processes=2", "--devices=2", f"--script={script}")
    assert "4 devices in 2 processes" in run_example(*launcher)


def test_every_code_block_stands_once():
    places = {}
    for name, path in {"README.md": ROOT / "README.md", **PAGES}.items():
        for _, _, text in BLOCK.findall(path.read_text()):
            places.setdefault(text.strip(), []).append(name)
    assert not {text: names for text, names in places.items() if len(names) > 1}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 8192


def test_every_public_name_is_in_the_table_of_the_reference():
    api_table = hook("api_table")
    written = api_table.on_page_markdown(PAGES["reference/index.md"].read_text())
    assert re.findall(r"^\| \[`(\w+)`\]\(\w+\.md#jzero\.\1\) \| .+\. \|$", written, re.MULTILINE) == jzero.__all__
    assert api_table.on_page_markdown("# Another page") == "# Another page"


def test_every_python_block_is_one_that_is_run():
    for page, path in PAGES.items():
        fences = re.findall(r"^([ \t]*)```(\w+)", path.read_text(), re.MULTILINE)
        odd = [
            (space, name)
            for space, name in fences
            if name in {"py", "pycon", "python3"} or (space and name == "python")
        ]
        assert not odd, (page, odd)
        assert path.read_text().count("```python") == sum(language == "python" for language, _, _ in blocks(page)), page


def test_no_output_is_shown_where_none_is_compared(tmp_path, monkeypatch):
    for text in (PAGES[IN_TWO_PROCESSES].read_text(), (ROOT / "README.md").read_text()):
        assert "text" not in {language for language, _, _ in BLOCK.findall(text)}
    (tmp_path / "odd.md").write_text("```python\nprint(1)\n```\n\n```text\n1\n```\n\n```text\n1\n```\n")
    monkeypatch.setitem(PAGES, "odd.md", tmp_path / "odd.md")
    with pytest.raises(AssertionError, match="block 2 shows what no block before it prints"):
        pages.run("odd.md")


def test_every_public_name_is_in_the_reference_once():
    reference = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    found = re.findall(r"^::: jzero\.([\w.]+)$", reference, re.MULTILINE)
    others = [
        f"{room.__name__[6:]}.{name}"
        for room in (jzero.attention, jzero.data, jzero.hf, jzero.lora)
        for name in room.__all__
    ]
    assert sorted(found) == sorted([*jzero.__all__, *others])
    assert reference.count("::: ") == len(found), "nothing in another form"


def test_every_note_is_under_design():
    listed = re.findall(r"^\*\*(.+)\*\* \(`(.+)`\)\n:   \S", PAGES["design/notes.md"].read_text(), re.MULTILINE)
    written = [
        (title, str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "jzero").rglob("*.py"))
        for title in re.findall(r"^\[Note: (.+)\]$", path.read_text(), re.MULTILINE)
    ]
    assert len(written) > 20
    assert sorted(listed) == sorted(written)


def test_every_room_says_in_which_order_to_read_its_files():
    rooms = sorted((ROOT / "jzero").glob("*/**/__init__.py"))
    assert len(rooms) > 15
    for room in rooms:
        files = {path.stem for path in room.parent.glob("[!_]*.py")}
        files |= {path.parent.name for path in room.parent.glob("*/__init__.py")}
        named = re.findall(r"`([a-z0-9_]+)`", ast.get_docstring(ast.parse(room.read_text())))
        assert sorted(named) == sorted(files), room.parent.name


@pytest.fixture(scope="module")
def render():
    """The hook that puts pictures and notebooks into the site."""
    return hook("render")


def check_picture(svg):
    """Raises unless a picture says what it shows, and all its text ends inside, as far as letters can be counted."""
    root = xml.etree.ElementTree.fromstring(svg)
    width = float(root.attrib["viewBox"].split()[2])
    assert len(root.attrib["aria-label"]) > 20
    assert "\n\n" not in svg, "Markdown ends at an empty line"
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        length = 0.5 * float(text.attrib["font-size"]) * len(text.text)
        left = float(text.attrib["x"]) - {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]] * length
        assert left > -8, text.text
        assert left + length < width + 8, text.text


def test_pages_show_each_picture(render):
    texts = [path.read_text() for path in PAGES.values()]
    shown = [name for text in texts for name in render.MARKER.findall(text)]
    assert set(shown) == set(render.PICTURES)
    assert len(shown) == sum(text.count("<!-- picture") for text in texts)


def test_the_picture_of_the_readme_is_the_one_that_is_drawn(render):
    assert (DOCS / "pictures/bytes.svg").read_text() == render.PICTURES["bytes"]()


def test_pictures_of_steps_say_what_the_programs_do(render):
    programs = render.programs
    loss_fn, params = programs.layers(3, 64)
    body, _ = programs.placed(loss_fn, params, jnp.ones((64, 64)), stage=3)
    lanes = {lane: [box.name for box in programs._boxes(body) if box.lane == lane] for lane in programs.LANES}
    assert lanes == {
        "gather": ["1", "2", "3", "3", "2"],
        "compute": ["1", "2", "3", "∇3", "←3", "∇2", "←2", "∇1"],
        "reduce": ["3", "2", "1"],
    }


def test_notebooks_become_pages(render):
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, images = render.render(path)
        assert text.startswith("# ")
        assert images
        assert all(image.startswith(b"\x89PNG") for image in images.values())
        assert all(text.count(f'src="{name}"') == 1 for name in images)
        assert ".ipynb)" not in text.replace(f"/{path.name})", "")


# The site: it builds without a warning, loads nothing from elsewhere, and its search leaves out what is dated.


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    # Without --quiet, which hides warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    built = list(site.rglob("*.html"))
    assert len(built) > 20
    for page in built:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?src=[\"']?([^\s\"'>]+)", text)
        loaded += re.findall(r"<link\b(?![^>]*rel=\"?(?:canonical|next|prev))[^>]*?href=[\"']?([^\s\"'>]+)", text)
        assert not [url for url in loaded if url.startswith(("http", "//"))], page
        assert "--8<--" not in text, page
        assert "<!-- picture" not in text, page
        for svg in re.findall(r'<svg [^>]*class="diagram".*?</svg>', text, re.DOTALL):
            check_picture(svg)


@pytest.mark.slow
def test_the_search_leaves_out_what_is_dated(site):
    index = json.loads((site / "search/search_index.json").read_text())
    found = {doc["location"].split("/")[0] for doc in index["docs"]}
    assert {"guides", "reference", "troubleshooting.html"} <= found
    assert not {"results", "changelog.html"} & found
    assert (site / "results").exists()
    assert (site / "changelog.html").exists()


FOUND = {  # among the first two
    "pmap": "guides/from_pmap.html",
    "push to hub": "guides/published_models.html#push-to-the-hub",
    "learning rate schedule": "recipes.html#learning-rate-schedules",
    "DPO": "guides/several_models.html#preference-tuning-dpo",
    "reference model": "guides/several_models.html",
    "target network": "guides/several_models.html#actor-and-critic-with-target-networks",
    "out of memory": "guides/memory.html#if-it-does-not-fit",
    "resume": "guides/checkpoints.html#resume-a-run",
    "long context": "guides/long_contexts.html",
    "experts": "guides/published_models.html#mixtures-of-experts",
    "W&B": "monitoring.html#tracking-servers",
    "TPU pod": "guides/multi_host.html#on-a-tpu-pod",
    "mixed precision": "guides/precision.html",
    "quantize": "guides/fine_tuning.html#qlora",
}


@pytest.mark.slow
def test_the_search_finds_what_people_type(site):
    """By the theme's own program, as a reader's browser runs it."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    command = [node, ROOT / "tests/search.js", site, *FOUND]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert not {query: found[query][:3] for query, page in FOUND.items() if page not in found[query][:2]}
