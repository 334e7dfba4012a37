"""`docs/migrating.md`: its code runs, its tables of keys are those of the code, and what it names is there."""

import json

import jax
import pytest

from tests import pages
from tests.deepspeed_tables import GUIDE, table_in, tables

TEXT = GUIDE.read_text()


@pytest.mark.parametrize("name", ["zero", "others", "types"])
def test_tables_are_those_of_the_code(name):
    assert table_in(TEXT, name) == tables()[name], "run `python -m tests.deepspeed_tables`"


# The bucket sizes of the example's file: only the compiler for GPUs can be told, and jzero says so.
@pytest.mark.filterwarnings("ignore:`ZeroConfig` has reduce_bucket_bytes:UserWarning")
def test_code_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = pages.run("migrating.md")
    assert int(namespace["state"].step) == 3
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert namespace["report"].train_batch_size == config["train_batch_size"] == 8 * jax.device_count()
