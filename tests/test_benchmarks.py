"""Each benchmark tells its options at once, without jax, and (slow) runs at its least size."""

import functools
import shlex

import pytest

from tests.example_runs import ROOT, run_python

STORIES = ("families", "gpu", "torch_peers", "overhead", "checkpoints", "offload", "slow_links", "losses")
GPT = "--vocab 256 --width 64 --layers 2 --seq-len 16 --precision bf16 --only none optimizer"
TINY = {
    "torch_peers --rounds 1 --steps 2 --only 'stage 3'": "| jzero, stage 3 |",
    "overhead tracing --models mlp --repeats 1": "| mlp |",
    "overhead dispatch --repeats 1 --params 4": "| 1 | 14 | on one device |",
    "overhead agreement --layers 1": "\n| 1 | ",
    "checkpoints orbax --gigabytes 0.01 --rounds 1": "| odd | export of the checkpoint |",
    "checkpoints memory --gigabytes 0.01": '"run": "export state"',
    "checkpoints weights --gigabytes 0.02": '"run": "load plain", "process": 3',
    f"offload {GPT} --repeats 1": "plain device_put",
    "offload --disk FOLDER --gigabytes 0.02 --record-mebibytes 1 --repeats 1": "| pipeline with AdamW |",
    "losses integers --seeds 0 --steps 2 --only reduce=int8": "reduce=int8                mean",
    "losses late --seeds 0 --steps 2 --only delay=1": "delay=1                    mean",
}
COMPILED = {
    "families --family mlp --engine jzero plain half --optimizer muon": "| h200:8, mlp, half, 3, muon |",
    f"offload {GPT} --topology h200:8": "optimizer  ",
    "slow_links links --small --only 'two hops' --micro-batches 2": "| h200:16, 2, two hops |",
    "slow_links experts --small --topology h200:4 --only 2": "| h200:4, 1, 2 |",
    "slow_links contexts --small --topology h200:8 --only 'context 4'": "| h200:8, 1, context 4 |",
}
"""For accelerators that are not there; what writes a file prints it as a table, too."""


run = functools.partial(run_python, timeout=600)


@pytest.mark.parametrize("story", STORIES)
def test_help_is_there_before_jax_is(story):
    arguments = [
        "-c",
        "import runpy, sys; sys.modules['jax'] = None; runpy.run_module(sys.argv[1], run_name='__main__')",
    ]
    told = run(*arguments, f"benchmarks.{story}", "--help")
    assert told.startswith("usage: ")
    assert f"python -m benchmarks.{story}" in told


def test_every_story_runs_at_its_least_size_and_is_told():
    paths = [path for path in (ROOT / "benchmarks").glob("*.py") if "def main()" in path.read_text()]
    assert {path.stem for path in paths} | {"gpu"} == set(STORIES)  # of which tests/test_gpu_pack.py runs the last
    assert {command.split()[0] for command in (*TINY, *COMPILED)} | {"gpu"} == set(STORIES)
    told = (ROOT / "benchmarks" / "README.md").read_text()
    assert not [story for story in STORIES if f"\n| `python -m benchmarks.{story}" not in told]


@pytest.mark.slow
@pytest.mark.parametrize("command", TINY)
def test_a_story_at_its_least_size(command, tmp_path):
    story, *options = shlex.split(command.replace("FOLDER", str(tmp_path)))
    assert TINY[command] in run("-m", f"benchmarks.{story}", *options)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMPILED)
def test_a_compiled_story_at_its_least_size(command, tmp_path):
    pytest.importorskip("jax_plugins", reason="needs the extra `gpu`")
    story, *options = shlex.split(command)
    file = [] if story == "offload" else [f"--out={tmp_path / 'out'}"]
    printed = run("-m", f"benchmarks.{story}", *options, *file)
    if file:
        printed = run("-m", f"benchmarks.{story}", f"--table={tmp_path / 'out'}")
    assert COMPILED[command] in printed
