"""What users import, how it is called, and the examples that they read: docstrings and README."""

import ast
import doctest
import functools
import importlib
import importlib.metadata
import inspect
import os
import pathlib
import pickle
import pkgutil
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

ROOT = pathlib.Path(__file__).parents[1]
NAMES = sorted(
    """
    AnalysisReport CheckpointError CheckpointInfo CheckpointManager Csv DeepSpeedReport DiskError DiskStats
    DynamicLossScale EquivalenceReport ExportReport Fit From JsonLines Keep LeafRule LossScaleError MLflow Mapping
    Max MemoryEstimate Min Monitor Offload PerExample PlanViolation Precision Quantization RestoreReport StepMemory
    Summed TensorBoard TrainState WandB Weighted ZenFlow ZeroConfig ZeroOptState ZeroPlan abstract_train_state
    analyze apply_pending check_equivalence disk_stats estimate_step_memory export_checkpoint export_params
    fill_memory fit from_deepspeed gather_params get_full_grad get_full_opt_state get_full_param init_train_state
    inspect_checkpoint load_params make_eval_step make_mesh make_train_step natural_params offload_activations
    offload_train_state plan_of plan_train_state release_disk reload_train_state restore_checkpoint save_checkpoint
    set_full_opt_state set_full_param shard_train_state unshard_train_state update_params value_and_grad
    """.split()
    + ["estimate_zero1_model_states_mem_needs"]
    + [f"estimate_zero{n}_model_states_mem_needs{how}" for n in (2, 3) for how in ("", "_all_cold", "_all_live")]
)
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(jzero, name, None))]


def modules():
    """Returns every module of the package."""
    names = [info.name for info in pkgutil.walk_packages(jzero.__path__, "jzero.")]
    return [jzero, *map(importlib.import_module, names)]


def doctests():
    """Returns every docstring with examples, once."""
    found = {}
    for module in modules():
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, module=module, globs={}):
            if test.examples:
                found[test.name] = test
    return found


DOCTESTS = doctests()


@pytest.mark.smoke
def test_names_are_those_of_the_contract():
    assert sorted(jzero.__all__) == NAMES
    assert jzero.__all__ == sorted(jzero.__all__)
    assert sorted(dir(jzero)) == sorted([*NAMES, "__version__"])
    loaded = {name for name, x in vars(jzero).items() if not name.startswith("_") and not inspect.ismodule(x)}
    assert loaded - {"Any"} == set(NAMES), "nothing else by accident"
    with pytest.raises(AttributeError, match="module 'jzero' has no attribute 'shard'"):
        jzero.shard  # noqa: B018


def test_the_core_names_one_tool():
    """The contracts of import-linter do not see modules that are imported by name."""
    top = pathlib.Path(jzero.__file__).parent
    tools = {path.stem for path in top.iterdir()} - {"core", "machines", "__init__", "__pycache__"}
    name = re.compile(rf'"jzero\.({"|".join(sorted(tools))})\b')
    found = {path.name: set(name.findall(path.read_text())) for path in (top / "core").rglob("*.py")}
    assert {file: rooms for file, rooms in found.items() if rooms} == {"adapter.py": {"integrations"}}


def test_type_checkers_see_every_name():
    lines = ast.parse(pathlib.Path(jzero.__file__).with_suffix(".pyi").read_text()).body
    imported = [name for line in lines if isinstance(line, ast.ImportFrom) for name in line.names]
    assert len(imported) == len(NAMES)
    assert all(name.name == name.asname for name in imported), "else it is private to the file"


def run_python(script, *args):
    """Runs a program that has not imported anything yet."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-W", "error", "-c", script, *args]
    finished = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=120
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


@pytest.mark.smoke
def test_importing_jzero_imports_nothing_else():
    others = "{name.partition('.')[0] for name in sys.modules} & {'jax', 'numpy', 'optax', 'flax', 'orbax', 'rich'}"
    assert run_python(f"import sys, jzero; print({others})") == "set()\n"
    assert run_python(f"import sys, jzero.cli.commands; print({others} - {{'rich'}})") == "set()\n"


PACKAGES_COME_LATER = """
import pickle, sys
opt_state = pickle.loads(bytes.fromhex(sys.argv[1]))  # from another program; nothing has called jzero
import jax, jax.numpy as jnp, optax, jzero
plain = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=optax.adam(1e-3))
state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=2, precision="bf16"))
step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
step.lower(state, jnp.ones((8, 8)))
assert "flax.nnx" not in sys.modules and "grain" not in sys.modules and not hasattr(jzero, "data")

from flax import nnx, serialization
assert sorted(serialization.to_state_dict(opt_state)) == sorted(serialization.to_state_dict(state.opt_state))
assert serialization.to_state_dict(state.opt_state)["masters"]["w"].dtype == jnp.float32
serialization.from_bytes(state.opt_state, serialization.to_bytes(state.opt_state))
model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
print(jzero.estimate_zero2_model_states_mem_needs_all_live(model, verbose=False).total_params)
pair = jzero.shard_train_state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)), stage=1)
print(jzero.plan_of(pair).config.stage)

