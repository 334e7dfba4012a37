"""The README's road from a published model to a tuned one, to the letter, with a tiny model in place of that."""

import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import chat_data
import generate
from jzero.cli.commands import app
from tests import finetune_run, hf_models
from tests.byte_tokenizer import NUM_TOKENS, ByteTokenizer, tokenizer_of_transformers
from tests.example_runs import EXAMPLES, ROOT, environment

README = (ROOT / "README.md").read_text()
SECTION = README[README.index("## Fine-tune a published model") : README.index("## Use it")]
(COMMANDS,), (LINE,) = (re.findall(rf"^```{name}\n(.*?)^```$", SECTION, re.M | re.S) for name in ("bash", "json"))
INSTALL, DOWNLOAD, ESTIMATE, FINETUNE, GENERATE = COMMANDS.splitlines()
FOLDER = shlex.split(DOWNLOAD)[-1]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a tiny model under the name of the published one, the examples, and the README's line of data."""
    vocab_size = NUM_TOKENS + 1  # tokenizers of Qwen have one more
    hf_models.write_folder(tmp_path / FOLDER, "qwen2", vocab_size=vocab_size, hidden_size=48, num_hidden_layers=1)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "chats.jsonl").write_text(LINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_command_of_the_road_is_understood(home):
    pip = re.findall(r"python3\.11 -m venv \.venv && \.venv/bin/pip install -e '\.\[[a-z,]+\]' && ", README)
    assert len(pip) == README.count("pip install -e") == 3, "the same way in each block"
    assert f"{pip[-1]}source .venv/bin/activate" == INSTALL
    assert re.fullmatch(rf"hf download [\w-]+/{re.escape(FOLDER)} --local-dir {re.escape(FOLDER)}", DOWNLOAD)
    result = CliRunner().invoke(app, shlex.split(ESTIMATE)[1:])
    assert result.exit_code == 0, result.output
    assert ", 0% of the others stored as int8\n" in result.stdout, "none of so small a model"
    program, script, *options = shlex.split(FINETUNE)
    assert (program, script) == ("python", "examples/llm/finetune.py")
    args = finetune_run.finetune.parse_args(options)
    (example,), _ = chat_data.read_examples(args.data, ByteTokenizer(), max_tokens=args.seq + 1)
    assert example.learned.any()
    (home / args.out).symlink_to(home / FOLDER)
    program, script, *options = shlex.split(GENERATE)
    assert (program, script) == ("python", "examples/llm/generate.py")
    assert generate.parse_args(options).prompt == ["Why is the sky blue?"]


@pytest.mark.slow
def test_the_road_runs_to_the_letter(home):
    """Only the download is another: a program `hf` that puts the tiny model where it is told to."""
    tokenizer_of_transformers().save_pretrained(home / FOLDER)
    (home / FOLDER).rename(home / "hub")
    programs = {"python": "", "jzero": "-m jzero"}
    scripts = {name: f'exec "{sys.executable}" {module} "$@"' for name, module in programs.items()}
    scripts["hf"] = f'test "$1 $3" = "download --local-dir" && cp -r "{home / "hub"}" "$4"'
    (home / "bin").mkdir()
    for name, line in scripts.items():
        file = home / "bin" / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    lines = "\n".join(["set -e", DOWNLOAD, ESTIMATE, FINETUNE, GENERATE])
    how = {"env": environment(PATH=path), "capture_output": True, "text": True, "timeout": 500}
    ended = subprocess.run(["bash", "-c", lines], cwd=home, check=False, **how)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 examples (0 of them cut), 0 dropped" in ended.stdout
    assert "all else is copied from" in ended.stdout
    assert "\n--- Why is the sky blue?\n" in ended.stdout
    assert (pathlib.Path("tuned") / "model.safetensors").exists()
