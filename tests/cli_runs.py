"""Commands run in this process, and what they print."""

import functools
import json
import pathlib
import shlex
import sys

import pytest
from typer.testing import CliRunner

import jzero
from jzero.cli.commands import app
from tests import cli_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a user's modules."""
    path = tmp_path_factory.mktemp("user")
    (path / "users.py").write_text(pathlib.Path(cli_models.__file__).read_text())
    (path / "needs_more.py").write_text("import a_package_that_is_not_there")
    (path / "no_python.py").write_text("def")
    return path


@pytest.fixture
def run(folder, monkeypatch):
    """Returns a function that runs a command line in that directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "users", raising=False)

    def call(line):
        return CliRunner().invoke(app, shlex.split(line))

    return call


@pytest.fixture
def fit_tries_little(monkeypatch):
    """One way to recompute, and nothing is kept with the memory that is left: a third of the traces."""
    monkeypatch.setattr(jzero, "fit", functools.partial(jzero.fit, remat=("as_written",)))
    monkeypatch.setattr("jzero.analysis.fit._filled", lambda *args, **options: None)


def text_of(result):
    assert result.exit_code == 0, result.output
    return result.stdout


def data_of(result):
    return json.loads(text_of(result), parse_constant=pytest.fail)  # infinity and NaN are no JSON


def message_of(result):
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr
