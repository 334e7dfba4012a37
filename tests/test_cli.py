"""The command line: numbers against independent values, JSON and nothing else, messages in place of tracebacks."""

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import jzero
from jzero import __main__ as main
from jzero.cli import terminal
from jzero.cli.terminal import messages
from tests import cli_models
from tests.cli_runs import data_of, fit_tries_little, folder, message_of, run, text_of  # noqa: F401  # fixtures

ROOT = pathlib.Path(__file__).parents[1]


def test_estimate_takes_deepspeeds_machine_from_the_topology(run):
    text = text_of(run("estimate --deepspeed --params 7B --topology h100:16"))
    assert "Setup with 2 nodes, 8 GPUs per node" in text
    assert "6738M total params, 131M largest layer" in text


def test_devices_have_one_name_and_keep_their_former_ones(run, folder):
    (folder / "ds_config.json").write_text('{"train_batch_size": 32}')
    for line, names in (
        ("estimate --params 20M --json", ("--devices", "--num-devices", "--cpu-devices")),
        ("deepspeed ds_config.json --json", ("--devices", "--num-devices")),
    ):
        assert [data_of(run(f"{line} {name} 16"))["num_devices"] for name in names] == [16] * len(names)


def test_plan_prints_the_table_of_this_machine(run):
    state = cli_models.concrete()[0]
    assert text_of(run("plan users:concrete --stage 1")).endswith(f"\n\n{jzero.plan_train_state(state, stage=1)}\n")


def test_analyze_ends_with_1_if_the_program_departs_from_the_plan(run, monkeypatch):
    analyze = jzero.analyze
    departs = lambda *args, **kwargs: dataclasses.replace(analyze(*args, **kwargs), violations=("a planted fault",))
    monkeypatch.setattr(jzero, "analyze", departs)
    result = run("analyze users:nnx_pair --json --verify")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["violations"] == ["a planted fault"]
    assert "departs from the plan:\n  a planted fault" in result.stderr
    assert run("analyze users:nnx_pair").exit_code == 0, "only if asked"


@pytest.mark.usefixtures("fit_tries_little")
def test_fit_compiles_for_this_machine(run):
    text = text_of(run("fit users:nnx_pair --hbm-bytes 1e9 --precision bf16"))
    assert "8 cpu devices: stage 0 fits" in text
    assert "(compiled)" in text


@pytest.mark.usefixtures("fit_tries_little")
def test_fit_ends_with_3_if_nothing_fits(run):
    result = run("fit users:nnx_pair --topology h200:8 --stage 3 --hbm-bytes 1000 --no-confirm")
    assert result.exit_code == 3
    assert "nothing fits. The least is stage 3" in result.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A manager's directory with two steps, and the state of the last."""
    params = {"layer": {"kernel": jax.numpy.arange(51.0).reshape(17, 3)}, "bias": jax.numpy.ones(7)}
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), stage=3)
    path = tmp_path_factory.mktemp("checkpoints") / "run"
    with jzero.CheckpointManager(path) as manager:
        for step in (3, 7):
            manager.save(state, step=step, extra={"note": "hello"})
    return path, params


def test_inspect(run, checkpoint):
    path, _ = checkpoint
    found = data_of(run(f"inspect {path} --json"))
    assert found["steps"] == [3, 7]
    assert found["directory"] == str(path / "7")
    assert found["num_bytes"] == 4 * (51 + 7 + 1)
    assert found["leaves"][-1] == {"path": "step", "dtype": "int32", "shape": [], "bytes": 4}
    assert (found["written_by"]["config"]["stage"], found["written_by"]["mesh"]) == (3, {"data": 8})
    assert (found["extra"], found["has_data_iterator"], found["damaged"]) == (["note"], False, None)
    text = text_of(run(f"inspect {path / '3'} --verify"))
    assert "params/layer/kernel  float32  [17, 3]  204 B" in text
    assert "3 leaves read, 0 damaged" in text
    assert "There is no checkpoint at nowhere" in message_of(run("inspect nowhere"))


def test_inspect_ends_with_1_if_a_leaf_is_damaged(run, tmp_path):
    params = {"kernel": jnp.arange(4096.0), "bias": jnp.ones(7)}
    jzero.save_checkpoint(
        tmp_path / "c", jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.identity()), stage=3)
    )
    part = np.arange(6, 9, dtype=np.float32).tobytes()
    (file,) = [path for path in (tmp_path / "c").rglob("d/*") if part in path.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(part)] ^= 4
    file.write_bytes(data)
    result = run(f"inspect {tmp_path / 'c'} --verify --json")
    assert result.exit_code == 1
    assert list(json.loads(result.stdout)["damaged"]) == ["params/kernel"]


def test_export(run, checkpoint, tmp_path):
    path, params = checkpoint
    found = data_of(run(f"export {path} {tmp_path / 'x.safetensors'} --dtype bfloat16 --json"))
    assert found == {"files": [str(tmp_path / "x.safetensors")], "num_tensors": 2, "num_bytes": 2 * 58}
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["layer.kernel"].tolist() == params["layer"]["kernel"].tolist()
    assert str(tensors["bias"].dtype) == "bfloat16"
    assert "2 tensors, 232 B" in text_of(run(f"export {path} {tmp_path / 'fp32.safetensors'}"))
    assert "never replaces files" in message_of(run(f"export {path} {tmp_path / 'x.safetensors'}"))
    assert "`--dtype` must be" in message_of(run(f"export {path} {tmp_path / 'y'} --dtype text"))


