"""Each option of a memory command changes what it says, or is known not to."""

import pytest
import typer

from jzero.cli.commands import app
from tests import cli_runs
from tests.cli_runs import data_of

run, folder = cli_runs.run, cli_runs.folder

BASE = {
    "--params": "175K",
    "--layers": "3",
    "--d-model": "56",
    "--heads": "4",
    "--kv-heads": "4",
    "--d-hidden": "96",
    "--vocab": "777",
    "--devices": "4",
    "--stage": "3",
    "--lora-rank": "2",
    "--persistence-threshold": "5000",
}
OTHER = [
    {"--layers": "5", "--params": "231K"},
    {"--d-model": "64", "--params": "204K"},
    {"--heads": "2", "--kv-heads": "2"},
    {"--kv-heads": "2"},
    {"--d-hidden": "97"},
    {"--vocab": "778"},
    {"--devices": "2"},
    {"--stage": "2"},
    {"--precision": "bf16"},
    {"--lora-rank": "3"},
    {"--quantize": "int8"},
    {"--context": "2"},
    {"--persistence-threshold": "10"},
    {"--topology": "h100:4", "--devices": None},
]
ELSEWHERE = {"model", "--model", "--json", "--traceback", "--deepspeed", "--largest-layer", "--num-gpus-per-node"}
ELSEWHERE |= {"--num-nodes", "--experts"}  # these have tests in `test_cli*.py`
OF_A_STEP = {"--batch", "--seq", "--loss-chunks"}  # without a step, shapes of a batch decide nothing


@pytest.mark.parametrize(
    ("command", "same"), [("plan", []), ("estimate", [{"--context": "2"}])], ids=["plan", "estimate"]
)  # states are cut over both axes, so that they take as much
def test_every_option_has_an_effect(command, same, run):
    said = []
    for other in [{}, *OTHER]:
        options = {name: value for name, value in {**BASE, **other}.items() if value is not None}
        said.append(data_of(run(f"{command} --json " + " ".join(f"{name} {value}" for name, value in options.items()))))
    assert [other for other, text in zip(OTHER, said[1:], strict=True) if text == said[0]] == same
    known = set(BASE).union(*OTHER) | ELSEWHERE | OF_A_STEP
    offered = {option.opts[0] for option in typer.main.get_command(app).commands[command].params}
    assert offered - known == set(), "give each new option another value here"
