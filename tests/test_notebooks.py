"""The notebooks: paired with text, committed with their outputs, and run from top to bottom."""

import importlib
import json
import pathlib
import re

import pytest

import jzero
from tests import pages

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
VARIES = "# The output varies with versions and machines.\n"
"""Stands in a cell whose output is not compared."""
MAX_BYTES = 300 * 1024
MACHINE_PATH = re.compile(r"(?<![\w.])(?:/(?:home|root|tmp|usr|opt|var|work|mnt|Users|private)/|[A-Z]:\\)")


def outputs_of(path: pathlib.Path) -> list[dict]:
    """Returns all outputs that are committed in a notebook."""
    cells = json.loads(path.read_text())["cells"]
    return [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]


def text_of(output: dict) -> str:
    """Returns what an output says; pictures left out, whose base64 looks like paths at times."""
    data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
    return "\n".join(["".join(output.get("text", [])), *("".join(value) for value in data.values())])


@pytest.fixture(scope="module")
def jupytext():
    """Takes seconds to import, which each process would pay that only collects this file."""
    importlib.import_module("jupytext.compare")
    return importlib.import_module("jupytext")


def test_there_are_four_and_each_is_paired(jupytext):
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]
    assert [path.with_suffix(".py") for path in NOTEBOOKS] == sorted(FOLDER.glob("*.py"))
    for path in NOTEBOOKS:
        for file in (path, path.with_suffix(".py")):
            assert jupytext.read(file).metadata["jupytext"]["formats"] == "ipynb,py:percent", file


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_and_text_say_the_same(path, jupytext):
    text = path.with_suffix(".py").read_text()
    jupytext.compare.compare_notebooks(jupytext.reads(text, fmt="py:percent"), jupytext.read(path), "py:percent")
    assert jupytext.writes(jupytext.read(path), fmt="py:percent") == text, "run `jupytext --sync` on it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_whole_and_name_no_machine(path):
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "not run from top to bottom"
    assert not any(cell["metadata"] for cell in code), "times of day and the like: use tests/execute_notebooks.py"
    assert path.stat().st_size < MAX_BYTES
    outputs = outputs_of(path)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", text_of(output)
        assert not MACHINE_PATH.search(text_of(output)), text_of(output)
        assert " at 0x" not in text_of(output), "the value of an expression that is not meant to be shown"


@pytest.mark.slow  # CI runs the first with the documentation
@pytest.mark.parametrize("number", ["01", "02", "03", "04"])
def test_notebook_runs_and_prints_what_is_committed(number, tmp_path, monkeypatch):
    """Every claim of its that can be an assertion is one, so that to run is to pass; of outputs the words count.

    It runs in this process, which has eight devices too; on other numbers of devices it starts one.
    """
    (path,) = (path for path in NOTEBOOKS if path.stem.startswith(number))
    monkeypatch.chdir(tmp_path)  # any folder
    plt = importlib.import_module("matplotlib.pyplot")  # as above: half a second
    plt.switch_backend("agg")
    namespace = {"__name__": "__main__"}
    for index, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            name, source = f"{path.name}, cell {index}", "".join(cell["source"])
            printed = pages.run_python(source, name, namespace)
            committed = "".join(text for output in cell["outputs"] for text in output.get("text", []))
            if VARIES not in source:
                pages.check_output(name, committed, printed, is_example=True)
    plt.close("all")


def test_committed_outputs_are_of_this_version():
    texts = [text_of(output) for path in NOTEBOOKS for output in outputs_of(path)]
    found = {version for text in texts for version in re.findall(r"\bjzero (\d[\w.]*)", text)}
    assert found == {jzero.__version__}, "run tests/execute_notebooks.py"
