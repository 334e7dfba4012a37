"""Wrong input of the command line is answered with a message."""

import functools
import pathlib
import re

import pytest

from jzero.cli import terminal
from tests.cli_runs import folder, message_of, run  # noqa: F401  # fixtures


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
