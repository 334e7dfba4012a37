"""`jzero deepspeed`: verdicts, keys that are set, and files that it reads."""

import json

from tests.cli_runs import data_of, folder, message_of, run, text_of  # noqa: F401  # fixtures

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
