"""The command line: numbers against independent values, JSON and nothing else, messages in place of tracebacks."""

import dataclasses
import importlib.util
import json
import logging
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax
import optax
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import jzero
from jzero import __main__ as main
from jzero.analysis import topologies
from jzero.checkpoint.contents import sign
from jzero.cli import doctor
from jzero.cli.commands import app
from jzero.cli.disk_report import examine_disk
from jzero.cli.terminal import messages
from tests import cli_models
from tests.estimator_models import ZERO2_T5_3B_COLD, ZERO3_T5_3B_COLD

ROOT = pathlib.Path(__file__).parents[1]
LAYERS, WIDTH, PSI = cli_models.LAYERS, cli_models.WIDTH, cli_models.PARAMS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a user's modules."""
    path = tmp_path_factory.mktemp("user")
    (path / "users.py").write_text(pathlib.Path(cli_models.__file__).read_text())
    (path / "needs_more.py").write_text("import a_package_that_is_not_there")
    (path / "no_python.py").write_text("def")
    return path


@pytest.fixture
def run(folder, monkeypatch):
    """Returns a function that runs a command line in that directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "users", raising=False)

    def call(line):
        return CliRunner().invoke(app, shlex.split(line))

    return call


def text_of(result):
    assert result.exit_code == 0, result.output
    return result.stdout


def data_of(result):
    return json.loads(text_of(result))


def message_of(result):
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr


# estimate


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "table"), [("--stage 3 --largest-layer 32e6", ZERO3_T5_3B_COLD), ("--stage 2", ZERO2_T5_3B_COLD)]
)
def test_estimate_prints_deepspeeds_table(run, options, table):
    found = text_of(run(f"estimate --deepspeed --params 2851e6 --num-gpus-per-node 8 {options}"))
    assert found.strip() == table.strip()


def test_estimate_as_json(run):
    p, n = 10**6, 4  # documented: 4P + 16P/N on the device; 1.5 · 4N·P and 1.5 · max(4N, 16)·P on the host
    found = data_of(run("estimate --deepspeed --params 1e6 --stage 2 --num-gpus-per-node 4 --json"))
    assert [(row["options"], row["gpu_bytes"], row["cpu_bytes"]) for row in found["rows"]] == [
        ("offload_optimizer=cpu", 2 * p, 24 * p),
        ("offload_optimizer=none", 4 * p + 16 * p // n, 24 * p),
    ]
    assert (found["stage"], found["total_params"], found["largest_layer_params"]) == (2, p, None)
    newer = data_of(
        run("estimate --deepspeed --params 1e6 --stage 2 --num-gpus-per-node 4 --formulas deepspeed-0.19 --json")
    )
    assert newer["rows"][1]["gpu_bytes"] == 2 * p + 18 * p // n
    wide = data_of(run("estimate --deepspeed --params 1e6 --stage 1 --num-nodes 2 --additional-buffer-factor 2 --json"))
    assert wide["rows"][1] == {
        "cpu_bytes": 2 * 4 * p,
        "gpu_bytes": 4 * p + 12 * p // 2,
        "cpu_offload": False,
        "cpu_offload_params": None,
        "zero_init": None,
        "options": "offload_optimizer=none",
    }


@pytest.mark.parametrize("function", ["factory", "concrete"])
def test_estimate_counts_a_model(run, function):
    found = data_of(run(f"estimate --deepspeed users:{function} --num-gpus-per-node 2 --json"))
    assert (found["total_params"], found["largest_layer_params"]) == (PSI, PSI // LAYERS)
    last = found["rows"][-1]
    assert last["gpu_bytes"] == 18 * PSI // 2 + 4 * PSI // LAYERS
    assert data_of(run(f"estimate users:{function} --devices 2 --json"))["deepspeed_bytes"] == last["gpu_bytes"]


def test_estimate_takes_deepspeeds_machine_from_the_topology(run):
    text = text_of(run("estimate --deepspeed --params 7B --topology h100:16"))
    assert "Setup with 2 nodes, 8 GPUs per node" in text
    assert "6738M total params, 131M largest layer" in text


# plan


def test_plan_as_json(run):
    found = data_of(run("plan users:factory --devices 32 --json"))
    assert found["mesh"] == {"data": 32}
    assert (found["stage"], found["num_shards"]) == (3, 32)
    share = 4 * PSI // 32
    expected = {"params": share, "grads": share, "opt_state": 2 * share + 4, "total": 4 * share + 4}
    assert found["bytes_per_device"] == expected
    assert found["bytes_replicated"]["total"] == 16 * PSI + 4
    assert found["gathered_bytes"] == 2 * 4 * PSI
    (down, up) = found["parameters"]
    assert (up["path"], up["shape"], up["dtype"], up["padding"]) == ("up", [LAYERS, WIDTH, 4 * WIDTH], "float32", 0)
    assert up["spec"] in ([None, "data"], [None, None, "data"]), "never the scanned dimension"
    assert down["stored_shape"] == down["shape"] == [LAYERS, 4 * WIDTH, WIDTH]
    whole = {(leaf["term"], leaf["path"]): leaf for leaf in found["replicated"]}
    assert set(whole) == {("opt_state", "0/count"), ("other", "step")}
    assert all(leaf["reason"] == "scalar" and leaf["num_bytes"] == 4 for leaf in whole.values())


def test_plan_options(run):
    found = data_of(run("plan users:abstract --stage 2 --precision bf16 --devices 8 --json"))
    per_device = found["bytes_per_device"]
    assert (per_device["params"], per_device["grads"]) == (2 * PSI, 2 * PSI // 8)
    assert per_device["opt_state"] == pytest.approx(12 * PSI // 8, abs=16)  # and counters
    assert {row["dtype"] for row in found["parameters"]} == {row["compute_dtype"] for row in found["parameters"]}
    kept = data_of(run("plan users:odd --devices 8 --json"))
    assert {(leaf["term"], leaf["path"]) for leaf in kept["replicated"]} >= {("params", "kernel"), ("params", "bias")}
    cut = data_of(run("plan users:odd --devices 8 --persistence-threshold 0 --json"))
    rows = {row["path"]: row for row in cut["parameters"]}
    assert (rows["kernel"]["stored_shape"], rows["kernel"]["padding"]) == ([40, 11], 3 * 11)
    assert cut["bytes_per_device"]["params"] == 4 * (40 * 11 + 16) // 8


def test_plan_prints_the_table_of_this_machine(run):
    state = cli_models.concrete()[0]
    assert text_of(run("plan users:concrete --stage 1")).endswith(f"\n\n{jzero.plan_train_state(state, stage=1)}\n")


def test_plan_of_an_nnx_pair_that_is_made_from_a_key(run):
    found = data_of(run("plan users:nnx_pair --devices 8 --persistence-threshold 0 --json"))
    assert [(row["path"], row["shape"]) for row in found["parameters"]] == [("kernel", [WIDTH, 4 * WIDTH])]
    assert found["bytes_per_device"]["params"] == WIDTH * 4 * WIDTH * 4 // 8


# analyze


def test_analyze_as_json(run, tmp_path):
    path = tmp_path / "report.svg"
    result = run(f"analyze users:factory --json --verify --figure {path}")
    found = data_of(result)
    assert found["communication_elements"] == pytest.approx(3 * PSI, rel=0.02)
    assert (found["num_devices"], found["plan"]["stage"], found["violations"]) == (8, 3, [])
    state, batch = 3 * 4 * PSI // 8 + 8, cli_models.BATCH * WIDTH * 4 // 8
    assert found["memory"]["arguments"] == pytest.approx(state + batch, rel=0.01)
    assert path.read_bytes().startswith(b"<?xml")
    assert "a module that prints" in result.stderr


def test_analyze_options(run):
    found = text_of(run("analyze users:with_rng --stage 1 --accumulate-steps 2 --precision bf16 --cpu-devices 8"))
    assert "ZeRO stage 1 over 8" in found
    assert f"2.00 × {PSI:,} parameters" in found


def test_analyze_with_and_without_remat(run):
    """What is kept of a layer: its input; by default its product, too; else hyperbolic tangents t and, as jax has it,
    1 - t.
    """
    kept = [data_of(run(f"analyze users:factory {option} --json"))["reckoned"]["activation_bytes"]
            for option in ("--remat", "--no-remat", "")]  # fmt: skip
    rows, last = cli_models.BATCH // 8, 4 * WIDTH * cli_models.BATCH // 8
    assert kept[0] == pytest.approx(4 * rows * LAYERS * WIDTH + last, abs=8)
    assert kept[1] == pytest.approx(4 * rows * LAYERS * (WIDTH + 2 * 4 * WIDTH) + last, abs=8)
    assert kept[2] == pytest.approx(4 * rows * LAYERS * (WIDTH + 4 * WIDTH) + last, abs=8)


def test_analyze_of_an_nnx_pair_that_is_made_from_a_key(run):
    found = data_of(run("analyze users:nnx_pair --stage 2 --json"))
    assert found["communication_elements"] == pytest.approx(2 * WIDTH * 4 * WIDTH, rel=0.02)


def test_analyze_ends_with_1_if_the_program_departs_from_the_plan(run, monkeypatch):
    analyze = jzero.analyze
    departs = lambda *args, **kwargs: dataclasses.replace(analyze(*args, **kwargs), violations=("a planted fault",))
    monkeypatch.setattr(jzero, "analyze", departs)
    result = run("analyze users:nnx_pair --json --verify")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["violations"] == ["a planted fault"]
    assert "departs from the plan:\n  a planted fault" in result.stderr
    assert run("analyze users:nnx_pair").exit_code == 0, "only if asked"


# fit


def test_fit_as_json(run):
    """16Ψ bytes of states at stage 0 do not fit into 10Ψ; cut over 8 devices they do."""
    found = data_of(run(f"fit users:factory --topology h200:8 --hbm-bytes {10 * PSI} --no-confirm --json"))
    assert found["limit"] == 10 * PSI
    assert found["chosen"]["verdict"] == "chosen"
    assert found["chosen"]["stage"] > 0
    whole = next(x for x in found["tried"] if x["stage"] == 0)
    assert whole["reckoned_peak"] > 12 * PSI
    assert whole["verdict"].endswith("too much")
    assert found["notes"][0] == "Nothing was compiled: the figures are reckoned."


def test_fit_compares_host_memory_if_asked(run):
    """Adam's moments take 8 bytes per parameter; at stage 0 each of eight devices has them on its host, whole."""
    command = "fit users:factory --topology h200:8 --hbm-bytes 1e9 --no-confirm --offload --host-bytes"
    text = text_of(run(f"{command} 1e9"))
    header = next(line for line in text.splitlines() if line.startswith("stage"))
    assert header.split()[-2:] == ["host", "verdict"]
    assert "s for the host" in text
    found = data_of(run(f"{command} {32 * PSI} --json"))["tried"]
    assert {x["stage"]: x["host_bytes"] for x in found if x["host_bytes"]}[0] == 8 * PSI
    assert {x["stage"] for x in found if x["verdict"].endswith("too much for the host")} == {0}


