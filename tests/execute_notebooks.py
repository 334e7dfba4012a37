"""Runs the texts of the notebooks in a kernel and writes the notebooks with their outputs.

    JAX_PLATFORMS=cpu python -m tests.execute_notebooks     # needs the extra `notebooks`

With the extra `gpu` installed as well, notebooks 2 and 4 show what the compiler of eight H200 says, as the committed
ones do.
"""

import pathlib

import jupytext
import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"


def execute(text: pathlib.Path) -> nbformat.NotebookNode:
    """Returns the notebook of a text, executed; raises what a cell raises."""
    notebook = jupytext.read(text)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"  # else random, and different after each run
    resources = {"metadata": {"path": str(text.parent)}}
    nbclient.NotebookClient(
        notebook, timeout=600, record_timing=False, coalesce_streams=True, resources=resources
    ).execute()
    return notebook


def main(folder: pathlib.Path = FOLDER) -> None:
    """Executes every notebook of a folder in place."""
    for text in sorted(folder.glob("*.py")):
        jupytext.write(execute(text), text.with_suffix(".ipynb"))
        print(f"wrote {text.with_suffix('.ipynb').name}")


if __name__ == "__main__":
    main()