sys.modules["grain"] = None
try:
    import jzero.data
except ImportError as error:
    assert "pip install 'jzero[data]'" in str(error), error
else:
    raise AssertionError("it was imported without Grain")
del sys.modules["grain"]
import jzero.data
for batch in jzero.data.make_loader([{"x": 1}] * 50, batch_size=8, num_epochs=None):
    break
batches = iter(jzero.data.make_loader([{"x": 1}] * 50, batch_size=8, num_epochs=None))
next(batches)
print(batch["x"].shape)
"""


@pytest.mark.slow
def test_packages_may_be_imported_after_jzero_is_used():
    """Flax and Grain; and the program ends although a thread of Grain's loads batches."""
    plain = jzero.TrainState.create(params={"w": np.ones((8, 8), np.float32)}, tx=optax.adam(1e-3))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=2, precision="bf16"))
    pickled = pickle.dumps(jax.device_get(state.opt_state))
    assert run_python(PACKAGES_COME_LATER, pickled.hex()) == "72\n1\n(8,)\n"


def test_version_is_that_of_the_package():
    assert jzero.__version__ == importlib.metadata.version("jzero")


# DeepSpeed's own arguments may be given by position, as there; the batches of `check_equivalence` say what they are;
# `analyze` takes what the function that it analyzes takes, `fill_memory` what the step does.
FREE = ("estimate_", "check_equivalence", "analyze", "fit", "fill")


def test_functions_take_keywords_only_after_the_second_argument():
    functions = {name: getattr(jzero, name) for name in FUNCTIONS if not name.startswith(FREE)}
    assert {"shard_train_state", "make_train_step", "value_and_grad", "make_mesh"} <= set(functions)
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        assert len(positional) <= 2, (name, positional)
        assert not any(p.kind is p.VAR_POSITIONAL for p in parameters), name


@pytest.mark.parametrize("name", NAMES)
def test_docstring_is_complete(name):
    thing = getattr(jzero, name)
    text = inspect.getdoc(thing)
    assert text, "has a docstring of its own"
    assert text == inspect.cleandoc(thing.__doc__), "not an inherited one"
    first = text.splitlines()[0]
    assert first.endswith("."), first
    assert "Example:" in text
    assert ">>> " in text.split("Example:")[1]
    if explained := re.search(r"^Takes the arguments of `(\w+)`", text, re.MULTILINE):
        text += inspect.getdoc(getattr(jzero, explained[1]))
    if inspect.isfunction(thing):
        takes = [p for p in inspect.signature(thing).parameters.values() if p.kind is not p.VAR_KEYWORD]
        assert "Args:" in text
        assert ("Returns:" in text) == (inspect.signature(thing).return_annotation != "None")
        for parameter in takes:
            assert re.search(rf"^  {parameter.name}: ", text, re.MULTILINE), parameter.name


def test_every_public_name_is_among_the_doctests():
    documented = {test.rsplit(".", 1)[-1] for test in DOCTESTS}
    assert set(NAMES) <= documented


ADAM = optax.adam(1e-3)


@functools.cache
def weights():
    return np.asarray(jax.random.normal(jax.random.key(0), (512, 512)))


def example_globals(test, tmp_path):
    """Returns what examples may use without making it."""
    found = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "jzero": jzero, "pathlib": pathlib, "tmp": tmp_path}
    if not any("state" in example.source for example in test.examples):
        return found
    plain_state = jzero.TrainState.create(params={"w": jnp.asarray(weights())}, tx=ADAM)
    return {**found, "plain_state": plain_state, "state": jzero.shard_train_state(plain_state, stage=3)}


NEEDS = {"jzero.monitor.trackers.WandB": ("wandb",), "jzero.monitor.trackers.MLflow": ("mlflow", "sqlalchemy")}
"""Packages that an example needs, and that the tests do not."""


@pytest.mark.parametrize("name", DOCTESTS)
def test_docstring_example(name, tmp_path):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    test = DOCTESTS[name]
    test.globs = example_globals(test, tmp_path)
    report = []
    with warnings.catch_warnings():
        if name in NEEDS:  # of those packages
            warnings.simplefilter("ignore")
        results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
    assert results.attempted > 0
    assert not results.failed, "".join(report)


def readme_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_readme_runs_from_top_to_bottom(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = readme_blocks("python")
    assert blocks
    namespace = {"__name__": "readme"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, python block {number}", "exec"), namespace)
    assert isinstance(jzero.plan_of(namespace["state"]), jzero.ZeroPlan)
    assert "ZeRO stage 3" in capsys.readouterr().out
