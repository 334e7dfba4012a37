"""The example for many processes: launched here, by SLURM's variables, and what Kubernetes would be told."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
import yaml

from tests.example_runs import EXAMPLES, ROOT, environment, run_here

FOLDER = EXAMPLES / "multi_process"
SLURM_PORTS = range(61440, 65536)  # those that JAX derives from numbers of jobs
TINY = ("--width=32", "--batch-size=32")
TIME_LIMIT = 300  # seconds


def launch(*args: str, **variables: str) -> subprocess.Popen[str]:
    """Starts the launcher."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(FOLDER / "launch_local.py"), *args],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def signal_at(launcher: subprocess.Popen[str], *signals: tuple[str, int]) -> str:
    """Sends each signal when a line with its text appears, as terminals do; returns what else is printed."""
    assert launcher.stdout is not None
    for text, number in signals:
        seen = []
        for line in launcher.stdout:
            seen.append(line)
            if text in line:
                break
        else:
            raise AssertionError(f"{text!r} did not appear:\n" + "".join(seen))
        os.killpg(launcher.pid, number)
    return launcher.communicate(timeout=TIME_LIMIT)[0]


def losses(output: str) -> dict[int, float]:
    return {int(n): float(x) for n, x in re.findall(r"^(?:\[0\] )?step (\d+): loss (.*)$", output, re.MULTILINE)}


@pytest.mark.slow
def test_two_processes_are_stopped_and_go_on_under_slurm_like_one(tmp_path, monkeypatch, capsys):
    checkpoints = tmp_path / "checkpoints"
    launcher = launch("--", *TINY, "--steps=1000000", "--save-every=1000000", f"--checkpoints={checkpoints}")
    output = signal_at(launcher, ("step 10: loss", signal.SIGTERM))
    assert launcher.returncode == 75, output
    stopped = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    assert stopped >= 10

    last = stopped - stopped % 10 + 20
    status, output = run_slurm(tmp_path, FAKE_SRUN, f"--steps={last}", *TINY, CHECKPOINTS=str(checkpoints))
    assert status == 0, output
    for index in range(2):
        assert f"process {index} of 2: 4 of 8 devices" in output
        assert f"process {index} starts after step {stopped}" in output
        assert f"process {index} is done after step {last}" in output
    found = losses(output)
    assert list(found) == [last - 10, last]
    whole = (f"--steps={last}", "--save-every=1000000", f"--checkpoints={tmp_path / 'one'}")
    expected = losses(run_here("multi_process/train.py", *TINY, *whole, monkeypatch=monkeypatch, capsys=capsys))
    assert found[last] == pytest.approx(expected[last], rel=1e-4), "as if it had never been stopped, in one process"
    assert expected[last] < 0.95 * expected[10]  # after 30 steps at least, at which 0.91 is reached


def test_what_slurm_is_told_when_the_processes_end(tmp_path):
    script = (
        f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:])\nprint(os.environ['SLURM_JOB_ID'])\nsys.exit(%d)\n"
    )
    for code in (0, 1, 75, 137):
        status, output = run_slurm(tmp_path, script % code, "--steps=7", CHECKPOINTS="somewhere")
        assert status == code
        requeued = tmp_path / "requeued"
        assert requeued.exists() == (code == 75)
        if code == 75:
            assert requeued.read_text().split() == ["requeue", output.split()[-1]]
            requeued.unlink()
        arguments = ["--cluster", "--checkpoints", "somewhere", "--steps=7"]
        train = str(ROOT / "examples" / "multi_process" / "train.py")
        assert output.splitlines()[0] == str(["--wait=60", sys.executable, train, *arguments])


FAKE_SRUN = f"""\
#!{sys.executable}
# Starts two tasks on this machine, with the variables that SLURM sets; returns the highest status, as srun does.
import os, subprocess, sys

command = [x for i, x in enumerate(sys.argv[1:]) if not (i == 0 and x.startswith("--"))]
variables = lambda i: {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_STEP_NODELIST": "localhost"}}
tasks = [subprocess.Popen(command, env=os.environ | variables(i)) for i in range(int(os.environ["SLURM_NTASKS"]))]
sys.exit(max(task.wait() for task in tasks))
"""


