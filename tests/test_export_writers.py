"""The files of an export: of one program, whole or not there, whoever else writes and whatever fails."""

import pathlib
import re
import subprocess
import sys

import pytest
from etils import epath

import jzero
from jzero.checkpoint import safetensors_files
from tests.checkpoint_states import linen_state, sharded

ROOT = pathlib.Path(jzero.__file__).parents[1]
EXPORT_IN_PARTS = """
import sys
import numpy as np
from etils import epath
from jzero.checkpoint.safetensors_files import TensorSpec, write_tensors

path, value, size, max_bytes = epath.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def arrays():
    for i in range(4):
        if i == 2:
            print("writing", flush=True)
            sys.stdin.readline()
        yield [np.full(size, value, np.float32)]

try:
    specs = [TensorSpec(str(i), (size,), np.float32) for i in range(4)]
    write_tensors(path, specs, arrays(), max_bytes, {})
    print("exported")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("max_bytes", [[10_000, 10_000], [100, 10_000]], ids=str)
def test_of_two_programs_that_export_to_one_path_one_is_told(max_bytes, tmp_path):
    """The files hold the tensors of the program that says so, and a killed one is in nobody's way."""
    path = tmp_path / "out"
    start = lambda value, limit: subprocess.Popen(
        [sys.executable, "-c", EXPORT_IN_PARTS, path, str(value), "25", str(limit)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    killed = start(9, max_bytes[0])
    assert killed.stdout.readline() == "writing\n"
    killed.kill()
    killed.communicate()
    first = start(1, max_bytes[0])
    assert first.stdout.readline() == "writing\n"
    second, _ = start(2, max_bytes[1]).communicate(timeout=300)
    assert re.match(rf"CheckpointError {path}/model.safetensors is not written: .* \(process {first.pid} on", second)
    assert first.communicate("\n", timeout=300)[0] == "exported\n"
    tensors, _ = safetensors_files.find_tensors(path)
    assert {float(x) for tensor in tensors.values() for x in tensor.read((slice(None),))} == {1.0}
    assert all(file.name.endswith((".safetensors", ".json")) for file in path.iterdir())
    assert start(2, max_bytes[1]).communicate(timeout=300)[0].startswith("ValueError An export never replaces files")


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    rename = type(epath.Path(tmp_path)).rename

    def fails_at_the_index(self, target):
        if target.name.endswith(".json"):
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(type(epath.Path(tmp_path)), "rename", fails_at_the_index)
    with pytest.raises(jzero.CheckpointError, match=r"could not be written to .*no space"):
        jzero.export_params(sharded(linen_state(), 3), tmp_path / "out", max_file_bytes=1000)
    assert not list((tmp_path / "out").iterdir())
