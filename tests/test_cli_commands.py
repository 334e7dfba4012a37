"""`jzero doctor`: what it finds and what it says is not available; `jzero deepspeed`: verdicts, keys, files."""

import json
import os
import re

import jax
import pytest

import jzero
from jzero.cli import doctor
from jzero.cli.doctor import examine_disk
from jzero.machines import topologies
from tests import pages, shared
from tests.cli_runs import data_of, folder, message_of, run, text_of  # noqa: F401  # fixtures


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def test_doctor_ends_with_1_if_a_reduction_is_wrong(run, monkeypatch):
    monkeypatch.setattr(jax.lax, "psum_scatter", doubled(jax.lax.psum_scatter))
    some = {name: doctor.CHECKS[name] for name in ("collectives", "train step", "donation")}
    monkeypatch.setattr(doctor, "CHECKS", some)
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
    monkeypatch.setattr(jax, "devices", shared.raising(RuntimeError("Unable to initialize backend")))
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
    found = data_of(run("doctor --json"))
    assert found["compilers"]["tpu"] is None
    assert {"python", "jzero", *doctor.PACKAGES} == found["versions"].keys()
    assert found["versions"]["jax"] == jax.__version__


def test_doctor_measures_a_disk(run, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {})
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
    assert "O_TMPFILE" in text
    assert "O_DIRECT" in text
    ((_, title, shown),) = (block for block in pages.blocks("guides/command_line.md") if block[0] == "text")
    assert title == pages.EXAMPLE
    printed = re.sub(rf"{tmp_path} \(\S+\)", "/local/scratch (ext4)", text[text.index("\ndisk\n") :])
    shown, printed = (re.sub("  file system .*\n", "", x) for x in (shown, printed))  # others where it lacks something
    pages.check_output("command_line.md", shown, printed, is_example=True)


def test_doctor_says_what_a_file_system_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.fcntl", shared.raising(OSError(22, "Invalid argument")))
    (line,) = (text for name, text in examine_disk(str(tmp_path), 10**6).rows() if name == "file system")
    assert re.match(r"no O_DIRECT \(Invalid argument\): each record", line)


def test_doctor_does_not_measure_what_is_no_disk(run, tmp_path):
    missing = run(f"doctor --disk {tmp_path}/missing")
    assert missing.exit_code == 2
    assert "`--disk` must be a folder" in missing.stderr
    full = run(f"doctor --disk {tmp_path} --disk-bytes 1.024e15")
    assert full.exit_code == 2
    assert "cannot hold another 512,000,000,000,000 bytes" in full.stderr.replace("\n", " ")


DS_CONFIG = {"train_batch_size": 32, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}


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
    assert message_of(run("deepspeed ds_config.json --set learning_rate=fast")).startswith(
        "jzero: `learning_rate` must be a number: got 'fast'."
    )
    contradiction = message_of(run("deepspeed ds_config.json --set train_batch_size=8 --batch-size 64"))
    assert contradiction.startswith("jzero: `--batch-size 64` contradicts `train_batch_size` (8)")


@pytest.mark.parametrize(("floor", "expected"), [(1e-6, 1e-6), ("auto", 0)])
def test_a_floor_of_a_warm_up_stays_where_the_rate_is_set(run, folder, floor, expected):
    """As with `auto=`: a trainer fills in the floor where it is open."""
    warm = {"type": "WarmupLR", "params": {"warmup_min_lr": floor, "warmup_max_lr": 1e-3}}
    (folder / "ds_config.json").write_text(json.dumps({"scheduler": warm, "train_batch_size": 8}))
    rows = data_of(run("deepspeed ds_config.json --set learning_rate=2e-5 --json"))["rows"]
    values = {row["key"]: row["value"] for row in rows}
    params = [values[f"scheduler.params.warmup_{name}_lr"] for name in ("min", "max")]
    assert params == [expected, 2e-5]


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


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e400"])
@pytest.mark.parametrize("option", ["hbm-bytes", "host-bytes"])
def test_bytes_that_are_no_number_are_named(option, value, run):
    line = f"fit --params 1M --vocab 64 --d-model 64 --heads 2 --topology h100:8 --no-confirm --{option}={value}"
    assert f"`--{option}` must be " in message_of(run(line))


@pytest.mark.parametrize("option", ["batch", "seq", "devices", "lora-rank", "persistence-threshold"])
def test_counts_that_no_machine_can_have_are_named(option, run):
    result = run(f"estimate --params 7B --{option} 99999999999999999999")
    assert result.exit_code == 2
    assert f"--{option}" in result.output