def run_slurm(folder: pathlib.Path, srun: str, *args: str, **variables: str) -> tuple[int, str]:
    """Runs slurm.sh as SLURM does, with an `srun` of ours; returns its exit status and output."""
    tools = {"srun": srun, "scontrol": f'#!/bin/sh\necho "$@" > {folder}/requeued\n'}
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in tools.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": job_id(), "SLURM_NTASKS": "2", "SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": sys.executable}
    finished = subprocess.run(
        ["bash", str(FOLDER / "slurm.sh"), *args],
        env=environment(
            JAX_NUM_CPU_DEVICES="4", PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **job, **variables
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    return finished.returncode, finished.stdout


def job_id() -> str:
    """Returns a number of a job whose port is free."""
    for port in reversed(SLURM_PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return str(7 * len(SLURM_PORTS) + port - SLURM_PORTS[0])
    raise AssertionError("no port is free")


SCRIPT_HEAD = """\
import os, signal, sys, time

me, count = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])

def wait_for_all():
    open(f"{__file__}.{me}", "w").close()
    while not all(os.path.exists(f"{__file__}.{i}") for i in range(count)):
        time.sleep(0.01)
    if me == 0:
        print("all ready", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    """Makes a script for the launcher; `me` is the number of its process."""

    def make(body: str) -> pathlib.Path:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT_HEAD + textwrap.dedent(body))
        return path

    return make


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = launcher.communicate(timeout=TIME_LIMIT)
    return launcher.returncode, output


def test_launcher_tells_processes_apart(script):
    path = script("""
        print(me, os.environ["JAX_NUM_PROCESSES"], os.environ["JAX_NUM_CPU_DEVICES"], *sys.argv[1:])
        print(os.environ["JAX_COORDINATOR_ADDRESS"], file=sys.stderr)
    """)
    status, output = finish(launch("--processes=3", "--devices=2", f"--script={path}", "--", "--its=own", "x"))
    assert status == 0
    lines = sorted(output.splitlines())
    assert [line for line in lines if "--its" in line] == [f"[{i}] {i} 3 2 --its=own x" for i in range(3)]
    addresses = {line[4:] for line in lines if "localhost:" in line}
    assert len(addresses) == 1
    assert len(lines) == 6


def test_launcher_ends_all_when_one_fails_and_kills_what_does_not_end(script):
    path = script("""
        def end(*_):
            print("told to end", flush=True)
            if me == 0:
                sys.exit(0)

        signal.signal(signal.SIGTERM, end)
        wait_for_all()
        if me == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            time.sleep(100)
    """)
    status, output = finish(launch("--processes=3", "--grace-seconds=0.5", f"--script={path}"))
    assert status == 128 + signal.SIGUSR1
    assert sorted(line for line in output.splitlines() if "told" in line) == ["[0] told to end", "[2] told to end"]


def test_launcher_passes_ctrl_c_on_once(script):
    path = script("""
        came = []
        signal.signal(signal.SIGINT, lambda *_: came.append(1))
        wait_for_all()
        while not came:
            time.sleep(0.01)
        time.sleep(0.5)
        print("interrupted", len(came))
        sys.exit(4)
    """)
    launcher = launch(f"--script={path}")
    output = signal_at(launcher, ("all ready", signal.SIGINT))
    assert launcher.returncode == 4
    assert sorted(output.splitlines()) == ["[0] interrupted 1", "[1] interrupted 1"]


def test_second_ctrl_c_kills(script):
    path = script("""
        signal.signal(signal.SIGINT, lambda *_: print("not now", flush=True))
        wait_for_all()
        while True:
            time.sleep(100)
    """)
    launcher = launch(f"--script={path}")
    signal_at(launcher, ("all ready", signal.SIGINT), ("not now", signal.SIGINT))
    assert launcher.returncode == 128 + signal.SIGKILL


def manifests() -> dict[str, dict]:
    with (FOLDER / "jobset.yaml").open() as file:
        return {document["kind"]: document for document in yaml.safe_load_all(file)}


def test_jobset_starts_again_after_a_sigterm():
    jobset = manifests()["JobSet"]["spec"]
    (job,) = [workers["template"]["spec"] for workers in jobset["replicatedJobs"]]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "Kubernetes asks for it beside a podFailurePolicy"
    codes = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    names = {container["name"] for container in job["template"]["spec"]["containers"]}
    (stopped,) = re.findall(r"^STOPPED_EXIT_CODE = (\d+)", (FOLDER / "train.py").read_text(), re.MULTILINE)
    assert [(c["containerName"] in names, c["operator"], c["values"]) for c in codes] == [(True, "In", [int(stopped)])]
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"FailJob"}
    (rule,) = jobset["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
