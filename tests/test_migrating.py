"""`docs/migrating.md`: its code runs, its tables of keys are those of the code, and what it names is there."""

from __future__ import annotations

import inspect
import json
import re
import warnings

import jax
import pytest

import jzero
import jzero.data
from tests.deepspeed_tables import GUIDE, table_in, tables

TEXT = GUIDE.read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["zero", "others", "types"])
def test_tables_are_those_of_the_code(name):
    assert table_in(TEXT, name) == tables()[name], "run `python -m tests.deepspeed_tables`"


def test_code_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (config,) = blocks("json")
    (tmp_path / "ds_config.json").write_text(config)
    namespace = {"__name__": "migrating"}
    with warnings.catch_warnings():
        # The bucket sizes of the example's file: only the compiler for GPUs can be told, and jzero says so.
        warnings.filterwarnings("ignore", "`ZeroConfig` has reduce_bucket_bytes", UserWarning)
        for number, block in enumerate(blocks("python")):
            exec(compile(block, f"migrating.md, python block {number}", "exec"), namespace)
    assert int(namespace["state"].step) == 3
    assert namespace["report"].train_batch_size == json.loads(config)["train_batch_size"] == 8 * jax.device_count()


def test_names_exist():
    names = set(re.findall(r"jzero\.([a-zA-Z]\w*)", TEXT))
    assert len(names) > 20
    assert not [name for name in names if not hasattr(jzero, name)]


def test_arguments_exist():
    for name, arguments in re.findall(r"`(?:jzero\.)?(\w+)\((\w+)=[^`]*\)`", TEXT):
        if hasattr(jzero, name) and name != "make_mesh":  # whose arguments are names of axes
            assert arguments in inspect.signature(getattr(jzero, name)).parameters, (name, arguments)
