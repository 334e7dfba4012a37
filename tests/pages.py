"""Pages of the documentation: the code of each runs from top to bottom, and prints what the page says."""

import contextlib
import doctest
import io
import pathlib
import re
import shlex

from typer.testing import CliRunner

from jzero.cli.commands import app

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md")) if "results" not in path.parts}
BLOCK = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?$\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = "for example"
"""The title of an output whose numbers are others each time: those of times and rates."""
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?(?: (?:[KMG]i)?B\b| m?s\b)?")
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page):
    """Returns language, title and text of each fenced block."""
    return BLOCK.findall(PAGES[page].read_text())


def run(page):
    """Runs the blocks of a page in their order, in the current directory and one namespace, which it returns.

    A block of text is what the block before it prints: `...` stands for anything, under the title `EXAMPLE` any number
    for any other. A block with another title is a file.
    """
    namespace = {"__name__": "page"}
    output = None
    for number, (language, title, text) in enumerate(blocks(page)):
        name = f"{page}, block {number}"
        if language == "text":
            assert output is not None, f"{name} shows what no block before it prints"
            check_output(name, text, output, is_example=title == EXAMPLE)
            output = None
        elif title:
            pathlib.Path(title).write_text(text)
        elif language == "python":
            output = run_python(text, name, namespace)
        elif language == "bash":
            output = run_commands(text)
    return namespace


def check_output(name, text, output, *, is_example=False):
    """Raises unless an output is the text that a page shows."""
    shown, printed = (NUMBER.sub("0", x) if is_example else x for x in (text, output))
    assert doctest.OutputChecker().check_output(shown, printed, SAME), f"{name}: it printed\n{output}"


def run_python(text, name, namespace):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(text, name, "exec"), namespace)
    return output.getvalue()


def run_commands(text):
    """Runs the lines that call jzero in this process; machines that are not there are left out where they compile."""
    output = ""
    for line in text.splitlines():
        if line.startswith("jzero "):
            words = shlex.split(line, comments=True)[1:]
            if words[0] == "analyze":
                words = shlex.split(re.sub(r"--topology \S+", "", shlex.join(words)))
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, (line, result.output)
            output += result.stdout
    return output
