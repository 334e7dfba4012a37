"""Two real processes of four devices each, over `jax.distributed` and gloo, against one process of eight."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests import multiprocess_worker

ROOT = pathlib.Path(__file__).parents[1]
TIME_LIMIT = 120  # seconds


def run_processes(scenario):
    """Runs a function of the worker in two processes; returns `(exit status, stdout, stderr)` of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.multiprocess_worker", scenario, str(index), str(port)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(multiprocess_worker.NUM_PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()  # no more than a formality, unless one of them hangs
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_two_processes_train_like_one():
    expected = multiprocess_worker.train()
    assert_worth_comparing_with(expected)
    for status, output, errors in run_processes("train"):
        assert status == 0, errors
        found = json.loads(output.splitlines()[-1])
        assert found.keys() == expected.keys()
        for name, numbers in expected.items():
            assert found[name].keys() == numbers.keys()
            for what, number in numbers.items():
                tolerance = 1e-6 if what.startswith("loss") else 1e-5
                assert found[name][what] == pytest.approx(number, rel=tolerance), (name, what)


def assert_worth_comparing_with(results):
    """The run in one process learns, sees its noise, and all that was asked for has happened."""
    for name in ("stage 1", "stage 2", "stage 3", "born"):
        assert results[name]["loss 4"] != pytest.approx(results[name]["loss 0"], rel=1e-2)
        assert results[name]["loss 0"] == pytest.approx(
            results["stage 1"]["loss 0"], rel=1e-6 if name != "born" else 0.1
        )
    assert results["born"]["loss 0"] != pytest.approx(results["stage 3"]["loss 0"], rel=1e-5)
    for stage in (1, 2, 3):
        fp16 = results[f"fp16, stage {stage}"]
        assert [fp16[f"applied {i}"] for i in range(5)] == [1, 0, 1, 0, 1]
        assert [fp16[f"scale {i}"] for i in range(5)] == [2.0**16] * 4 + [2.0**15]
    end = results["end of stage 3"]
    assert end["rows"] == multiprocess_worker.ROWS
    assert end["halved['layer_0']['kernel']"] == pytest.approx(end["params['layer_0']['kernel']"] / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("scenario", "differences"),
    [
        ("disagree_about_stage", ["process 0: config: ZeroConfig(stage=2", "process 1: config: ZeroConfig(stage=3"]),
        ("disagree_about_shapes", ["process 0: params/head: float32[8, 16]", "process 1: params/head: float32[8, 17]"]),
    ],
)
def test_processes_that_disagree_say_so_and_end(scenario, differences):
    for status, _, errors in run_processes(scenario):
        assert status == 1, errors
        assert "ValueError: The processes do not agree about the training state" in errors
        for difference in differences:
            assert difference in errors
        assert "process 0: params/body" not in errors, "only what differs"
        assert "Start every process with the same configuration" in errors
