"""`docs/migrating.md`: its code runs, and the tables of keys beside it are those of the code."""

import json

import jax
import pytest

from tests import pages
from tests.deepspeed_tables import table_in_pages, tables


@pytest.mark.parametrize("name", ["zero", "others", "types"])
def test_tables_are_those_of_the_code(name):
    assert table_in_pages(name) == tables()[name], "run `python -m tests.deepspeed_tables`"


# The bucket sizes of the example's file: only the compiler for GPUs can be told, and jzero says so.
@pytest.mark.filterwarnings("ignore:`ZeroConfig` has reduce_bucket_bytes:UserWarning")
def test_code_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = pages.run("migrating.md")
    assert int(namespace["state"].step) == 3
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert namespace["report"].train_batch_size == config["train_batch_size"] == 8 * jax.device_count()