def test_fit_compiles_for_this_machine(run):
    text = text_of(run("fit users:factory --hbm-bytes 1e9 --precision bf16"))
    assert "8 cpu devices: stage 0 fits" in text
    assert "(compiled)" in text


def test_fit_ends_with_1_if_nothing_fits(run):
    result = run(f"fit users:factory --topology h200:8 --hbm-bytes {PSI} --no-confirm")
    assert result.exit_code == 1
    assert "nothing fits. The least is stage 3" in result.stdout


def test_fit_without_the_compiler_says_so(run, monkeypatch):
    monkeypatch.setattr(topologies, "missing_compiler", lambda kind: f"no {kind} compiler")
    topologies._devices.cache_clear()
    found = data_of(run("fit users:factory --topology h200:8 --json"))
    assert found["chosen"]["compiled_peak"] is None
    assert "Nothing was compiled" in found["notes"][0]
    assert "no gpu compiler" in found["notes"][0]


# deepspeed


DS_CONFIG = {"train_batch_size": 32, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}


def test_deepspeed_prints_the_verdicts(run, folder):
    (folder / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    found = data_of(run("deepspeed ds_config.json --num-devices 4 --json"))
    assert (found["train_batch_size"], found["micro_batch_size"], found["accumulate_steps"]) == (32, 4, 2)
    assert {row["key"]: row["verdict"] for row in found["rows"]} == dict.fromkeys(
        ("train_batch_size", "gradient_accumulation_steps", "zero_optimization.stage", "gradient_clipping"), "honoured"
    )
    assert text_of(run("deepspeed ds_config.json")).startswith("DeepSpeed configuration: 0 refused, 4 honoured")


def test_deepspeed_ends_with_1_if_a_key_is_refused(run, folder):
    (folder / "ds_config.json").write_text(json.dumps({**DS_CONFIG, "gradient_allreduce_op": "sum"}))
    result = run("deepspeed ds_config.json --json")
    assert result.exit_code == 1
    assert not result.stderr
    refused = [row["key"] for row in json.loads(result.stdout)["rows"] if row["verdict"] == "refused"]
    assert refused == ["gradient_allreduce_op"]


def test_deepspeed_ends_with_1_if_a_key_is_left_open(run, folder):
    """Unless `--set`, which once was `--auto`, decides it."""
    config = {**DS_CONFIG, "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    (folder / "ds_config.json").write_text(json.dumps(config))
    result = run("deepspeed ds_config.json --json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["open"] == ["bf16.enabled", "optimizer.params.lr"]
    for flag in ("--set", "--auto"):
        found = data_of(run(f"deepspeed ds_config.json {flag} learning_rate=2e-4 {flag} bf16=true --json"))
        assert (found["open"], found["has_optimizer"]) == ([], True)
    found = data_of(run("deepspeed ds_config.json --set optimizer.params.lr=2e-4 --precision bf16 --json"))
    assert (found["open"], found["has_optimizer"]) == ([], True)
    assert "`--set` takes KEY=VALUE" in message_of(run("deepspeed ds_config.json --set bf16"))
    shown = run("deepspeed ds_config.json").stdout
    assert "optimizer.params.lr (learning_rate)" in shown
    assert "in `--set`, by its key" in shown


def test_deepspeed_sets_keys_that_the_configuration_has_or_lacks(run, folder):
    zero = {"stage": 3, "stage3_param_persistence_threshold": "auto", "reduce_bucket_size": 10}
    (folder / "ds_config.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    sets = {
        "zero_optimization.param_persistence_threshold": 7,  # which the file has by its old name
        "zero_optimization.reduce_bucket_size": 20,
        "gradient_clipping": 0.5,
        "optimizer.type": "sgd",
    }
    options = " ".join(f"--set {name}={value}" for name, value in sets.items())
    found = data_of(run(f"deepspeed ds_config.json --batch-size 64 --num-devices 8 {options} --json"))
    assert (found["train_batch_size"], found["micro_batch_size"], found["clip_norm"]) == (64, 8, 0.5)
    values = {row["key"]: row["value"] for row in found["rows"]}
    assert values["zero_optimization.stage3_param_persistence_threshold"] == 7
    assert values.items() > {name: value for name, value in sets.items() if "persistence" not in name}.items()
    for name, says in (("gradient_cliping", "Did you mean `gradient_clipping`"), ("x", "Write keys with dots")):
        assert says in message_of(run(f"deepspeed ds_config.json --set {name}=1"))
    contradiction = message_of(run("deepspeed ds_config.json --set train_batch_size=8 --batch-size 64"))
    assert contradiction.startswith("jzero: `--batch-size 64` contradicts `train_batch_size` (8)")


def test_deepspeed_sets_what_a_trainer_names(run, folder):
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    (folder / "ds_config.json").write_text(json.dumps({"optimizer": adam, "fp16": {"enabled": True}}))
    sets = ("learning_rate=2e-5", "adam_beta1=0.8", "bf16=true", "per_device_train_batch_size=4", "max_grad_norm=0.5")
    found = data_of(run(f"deepspeed ds_config.json {' '.join(f'--set {x}' for x in sets)} --json"))
    assert {row["key"]: row["value"] for row in found["rows"]} == {
        "optimizer.type": "AdamW",
        "optimizer.params.lr": 2e-5,
        "optimizer.params.betas": [0.8, 0.95],
        "fp16.enabled": False,
        "bf16.enabled": True,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
    }


def test_deepspeed_says_where_the_batch_would_come_from(run, folder):
    for config, says in (
        ({}, "batch: not in the file: pass `--batch-size`"),
        ({"train_micro_batch_size_per_gpu": 4}, "micro-batches x ? devices, with `--num-devices` for the rest"),
        ({"train_batch_size": "auto"}, "batch: open"),
    ):
        (folder / "ds_config.json").write_text(json.dumps(config))
        assert says in run("deepspeed ds_config.json").stdout


ACCELERATE = """
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: cpu
  offload_param_device: none
  offload_param_nvme_path: none
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
"""


def test_deepspeed_reads_accelerates_yaml(run, folder):
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    found = data_of(run("deepspeed accelerate.yaml --set per_device_train_batch_size=2 --json"))
    assert (found["train_batch_size"], found["num_devices"], found["accumulate_steps"]) == (64, 8, 4)
    values = {row["key"]: row["value"] for row in found["rows"]}
    assert (values["zero_optimization.stage"], values["bf16.enabled"]) == (3, True)
    assert values["zero_optimization.offload_optimizer.device"] == "cpu"
    assert json.loads(run("deepspeed accelerate.yaml --json").stdout)["open"] == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ]
    (folder / "ds_config.json").write_text(json.dumps({**DS_CONFIG, "fp16": {"enabled": "auto"}}))
    (folder / "accelerate.yaml").write_text(
        "deepspeed_config: {deepspeed_config_file: ds_config.json}\nnum_processes: 4\nmixed_precision: fp16"
    )
    found = data_of(run("deepspeed accelerate.yaml --json"))
    assert (found["train_batch_size"], found["micro_batch_size"], found["open"]) == (32, 4, [])
    for text, says in (
        ("deepspeed: ds_config.json", "names 'ds_config.json', so pass that file"),
        ("fsdp_config: {}", "with a block `deepspeed_config`: got ['fsdp_config']"),
        ("deepspeed_config: {zero_stag: 3}", "['zero_stag'], which Accelerate does not know"),
        ("deepspeed_config: 3", "must be a block of keys: got 3"),
        ("a: [", "must be YAML"),
    ):
        (folder / "accelerate.yaml").write_text(text)
        assert says in message_of(run("deepspeed accelerate.yaml"))


def test_deepspeed_says_what_it_cannot_read(run, folder):
    (folder / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stag": 2}}))
    assert "Did you mean `stage`?" in message_of(run("deepspeed ds_config.json"))
    assert "none.json" in message_of(run("deepspeed none.json"))


# export, inspect


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
    assert "3 leaves read, 3 compared with checksums, 0 damaged" in text
    assert "There is no checkpoint at nowhere" in message_of(run("inspect nowhere"))


def test_inspect_ends_with_1_if_a_leaf_is_damaged(run, checkpoint, tmp_path):
    shutil.copytree(checkpoint[0], tmp_path / "run")
    notes = tmp_path / "run" / "7" / "jzero" / "metadata"
    held = json.loads(notes.read_text())
    held["checksums"]["params/bias"] += 1
    del held["digest"]
    notes.write_text(json.dumps(sign(held)))
    result = run(f"inspect {tmp_path / 'run'} --verify --json")
    assert result.exit_code == 1
    assert list(json.loads(result.stdout)["damaged"]) == ["params/bias"]


def test_export(run, checkpoint, tmp_path):
    path, params = checkpoint
    found = data_of(run(f"export {path} {tmp_path / 'x.safetensors'} --dtype bfloat16 --json"))
    assert found == {"files": [str(tmp_path / "x.safetensors")], "num_tensors": 2, "num_bytes": 2 * 58}
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["layer.kernel"].tolist() == params["layer"]["kernel"].tolist()
    assert str(tensors["bias"].dtype) == "bfloat16"
    assert "2 tensors, 232 B" in text_of(run(f"export {path} {tmp_path / 'many'} --max-file-bytes 100"))
    assert len(list((tmp_path / "many").iterdir())) == 3
    assert "never replaces files" in message_of(run(f"export {path} {tmp_path / 'x.safetensors'}"))
    assert "`--dtype` must be" in message_of(run(f"export {path} {tmp_path / 'y'} --dtype text"))


# doctor


def test_doctor(run):
    found = data_of(run("doctor --json"))
    assert found["ok"]
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(found["versions"]) == {"python", "jzero", *"jax jaxlib flax optax orbax-checkpoint numpy".split()}
    (group,) = found["devices"]
    assert (group["count"], group["platform"]) == (8, "cpu")
    assert group["default_memory"] in group["memory_kinds"]
    assert {check["name"]: check["status"] for check in found["checks"]} == dict.fromkeys(
        ("devices", "collectives", "donation", "host memory", "train step", "offload", "update on the host"), "ok"
    )
    assert set(found["compilers"]) == {"gpu", "tpu"}


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def test_doctor_ends_with_1_if_a_reduction_is_wrong(run, monkeypatch):
    monkeypatch.setattr(jax.lax, "psum_scatter", doubled(jax.lax.psum_scatter))
    result = run("doctor --json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"]
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["collectives"]["status"] == "failed"
    assert "reduce-scatter over 8 devices" in checks["collectives"]["detail"]
    assert checks["train step"]["status"] == "failed"
    assert "deviates" in checks["train step"]["detail"]
    assert checks["donation"]["status"] == "ok", "the others go on"


def check_of(name):
    return doctor._run(name, lambda: doctor.CHECKS[name](jzero.make_mesh()))


def test_doctor_finds_lost_donation(monkeypatch):
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn, donate_argnums=None: jit(fn))
    found = check_of("donation")
    assert found.status == "failed"
    assert re.match(r"0 of \d+ donated bytes per device are reused, and the argument still exists", found.detail)


def test_doctor_finds_host_memory_that_does_not_keep_what_it_is_given(monkeypatch):
    device_put = jax.device_put
    flaw = lambda x, to: device_put(x * 2 if to.memory_kind == "pinned_host" else x, to)
    monkeypatch.setattr(jax, "device_put", flaw)
    assert check_of("host memory").status == "failed"
    stays = lambda x, to: device_put(x, to.with_memory_kind("device"))
    monkeypatch.setattr(jax, "device_put", stays)
    assert "is in device" in check_of("host memory").detail


def test_doctor_says_what_is_not_available(monkeypatch):
    alone = jzero.make_mesh(devices=jax.devices()[:1])
    check_all = lambda: [doctor._run(name, lambda check=check: check(alone)) for name, check in doctor.CHECKS.items()]
    with pytest.warns(UserWarning, match="one device"):
        found = check_all()
    assert [check.status for check in found] == ["not available", *["ok"] * 5]
    assert "nothing is partitioned" in found[-1].detail
    monkeypatch.setattr(doctor, "HOST", "a_memory")
    without = check_of("host memory")
    assert (without.status, "pinned_host" in without.detail) == ("not available", True)


def test_doctor_goes_on_where_there_are_no_devices(run, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setattr(jax, "devices", fail)
    result = run("doctor")
    assert result.exit_code == 1
    assert re.search(r"devices +failed +RuntimeError: Unable to initialize", result.stdout)


def test_doctor_names_missing_compilers(monkeypatch, run):
    monkeypatch.setattr(topologies, "_is_installed", lambda package: False)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(doctor, "CHECKS", {})
    text = text_of(run("doctor"))
    assert "pip install 'jzero[gpu]'" in text
    assert "pip install 'jzero[tpu]'" in text
    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu.so")
    assert data_of(run("doctor --json"))["compilers"]["tpu"] is None


@pytest.fixture
def no_checks(monkeypatch):
    """`doctor` runs no checks on devices."""
    monkeypatch.setattr(doctor, "CHECKS", {})


@pytest.mark.usefixtures("no_checks")
def test_doctor_measures_a_disk(run, tmp_path):
    found = data_of(run(f"doctor --disk {tmp_path} --disk-bytes 3e6 --json"))["disk"]
    assert found["folder"] == str(tmp_path)
    assert found["free_bytes"] > 3e6
    rates = found["rates"]
    assert rates["num_bytes"] == 1_500_000 // 4096 * 4096
    assert min(rates["read"], rates["write"], rates["duplex"]) > 0
    # 12 bytes of fp32 master, mean and variance travel in each direction.
    assert found["seconds_per_billion"] == pytest.approx(12e9 / rates["duplex"])
    assert os.listdir(tmp_path) == []
    text = text_of(run(f"doctor --disk {tmp_path} --disk-bytes 3e6"))
    assert re.search(rf"disk\n +folder +{tmp_path} \(\S+\), \S+ \wiB free\n", text)
    assert re.search(r"update +[\d.]+ s per 10\^9 16-bit parameters with Adam", text)
    assert "O_TMPFILE" in text
    assert "O_DIRECT" in text


@pytest.mark.usefixtures("no_checks")
def test_doctor_measures_no_disk_unless_asked(run):
    assert data_of(run("doctor --json"))["disk"] is None
    assert "O_DIRECT" not in text_of(run("doctor"))


def test_doctor_says_what_a_file_system_lacks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    (line,) = (text for name, text in examine_disk(str(tmp_path), 10**6).rows() if name == "file system")
    assert re.match(r"no O_DIRECT \(Invalid argument\): each record", line)


def test_doctor_does_not_measure_what_is_no_disk(run, tmp_path):
    missing = run(f"doctor --disk {tmp_path}/missing")
    assert missing.exit_code == 2
    assert "`--disk` must be a folder" in missing.stderr
    full = run(f"doctor --disk {tmp_path} --disk-bytes 1.024e15")
    assert full.exit_code == 2
    assert "cannot hold another 512,000,000,000,000 bytes" in full.stderr.replace("\n", " ")


# Wrong input.


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
@pytest.mark.parametrize("json_too", ["", " --json"])
def test_wrong_input_is_answered_with_a_message(run, line, says, json_too):
    found = message_of(run(line + json_too))
    assert re.search(says, found, re.DOTALL), found
    assert "`--traceback`" in found


def test_an_error_of_a_users_loss_says_where(run, folder):
    (folder / "its_loss_fails.py").write_text(
        "import users\n\ndef model():\n    return users.factory()[0], lambda p, b: p['none'], users.factory()[2]\n"
    )
    found = message_of(run("analyze its_loss_fails:model"))
    assert "jzero: KeyError in its_loss_fails.py, line 4, `return users.factory()[0]," in found
    assert "`: 'none'.\n" in found


@pytest.mark.parametrize(
    "line",
    [
        "estimate --nothing",
        "plan users:factory --stage 4",
        "plan users:factory --precision f8",
        "plan users:factory --devices 0",
    ],
)
def test_wrong_options_are_usage_errors(run, line):
    assert "Usage:" in message_of(run(line))


def test_a_missing_extra_is_named(run, monkeypatch):
    monkeypatch.setattr(topologies, "_is_installed", lambda package: False)
    topologies._devices.cache_clear()
    assert "pip install 'jzero[gpu]'" in message_of(run("analyze users:factory --topology h200:7"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("analyze users:nnx_pair --figure report.png")
    assert result.exit_code == 2
    assert "pip install 'jzero[examples]'" in result.stderr
    assert "ZeRO stage 3" in result.stdout, "what was asked for beside it was printed before"


def test_a_figure_that_cannot_be_written(run):
    result = run("analyze users:nnx_pair --figure nowhere/report.png")
    assert result.exit_code == 2
    assert "No such file or directory: 'nowhere/report.png'" in result.stderr


def test_traceback_is_there_for_those_who_ask(run):
    asked = run("plan users:raises --traceback")
    assert asked.exit_code == 2
    assert 'raise KeyError("lost")' in asked.stderr
    surprise = run("analyze users:bad_loss")
    assert surprise.exit_code == 2
    assert "KeyError in users.py, line" in surprise.stderr
    assert "Traceback (most recent call last)" not in surprise.stderr


# As users start it.


def test_as_a_process(folder):
    """With another number of devices than the tests have, from a directory that is not the package's."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    script = "import sys; sys.path.remove(''); from jzero.__main__ import main; main()"  # scripts have no '' there
    line = "analyze users:factory --cpu-devices 4 --json --verify"
    finished = subprocess.run(
        [sys.executable, "-c", script, *line.split()],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found["num_devices"] == 4
    assert found["communication_elements"] == pytest.approx(3 * PSI, rel=0.02)


def test_without_typer_the_script_says_what_to_install(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert "pip install 'jzero[cli]'" in capsys.readouterr().err


def test_the_script_is_declared():
    assert 'jzero = "jzero.__main__:main"' in (ROOT / "pyproject.toml").read_text()


def test_commands_of_the_guide_run(run, checkpoint, tmp_path):
    """Except that machines which are not there are left out where they compile."""
    text = (ROOT / "docs/guides/command_line.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines() if line.startswith("jzero ")]
    commands = {"estimate", "plan", "analyze", "fit", "deepspeed", "export", "inspect", "doctor"}
    assert {line.split()[1] for line in lines} == commands
    for line in lines:
        here = line.replace("checkpoints/run1", str(checkpoint[0])).replace("model.safetensors", str(tmp_path / "m"))
        here = here.replace("ds_config.json", str(ROOT / "tests/data/ds_configs/zero2_fp16.json"))
        here = here.removeprefix("jzero ").replace("my_model:tiny", "users:factory")
        here = re.sub(r" --topology \S+", "", here) if here.startswith("analyze") else here
        here = here.replace("/local/scratch", f"{tmp_path} --disk-bytes 1e6")
        assert run(here).exit_code == 0, line


def test_a_terminal_sees_what_takes_long(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with messages(traceback=False):
        logging.getLogger("jzero").info("Compiling %s.", "stage 3")
    logging.getLogger("jzero").info("Nobody listens any more.")
    assert capsys.readouterr().err == "jzero: Compiling stage 3.\n"
