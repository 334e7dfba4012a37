"""Two real processes of two devices each, over `jax.distributed` and gloo, against one process of four.

What two processes do without dying they do one after another in one run, as far as its tests are selected.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jzero
from tests import data_results, data_worker, models, multiprocess_states, multiprocess_worker

ROOT = pathlib.Path(__file__).parents[1]
TIME_LIMIT = 300  # seconds, in place of for ever


def run_processes(scenarios, folder):
    """Runs functions of the worker in processes on a free port; returns `(exit status, stdout, stderr)` of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    start = [sys.executable, "-W", "error", "-m", "tests.multiprocess_worker", scenarios]
    processes = [
        subprocess.Popen(
            [*start, str(index), str(port), str(folder)],
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


def results_in(output):
    """Returns what the scenarios of a process returned."""
    lines = (line.partition(multiprocess_worker.RESULT) for line in output.splitlines())
    return [json.loads(text) for before, mark, text in lines if mark and not before]


def of_run(scenario, prepare=lambda folder: None):
    """Gives a test the results of the two processes for a scenario, and its folder, which `prepare` has made."""

    def decorate(test):
        test.scenario, test.prepare = scenario, prepare
        return test

    return decorate


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """Runs the scenarios of the tests that are selected; returns their results by scenario, and the folder."""
    tests = {x.function.scenario: x.function for x in request.session.items if hasattr(x.function, "scenario")}
    if "alone" in tests:  # the last one: processes are at different places after it
        tests["alone"] = tests.pop("alone")
    folder = tmp_path_factory.mktemp("two")
    for scenario, test in tests.items():
        (folder / scenario).mkdir()
        test.prepare(folder / scenario)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        dying = pool.submit(run_processes, "one_dies", folder)  # beside them, since it waits most of its time
        outputs = run_processes(",".join(tests), folder)
    assert [status for status, _, _ in outputs] == [0, 0], outputs[0][2] + outputs[1][2]
    both = zip(*(results_in(output) for _, output, _ in outputs), strict=True)
    return {**dict(zip(tests, both, strict=True)), "one_dies": dying.result()}, folder


@pytest.fixture
def results(run, request):
    return run[0][request.function.scenario]


@pytest.fixture
def folder(run, request):
    return run[1] / request.function.scenario


@of_run("train")
def test_two_processes_train_like_one(results):
    expected = multiprocess_worker.train()
    assert_worth_comparing_with(expected)
    for found in results:
        assert found.keys() == expected.keys()
        for name, numbers in expected.items():
            assert found[name].keys() == numbers.keys()
            for what, number in numbers.items():
                tolerance = 1e-6 if what.startswith("loss") else 1e-5
                assert found[name][what] == pytest.approx(number, rel=tolerance), (name, what)


def prepare_records(folder):
    (folder / "scratch").mkdir(parents=True)
    pair = multiprocess_worker.make_pair(multiprocess_worker.LAMB)
    first = multiprocess_worker.sharded(pair, multiprocess_worker.config(1))
    jzero.save_checkpoint(folder / "from_one", first)
    return multiprocess_worker.whole(first)


@of_run("records", prepare_records)
def test_two_processes_train_on_records_like_one(results, folder, tmp_path):
    """And restore what one process saved, and the other way round.

    Although a disk of one of them fails once: both are told, nothing has changed, and both repeat the step.
    """
    first = prepare_records(tmp_path)
    expected = multiprocess_worker.records(tmp_path)
    pair = multiprocess_worker.make_pair(multiprocess_worker.LAMB)
    like = jzero.abstract_train_state(pair, config=multiprocess_worker.config(3), mesh=multiprocess_worker.mesh())
    with jzero.CheckpointManager(folder / "run") as manager:
        trained = multiprocess_worker.whole(manager.restore(like))
    for found in results:
        assert found["numbers"] == pytest.approx(expected["numbers"], rel=1e-5)
        assert found["restored"] == expected["restored"] == first
        assert found["trained"] == found["again"] == trained
        assert found["edited"] != found["trained"]
        assert "is not what was written there" in found["flipped"]
        assert not found["left"]


@of_run("rows")
def test_two_processes_read_rows_like_one(results, tmp_path):
    expected = multiprocess_worker.rows(tmp_path)
    for found in results:
        assert found == pytest.approx(expected, rel=1e-5)


def assert_worth_comparing_with(results):
    """The run in one process learns, sees its noise, and all that was asked for has happened."""
    steps, end = results["steps"], results["end"]
    assert steps["loss 1"] != pytest.approx(steps["loss 0"], rel=1e-2)
    params = multiprocess_worker.make_state(jax.random.key(0)).params
    without = float(multiprocess_states.loss_of(params, models.mlp_batch(multiprocess_worker.ROWS, seed=0)))
    assert steps["loss 0"] == pytest.approx(without, rel=0.1)
    assert steps["loss 0"] != pytest.approx(without, rel=1e-5)
    assert end["rows"] == multiprocess_worker.ROWS
    assert end["halved['layer_0']['kernel']"] == pytest.approx(end["params['layer_0']['kernel']"] / 2, rel=1e-6)


DISAGREEMENTS = {
    "stage": ["training state", "process 0: config: ZeroConfig(stage=2", "process 1: config: ZeroConfig(stage=3"],
    "values": ["initial values", "process 0: head: values", "[1.0, 1.0, 1.0]", "process 1: head: ", "[2.0, 2.0, 2.0]"],
    "key": ["the key", "process 0: rng: values", "process 1: rng: values"],
    "initialiser": ["the program", "process 0: %", "dense<3.000000e+00>", "process 1: %", "dense<4.000000e+00>"],
    "new value": ["new values", "process 0: head: values", "[0.0, 0.0, 0.0]", "[1.0, 1.0, 1.0]"],
    "learning rate": ["the program", "process 0: %", "dense<-1.000000e-01>", "dense<-1.100000e+00>"],
    "clip_norm": ["settings", "process 0: clip_norm=1.0", "process 1: clip_norm=2.0"],
    "limit": ["the memory that a step may take", "process 0: 1000000000 bytes", "process 1: 2000000000 bytes"],
    "rng": ["the batch", "process 0: rng: values", "process 1: rng: values"],
    "later": ["the batch", "process 0: batch['']: float32[16, 8]", "process 1: batch['']: float32[8, 8]"],
    "elsewhere": ["process 0: make_train_step(small_loss)", "process 1: make_eval_step(small_loss)"],
}


@of_run("disagree")
def test_processes_that_disagree_are_told_what_differs(results):
    first, second = results
    for name, parts in DISAGREEMENTS.items():
        assert first[name] == second[name], "all are told the same"
        for part in parts:
            assert part in first[name], (name, first[name])
        assert "body" not in first[name], "only what differs"
    assert "process 1: ValueError: not today" in first["failure"]
    assert second["failure"].startswith("not today")
    assert first["losses"] == second["losses"], "and those that agree go on"


@of_run("see_other_figures")
def test_processes_keep_what_fits_in_all_of_them(results):
    """Whichever finds out, and when: nobody waits, and all run one program."""
    first, second = results
    everything = str(jzero.Keep(params="all"))
    for name, remat in {
        "alike": everything,
        "little": "",
        "unreadable": "",
        "asks alone": everything,
        "compiled": "",
        "not compared": "",
        "inside": "",
        "both run out": "",
    }.items():
        assert first[name] == second[name] == [remat, pytest.approx(first["evaluated"])], name
    for found in results:
        assert found["one has begun"].startswith("RESOURCE_EXHAUSTED")
        assert "remat='cheap'" in found["one has begun"]


def first_state():
    return multiprocess_worker.sharded(multiprocess_worker.make_state(jax.random.key(0)), multiprocess_worker.config(1))


@of_run("checkpoints", lambda folder: jzero.save_checkpoint(folder / "from_one", first_state()))
def test_checkpoints_of_two_processes_and_of_one(results, folder):
    first, found = first_state(), results
    for process, results in enumerate(found):
        assert results["restored"] == multiprocess_worker.whole(first)
        assert results["restored"] != results["trained"]
        assert results["again"] == results["loaded"] == results["trained"] == found[0]["trained"]
        assert results["position"] == 20 + process, "each process goes on where it was"
        assert results["steps"] == [2, 3]
        assert "`extra/f` must hold arrays" in results["extra"], "also where nothing was wrong with it"
        assert "`extra/x` is spread over processes" in results["spread"]
        assert results["count"] == 3
        assert "could not be written" in results["nowhere"]
        assert "There is no checkpoint at" in results["missing"]
        assert results["missing"].startswith("Other processes failed") == (process == 0)
        assert results["went back to"] == 2
        assert "Step 2 was restored, since what is newer is damaged" in results["warning"]
        assert "ocdbt.process_1/d/" in results["warning"]
        for name in ("not shared", "not shared by managers"):
            assert "Process 1 does not see what process 0 writes to" in results[name]
            assert "must save to the same folder" in results[name]
        assert all(path.endswith(("host0/run", "host1/run")) for path in results["left there"])
    like = jzero.abstract_train_state(first, config=multiprocess_worker.config(2), mesh=multiprocess_worker.mesh())
    assert multiprocess_worker.whole(jzero.restore_checkpoint(folder / "kept", like)) == found[0]["trained"]
    with pytest.raises(ValueError, match=r"by 2 processes, .* are 1 now"):
        jzero.restore_checkpoint(folder / "kept", like, data_iterator=multiprocess_worker.Position(0))
    exported = load_file(folder / "exported.safetensors")
    for name, x in load_file(folder / "whole.safetensors").items():
        assert exported[name].tobytes() == x.astype(exported[name].dtype).tobytes()
        assert hashlib.sha256(x.tobytes()).hexdigest() == found[0]["trained"][name.replace(".", "/")]


SHAPES = {**{f"h.{i}.w": (40, 64) for i in range(3)}, **{f"h.{i}.uv": (64, 32) for i in range(3)}, "odd": (5, 19)}


def published_tensors():
    rng = np.random.default_rng(0)
    return {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}


@of_run("published", lambda folder: save_file(published_tensors(), folder / "model.safetensors"))
def test_two_processes_read_half_of_a_published_model_each(results, folder):
    tensors = published_tensors()
    stacks = {x: np.stack([tensors[f"h.{i}.{x}"] for i in range(3)]) for x in ("w", "uv")}
    expected = {
        "layers/w": stacks["w"].transpose(0, 2, 1),
        "layers/v": stacks["uv"][:, 40:].transpose(0, 2, 1),
        "layers/u": stacks["uv"][:, :40],
        "odd": tensors["odd"].T,
    }
    for found in results:
        digests = {path: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest() for path, x in expected.items()}
        assert {path: found["params"][path] for path in digests} == digests
        assert {name: found["rows"][name] for name in tensors if name != "odd"} == {
            name: shape[0] // 2 for name, shape in SHAPES.items() if name != "odd"
        }, "rows, each once, though the parameters are cut along the other dimension"
    again = load_file(folder / "again/model.safetensors")
    assert {name: x.tobytes() for name, x in again.items()} == {name: x.tobytes() for name, x in tensors.items()}


@of_run("train_first", data_worker.write_files)
def test_two_processes_share_files_and_one_goes_on(results, folder):
    data_results.assert_files_are_shared(results)
    data_results.assert_others_go_on(results, [data_worker.train_rest(folder)])


@of_run("preempted")
def test_sigterm_to_one_process_ends_both_at_the_same_step(results, folder):
    assert list(results) == [0, 0], "the status with which each process would end"
    first, last = jzero.CheckpointManager(folder).all_steps()
    assert first == 1
    assert last >= 20
    assert jzero.inspect_checkpoint(folder, verify=True).damaged == {}


@of_run("alone")
def test_a_process_that_is_alone_is_told_so(results, folder):
    told, other = results
    for name, where in (
        ("evaluates", "make_eval_step(small_loss); before that all processes were at"),
        ("saves", "save_checkpoint, which each must call"),
        ("saves with a manager", "CheckpointManager.save, which each must call"),
    ):
        assert "process 1 did not come within 0.5 s" in told[name]
        assert f"Process 0 is at {where}" in told[name]
    assert not (folder / "x").exists()
    assert "process 1 ended" in told["has ended"]
    (words,) = other["told"]
    assert words.endswith(told["saves with a manager"].partition(": ")[2])
    assert "may now wait for them for ever" in words
    assert "none of them under `if jax.process_index() == 0`" in words
    assert other["in a collective"] > 1, "in which it was told"


def test_a_process_that_dies_while_saving_loses_no_checkpoint(run):
    results, folder = run
    (first, _, errors), (second, _, _) = results["one_dies"]
    assert second == -signal.SIGKILL
    assert first != 0, errors
    state = multiprocess_worker.sharded(multiprocess_worker.make_pair(), multiprocess_worker.config(3))
    with jzero.CheckpointManager(folder / "one_dies") as manager:
        assert manager.all_steps() in ([1], [1, 2]), "the second one is complete or does not count"
        for step in manager.all_steps():
            restored = manager.restore(state, step=step)
            assert multiprocess_worker.whole(restored) == multiprocess_worker.whole(state)
        assert manager.save(state, step=3), "and nobody else holds the directory"