SMALL = """
import jax.numpy as jnp, optax, jzero
def model():
    state = jzero.TrainState.create(params={"w": jnp.ones((16, 9))}, tx=optax.sgd(0.1))
    return state, lambda params, batch: jnp.square(batch @ params["w"]).mean(), jnp.ones((8, 16))
"""


def test_as_a_process(folder):
    """With another number of devices than the tests have, from a directory that is not the package's."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    script = "import sys; sys.path.remove(''); from jzero.__main__ import main; main()"  # scripts have no '' there
    (folder / "small.py").write_text(SMALL)
    line = "analyze small:model --cpu-devices 4 --persistence-threshold 0 --json --verify"
    finished = subprocess.run(
        [sys.executable, "-c", script, *line.split()],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert (found["num_devices"], found["violations"]) == (4, [])


def test_without_typer_the_script_says_what_to_install(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert "pip install 'jzero[cli]'" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_of_the_guide_run(run, checkpoint, tmp_path):
    """Except that machines which are not there are left out where they compile, and what other files run as it is."""
    text = (ROOT / "docs/guides/command_line.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines() if line.startswith("jzero ")]
    commands = {"estimate", "plan", "analyze", "fit", "deepspeed", "export", "inspect", "doctor"}
    assert {line.split()[1] for line in lines} == commands
    elsewhere = {  # `tests/test_cli_commands.py` and `tests/test_memory_story.py`
        "jzero doctor",
        "jzero doctor --disk /local/scratch",
        "jzero fit --params 7B --topology h100:8 --precision bf16 --batch 8 --no-confirm",
    }
    lines = {line.strip() for line in lines}
    assert elsewhere < lines
    for line in sorted(lines - elsewhere):
        here = line.replace("checkpoints/run1", str(checkpoint[0])).replace("model.safetensors", str(tmp_path / "m"))
        here = here.replace("ds_config.json", str(ROOT / "tests/data/ds_configs/zero2_fp16.json"))
        here = here.removeprefix("jzero ").replace("my_model:tiny", "users:nnx_pair")
        here = re.sub(r" --topology \S+", "", here) if here.startswith("analyze") else here
        assert run(here).exit_code == 0, line


def test_a_terminal_shows_what_takes_long_as_long_as_it_does(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    log = logging.getLogger("jzero")
    with messages(traceback=False):
        log.info("Compiling %s.", "stage 3")
        log.warning("Something to keep.")
        sys.stdout.write("A module prints.\n")
    log.info("Nobody listens any more.")
    written = capsys.readouterr()
    assert not written.out
    text = re.sub(r"\x1b\[[^m]*m|\r", "", written.err.replace("\x1b[2K", "<erased>"))
    assert re.search(r". jzero: Compiling stage 3\. 0:00:00<erased>", text)
    assert "<erased>jzero: Something to keep.\n" in text
    assert "<erased>A module prints.\n" in text
    assert text.endswith("<erased>")
    assert "Nobody" not in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan users", r"`module:function`.*got 'users'"),
        ("plan :factory", r"`module:function`.*got ':factory'"),
        ("plan nowhere:factory", r"Module 'nowhere' was not found.*current directory"),
        ("plan users.inner:factory", r"'users\.inner'"),
        ("plan needs_more:model", r"'needs_more' cannot be imported: No module named 'a_package_that_is_not_there'"),
        ("plan no_python:model", r"'no_python' cannot be imported: SyntaxError"),
        ("plan users:nothing", r"`users:nothing` must be a function that takes no arguments: 'users' has no such name"),
        ("plan users:NOT_A_FUNCTION", r"takes no arguments: got int"),
        ("plan users:takes_one", r"takes no arguments: missing a required argument: 'size'"),
        ("plan users:raises", r"`users:raises` failed: KeyError: 'lost'"),
        ("plan users:leaves", r"`users:leaves` failed: SystemExit: usage"),
        ("plan users:two_values", r"must return `\(state, loss_fn, batch\)` or .*: got 2 values"),
        ("plan users:no_tuple", r"got NoneType"),
        ("plan users:no_loss", r"where `loss_fn` is a function: got str"),
        ("plan users:no_state", r"got dict.*TrainState\.create"),
        ("plan users:bad_maker", r"The state of `users:bad_maker` failed: ZeroDivisionError"),
        ("plan users:bad_maker_arguments", r"of one argument, a PRNG key: too many"),
        ("analyze users:uneven_batch", r"13"),
        ("analyze users:factory --accumulate-steps 3", r"16"),
        ("analyze users:factory --topology h300:8", r"'h300:8'.*GPUs: .*h200"),
        ("analyze users:factory --topology h200:9", r"'h200:9'"),
        ("analyze users:factory --topology h200:8 --cpu-devices 8", r"pass only one"),
        ("analyze users:factory --cpu-devices 3", r"jax_num_cpu_devices"),
        ("estimate", r"Pass one model.*got none"),
        ("plan", r"Pass one model.*got none"),
        ("fit users:factory --params 1e6", r"got MODULE:FUNCTION and --params"),
        ("estimate --deepspeed users:factory --largest-layer 1e6", r"`--largest-layer` requires `--params`"),
        ("estimate --params 1e9 --largest-layer 1e6", r"pass `--deepspeed`"),
        ("estimate --deepspeed --params 1e6 --largest-layer 2e6", r"`--largest-layer` must not exceed `--params`"),
        ("estimate --deepspeed --stage 0 --params 1e6", r"stages 1 to 3"),
        ("estimate --deepspeed --params 1e6 --stage 1 --num-nodes 0", r"`--num-nodes`.*got 0"),
    ],
)
def test_wrong_input_is_answered_with_a_message(run, line, says):
    found = message_of(run(f"{line} --json"))
    assert re.search(says, found, re.DOTALL), found
    assert "`--traceback`" in found


def test_an_error_of_a_users_loss_says_where(run, folder):
    (folder / "its_loss_fails.py").write_text(
        "import users\n\ndef model():\n    return users.factory()[0], lambda p, b: p['none'], users.factory()[2]\n"
    )
    found = message_of(run("analyze its_loss_fails:model"))
    assert "jzero: KeyError in its_loss_fails.py, line 4, `return users.factory()[0]," in found
    assert "`: 'none'.\n" in found


def test_traceback_is_there_for_those_who_ask(run):
    asked = run("plan users:raises --traceback")
    assert asked.exit_code == 2
    assert 'raise KeyError("lost")' in asked.stderr
    surprise = run("analyze users:bad_loss")
    assert surprise.exit_code == 2
    assert "KeyError in users.py, line" in surprise.stderr
    assert "Traceback (most recent call last)" not in surprise.stderr


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (["bin/jzero", "lib/site-packages/jzero/fit.py"], None),
        (["bin/jzero", "lib/site-packages/jzero/fit.py", "lib/site-packages/jax/api.py"], None),
        (["bin/jzero", "lib/site-packages/jzero/fit.py", "users.py", "lib/site-packages/jax/api.py"], "users.py"),
        (["bin/jzero", "lib/site-packages/jzero/fit.py", "users.py", "lib/site-packages/jzero/plan.py"], None),
        (["bin/jzero", "lib/site-packages/jzero/fit.py", "users.py", functools.__file__], "users.py"),
    ],
)
def test_errors_of_an_installed_jzero_are_not_the_users(monkeypatch, files, where):
    """The last frame that is jzero's or a user's decides, wherever jzero is installed."""
    monkeypatch.setattr(terminal, "JZERO", pathlib.Path("lib/site-packages/jzero"))
    namespace = {}
    for inner, file in zip([None, *reversed(files)], reversed(files), strict=False):
        body = "raise KeyError('lost')" if inner is None else "inner()"
        exec(compile(f"def call(inner=None): {body}", file, "exec"), namespace)
        namespace["call"].__defaults__ = (namespace.get("before"),)
        namespace["before"] = namespace["call"]
    with pytest.raises(KeyError) as raised:
        namespace["before"]()
    message = terminal._in_users_code(raised.value.with_traceback(raised.tb.tb_next))
    assert message is None if where is None else message.startswith(f"KeyError in {where}, line 1")


@pytest.fixture
def said(caplog):
    """Returns a function that returns what the log has got since the last call."""
    caplog.set_level(logging.INFO, "jzero")

    def messages():
        found = [x.getMessage() for x in caplog.records if x.name == "jzero"]
        caplog.clear()
        return found

    return messages


def make_state(key):
    return jzero.TrainState.create(params={"w": jax.random.normal(key, (64, 16))}, tx=optax.sgd(0.1))


def loss_fn(params, batch):
    return jnp.square(batch @ params["w"]).mean()


def test_from_a_state_to_files(said, tmp_path):
    state = jzero.init_train_state(make_state, jax.random.key(0), stage=2)
    assert said() == ["Tracing the function that makes the state.", "Making a state with 4.00 KiB on each device."]
    step = jzero.make_train_step(loss_fn, clip_norm=1.0)
    for rows in (8, 8, 8):
        state, _ = step(state, jnp.ones((rows, 64)))
    assert said() == ["Compiling make_train_step(loss_fn, clip_norm=1.0)."], "once"
    jzero.save_checkpoint(tmp_path / "saved", state)
    jzero.restore_checkpoint(tmp_path / "saved", state)
    assert said() == [f"Saving the state to {tmp_path / 'saved'}.", f"Restoring 4.00 KiB from {tmp_path / 'saved'}."]
    jzero.export_params(state, tmp_path / "x.safetensors")
    jzero.load_params(state, tmp_path / "x.safetensors")
    files = f"4.00 KiB to {tmp_path / 'x.safetensors'}", f"4.00 KiB of weights from {tmp_path / 'x.safetensors'}"
    assert said() == [f"Writing {files[0]}.", f"Reading {files[1]}."]
