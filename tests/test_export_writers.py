"""The files of an export: of one program, whole or not there, whoever else writes and whatever fails."""

import pathlib
import subprocess
import sys

import numpy as np
import optax
import pytest
from etils import epath

import jzero
from jzero.weights import safetensors_files
from jzero.weights.safetensors_files import TensorSpec, write_tensors

ROOT = pathlib.Path(jzero.__file__).parents[1]
EXPORT_SLOWLY = """
import sys
from etils import epath
from tests.test_export_writers import export

def wait(tensor):
    if tensor == 2:
        print("writing", flush=True)
        sys.stdin.readline()

export(epath.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), wait)
print("exported")
"""


def export(path, value, max_bytes, before=lambda tensor: None):
    """Writes four tensors, in one file or in several; calls `before` with the number of each."""
    specs = [TensorSpec(str(i), (25,), np.float32) for i in range(4)]
    arrays = ([np.full(25, value, np.float32)] for i in range(4) if before(i) is None)
    write_tensors(path, specs, arrays, max_bytes, {})


def test_of_two_programs_that_export_to_one_path_one_is_told(tmp_path):
    """The files hold the tensors of the program that says so, and a killed one is in nobody's way."""
    path = epath.Path(tmp_path / "out")
    start = lambda value: subprocess.Popen(
        [sys.executable, "-c", EXPORT_SLOWLY, path, str(value), "100"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    killed = start(9)
    assert killed.stdout.readline() == "writing\n"
    killed.kill()
    killed.communicate()
    first = start(1)
    assert first.stdout.readline() == "writing\n"
    with pytest.raises(jzero.CheckpointError, match=f"process {first.pid} on"):
        export(path, 2, 10_000)
    assert first.communicate("\n", timeout=300)[0] == "exported\n"
    tensors, _ = safetensors_files.find_tensors(path)
    assert {float(x) for tensor in tensors.values() for x in tensor.view((slice(None),))} == {1.0}
    assert all(file.name.endswith((".safetensors", ".json")) for file in path.iterdir())
    with pytest.raises(ValueError, match="never replaces files"):
        export(path, 2, 10_000)


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    rename = type(epath.Path(tmp_path)).rename

    def fails_at_the_index(self, target):
        if target.name.endswith(".json"):
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(type(epath.Path(tmp_path)), "rename", fails_at_the_index)
    params = {name: np.ones(200, np.float32) for name in "ab"}
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), stage=3)
    with pytest.raises(jzero.CheckpointError, match=r"could not be written to .*no space"):
        jzero.export_params(state, tmp_path / "out", max_file_bytes=1000)
    assert not list((tmp_path / "out").iterdir())
