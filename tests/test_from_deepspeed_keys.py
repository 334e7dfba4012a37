"""What DeepSpeed's code says about single keys."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import operator
import re
import sys
import types
from typing import get_args

import pytest

import jzero
from jzero.deepspeed.key import Verdict
from jzero.deepspeed.schema import SCHEMA
from tests.deepspeed_configs import BATCH, DATA, note, read, read_refused, verdicts


def zero(stage=3, **keys):
    return {"zero_optimization": {"stage": stage, **keys}}


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"zero_optimization": True}, "stage", 1),
        ({"zero_optimization": False}, "stage", 0),
        ({"zero_optimization": {}}, "stage", 0),
        (zero(2), "stage", 2),
        (zero(), "persistence_threshold", 100_000),
        (zero(stage3_model_persistence_threshold=sys.maxsize), "model_persistence_threshold", None),
        (zero(stage3_model_persistence_threshold=5e6), "model_persistence_threshold", 5_000_000),
        (zero(reduce_scatter=False), "reduce_scatter", False),
        (zero(reduce_bucket_size=0), "reduce_bucket_bytes", 1),  # each gradient alone, as DeepSpeed takes it
        (zero(mics_shard_size=-1), "replica_axis", None),
        (zero(mics_shard_size=2), "replica_axis", "replica"),
        # Buckets are in bytes of what is sent.
        (zero(stage3_prefetch_bucket_size=1000), "prefetch_bytes", 4000),
        (BF16 | zero(stage3_prefetch_bucket_size=1000), "prefetch_bytes", 2000),
        (zero(stage3_prefetch_bucket_size=1000, offload_param={"device": "cpu"}), "prefetch_bytes", None),
        (zero(reduce_bucket_size=1000), "reduce_bucket_bytes", 4000),
        (BF16 | zero(2, reduce_bucket_size=1000), "reduce_bucket_bytes", 2000),
        (BF16 | zero(2, reduce_bucket_size=1000) | {"communication_data_type": "fp32"}, "reduce_bucket_bytes", 4000),
        (zero(2, reduce_bucket_size=1000) | {"communication_data_type": "bf16"}, "reduce_bucket_bytes", 2000),
        # bf16 skips steps where DeepSpeed does.
        (BF16 | zero(0), "policy.skip_nonfinite", False),
        (BF16 | zero(1), "policy.skip_nonfinite", True),
        (BF16 | zero(2), "policy.skip_nonfinite", True),
        (BF16 | zero(3), "policy.skip_nonfinite", False),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}} | zero(2), "policy.skip_nonfinite", False),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}} | zero(3), "policy.skip_nonfinite", True),
    ],
)
def test_fields(config, field, value):
    found = operator.attrgetter(field)(read(config)[0])
    assert (found, type(found)) == (value, type(value))


def test_hpz_names_the_mesh_that_it_needs():
    sized = lambda size: zero(zero_hpz_partition_size=size)
    config, report = read(sized(4), num_devices=8)
    assert (config.node_axis, config.secondary_params) == ("node", True)
    assert "jzero.make_mesh(node=2, data=4)" in note(report, "zero_optimization.zero_hpz_partition_size")
    assert [read(sized(size), num_devices=8)[0].node_axis for size in (0, 1, 8)] == [None] * 3
    with pytest.raises(ValueError, match=r"hpz_partition_size` \(3\) must"):
        read(sized(3), num_devices=8)


def test_hierarchical_gathers_of_mics_name_the_mesh():
    keys = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    config, report = read(zero(**keys), num_devices=8)
    assert (config.replica_axis, config.node_axis) == ("replica", "node")
    advice = note(report, "zero_optimization.mics_hierarchical_params_gather")
    assert "jzero.make_mesh(replica=..., node=..., data=...)" in advice
    config, report = read(zero(**keys | {"mics_shard_size": -1}), num_devices=8)
    assert config.node_axis is None
    assert verdicts(report)["zero_optimization.mics_hierarchical_params_gather"] == "ignored"


def test_stage_0_has_nothing_to_offload_or_to_refuse():
    zero = {
        "stage": 0,
        "offload_optimizer": {"device": "nvme"},
        "cpu_offload_param": True,
        "zenflow": {"topk_ratio": 1},
    }
    config, report = read({"zero_optimization": {**zero, "reduce_bucket_size": 10, "reduce_scatter": False}})
    assert config == jzero.ZeroConfig(stage=0)
    found = {key: verdict for key, verdict in verdicts(report).items() if key.startswith("zero_optimization")}
    assert found.pop("zero_optimization.stage") == "honoured"
    assert set(found.values()) == {"ignored"}


NVME = {"device": "nvme", "nvme_path": "/local/scratch"}


def test_zenflow_is_read_with_intervals_in_steps():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    block = {"topk_ratio": 0.05, "select_interval": 10, "full_warm_up_rounds": 3, "overlap_step": True, "offload": True}
    config, report = read({"zero_optimization": {**zero, "zenflow": {**block, "update_interval": "auto"}}})
    flow = jzero.ZenFlow(topk_ratio=0.05, select_interval=12, warm_up_steps=4)
    assert config.offload == jzero.Offload(optimizer="host", compute="host", zenflow=flow)
    found = {key.removeprefix("zero_optimization.zenflow."): row for key, row in verdicts(report).items()}
    assert {found[name] for name in ("topk_ratio", "select_interval", "full_warm_up_rounds")} == {"honoured"}
    assert (found["offload"], found["update_interval"]) == ("ignored", "ignored")
    assert "the next multiple of `update_interval`" in str(report)
    assert not any("update_interval" in row for row in report.undecided)
    with pytest.warns(UserWarning, match="zenflow.select_strategy`"):
        config, report = read({"zero_optimization": {**zero, "zenflow": {"select_strategy": "epoch"}}})
    assert config.offload.zenflow == jzero.ZenFlow(overlap=False), "DeepSpeed's default"
    config, report = read({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}})
    assert config.offload == jzero.Offload()
    assert verdicts(report)["zero_optimization.zenflow.topk_ratio"] == "ignored"


@pytest.mark.parametrize("name", ["intra_op_parallelism", "thread_count"])
def test_optimizer_state_goes_to_nvme(name):
    zero = {"stage": 1, "offload_optimizer": {**NVME, "ratio": 0.5, "pipeline_read": True}, "sub_group_size": 10**9}
    config, report = read({"zero_optimization": zero, "aio": {name: 3, "block_size": 2**20, "use_gds": True}})
    offload = jzero.Offload(optimizer="disk", path="/local/scratch", ratio=0.5, disk_threads=3)
    assert config == jzero.ZeroConfig(stage=1, offload=offload)
    found = verdicts(report)
    block = "zero_optimization.offload_optimizer."
    assert [found[block + x] for x in ("device", "nvme_path", "ratio")] == ["honoured"] * 3
    assert (found[f"aio.{name}"], found["aio.block_size"], found["aio.use_gds"]) == ("honoured", "ignored", "ignored")
    assert found[f"{block}pipeline_read"] == found["zero_optimization.sub_group_size"] == "ignored"
    assert "one request" in note(report, "zero_optimization.sub_group_size")


@pytest.mark.parametrize("stage", [1, 2])
def test_stage_3_keys_mean_nothing_before(stage):
    quantized = {"zero_quantized_weights": True, "zero_hpz_partition_size": 8, "zero_quantized_gradients": True}
    zero = {"stage": stage, "offload_param": {"device": "cpu"}, "mics_shard_size": 2, **quantized}
    config, report = read({"zero_optimization": {**zero, "stage3_param_persistence_threshold": 7}})
    assert config == jzero.ZeroConfig(stage=stage)
    assert set(list(verdicts(report).values())[2:-1]) == {"ignored"}


def test_blocks_are_refused_that_are_on_and_ignored_that_are_off():
    for value in ({"enabled": True}, {"params": {"a": 1}}, {"nested": {"x": {"enabled": True}}}):
        assert verdicts(read_refused({"compression_training": value})[1])["compression_training"] == "refused"
    for value in ({}, {"enabled": False, "theta": 1}, {"nested": {"enabled": False}}, None):
        assert verdicts(read({"compression_training": value})[1])["compression_training"] == "ignored"


def test_the_table_has_deepspeeds_keys_and_defaults():
    """Those of the classes that DeepSpeed reads its strict blocks into, old and other names included."""
    theirs = json.loads((DATA / "deepspeed_golden.json").read_text())["keys"]
    assert len(theirs) > 70
    blocks = {f"zero_optimization.{name}" for name in ("offload_param", "offload_optimizer", "zenflow")}
    for path, default in theirs.items():
        if path not in blocks:
            key = SCHEMA.keys[SCHEMA.canonical(path)]
            assert default == key.default or path.endswith("leaf_module") or path in SCHEMA.old_names, path
    aio = {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1}  # by its documentation
    aio |= {"single_submit": False, "overlap_events": True, "use_gds": False}
    assert {path: x.default for path, x in SCHEMA.keys.items() if path.startswith("aio.")} == {
        f"aio.{name}": default for name, default in aio.items()
    }


def test_each_key_has_one_row_and_each_argument_exists():
    paths = [path for section in SCHEMA.sections for path, _ in section.keys]
    assert len(set(paths)) == len(paths)
    for key in SCHEMA.keys.values():
        assert key.verdict in get_args(Verdict), key.note
        owner, _, name = key.target.partition(".")
        assert not owner or name in {field.name for field in dataclasses.fields(getattr(jzero, owner))}, key.target


# What cannot be read: each error names the key, and all come at once.

CYCLE = {"cycle_min_lr": 0, "cycle_max_lr": 1}

zero_block = lambda **keys: {"zero_optimization": keys}
offload = lambda **keys: zero_block(stage=3, offload_optimizer={"device": "cpu", **keys})
fp16 = lambda **keys: {"fp16": {"enabled": True, **keys}}
adam = lambda params: {"optimizer": {"type": "AdamW", "params": params}}
schedule = lambda name, **params: {"scheduler": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        (zero_block(stag=3, offload_optimizer={"devise": "cpu"}), ["`stage`?", "`device`?"]),
        (zero_block(stage=4), ["`stage`", "4"]),
        (zero_block(stage="3"), ["`zero_optimization.stage` must be a whole number: got '3'"]),
        (zero_block(overlap_comm=1), ["`zero_optimization.overlap_comm` must be true or false: got 1"]),
        (offload(ratio="half"), ["`zero_optimization.offload_optimizer.ratio` must be a number: got 'half'"]),
        (offload(ratio=1.5), ["`zero_optimization.offload_optimizer.ratio` must be from 0 to 1: got 1.5"]),
        (offload(device="disk"), ["device` must be one of", "'disk'"]),
        (offload(device="nvme"), ["offload_optimizer.nvme_path`"]),
        (zero_block(reduce_bucket_size=-1), ["`zero_optimization.reduce_bucket_size` must be at least 0"]),
        ({"zero_optimization": [3]}, ["`zero_optimization` must be a block of keys"]),
        (
            zero_block(cpu_offload=True, **offload()["zero_optimization"]),
            ["`zero_optimization.cpu_offload` is the old name"],
        ),
        (zero_block(stage3_max_live_parameters=1, max_live_parameters=1), ["are the same key: keep one"]),
        (fp16(los_scale=1), ["`fp16.los_scale`", "`loss_scale`?"]),
        (fp16(min_loss_scale=0.00001), ["`fp16.min_loss_scale` must be a whole number"]),
        (fp16(initial_scale_power=101), ["`fp16.initial_scale_power` must be", "up to 2^100"]),
        ({**fp16(), "bf16": {"enabled": True}}, ["both true"]),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}, ["`bfloat16` and `bf16` are the same key"]),
        ({"communication_data_type": "int8"}, ["`communication_data_type` must be", "'int8'"]),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, ["`data_types.param_dtype`", "float16"]),
        ({"gradient_clipping": "one"}, ["`gradient_clipping` must be a number: got 'one'"]),
        ({"gradient_clipping": float("nan")}, ["`gradient_clipping` must be a number: got nan"]),
        (adam({"lrr": 1}), ["`optimizer.params.lrr` is not known", "`lr`?"]),
        (adam({"betas": [0.9]}), ["`optimizer.params.betas` must be two numbers"]),
        (adam(3), ["`optimizer.params` must be a block of keys"]),
        (schedule("WarmupDecayLR"), ["`scheduler.params.total_num_steps` is missing"]),
        (schedule("WarmupLR", warmup_num_steps=-1), ["warmup_num_steps` must be at least 0"]),
        (schedule("OneCycle", **CYCLE, cycle_first_step_size=2**30), ["below 2^31: got 2147483648"]),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(config, messages):
    with pytest.raises(ValueError, match=re.escape(messages[0])) as error:
        jzero.from_deepspeed({**BATCH, **config})
    assert all(message in str(error.value) for message in messages), str(error.value)


def test_all_errors_come_at_once():
    config = {"zero_optimization": {"stge": 1, "overlap_com": True}, "bf16": {"enabled": 1}, "gradient_clipping": -1}
    with pytest.raises(ValueError, match="cannot be read") as error:
        jzero.from_deepspeed(config)
    assert all(name in str(error.value) for name in ("stge", "overlap_com", "bf16.enabled", "gradient_clipping"))


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"optim": {"type": "Adam", "params": {"lr": 1e-3}}}, "optimizer"),
        ({"fp_16": {"enabled": True}}, "fp16"),
        ({"gradient_cliping": 0.5}, "gradient_clipping"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "grad_accum_dtype"),
    ],
)
def test_a_misspelt_name_outside_of_zero_optimization_is_refused(config, meant):
    with pytest.warns(UserWarning, match="jzero does not honour"):
        _, report = jzero.from_deepspeed({**BATCH, **config})
    (row,) = report.refused
    assert row.note == f"unknown; DeepSpeed reads no such key. Did you mean `{meant}`?"
    with pytest.raises(ValueError, match=f"Did you mean `{meant}`"):
        report.verify()


def test_other_unknown_keys_outside_of_zero_optimization_pass():
    _, report = read({"comment": "ours", "my_trainer": {"epochs": 3}, "steps_per_save": 3})
    assert {verdicts(report)[name] for name in ("comment", "my_trainer", "steps_per_save")} == {"ignored"}


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_num_devices_is_checked(value):
    with pytest.raises(ValueError, match="`num_devices` must be"):
        read({}, num_devices=value)


def test_a_key_that_is_there_twice(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ValueError, match=r"each key once: got \['stage'\]"):
        jzero.from_deepspeed(file)


def test_hjson_needs_its_package(tmp_path, monkeypatch):
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8, // rows\n}')
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not plain JSON: .*pip install hjson"):
        jzero.from_deepspeed(str(file))


@pytest.mark.parametrize("depth", [60, 100_000])
def test_deep_nesting_is_a_plain_error(depth, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"a": ' * depth + "1" + "}" * depth)
    with pytest.raises(ValueError, match=r"ds_config.json.* is nested deeper than"):
        jzero.from_deepspeed(path)
    nested = {}
    nested["optimizer"] = {"params": {"betas": [nested]}}
    with pytest.raises(ValueError, match="is nested deeper than"):
        jzero.from_deepspeed(nested)


def test_hjson_is_read_by_its_package(tmp_path, monkeypatch):
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8, // rows\n}')

    class HjsonDecodeError(ValueError):
        pass

    def loads(text, object_pairs_hook):
        if "rows" not in text:
            raise HjsonDecodeError("what is this")
        return object_pairs_hook([("train_batch_size", 8)])

    fake = types.SimpleNamespace(loads=loads, HjsonDecodeError=HjsonDecodeError)
    monkeypatch.setitem(sys.modules, "hjson", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake)
    assert jzero.from_deepspeed(file)[1].train_batch_size == 8
    file.write_text("{")
    with pytest.raises(ValueError, match="neither JSON nor Hjson"):
        jzero.from_deepspeed(file)


def test_sources_that_are_no_configuration(tmp_path):
    with pytest.raises(TypeError, match="a path or a dictionary: got list"):
        jzero.from_deepspeed([1])
    with pytest.raises(FileNotFoundError):
        jzero.from_deepspeed(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a block of keys: got a list"):
        jzero.from_deepspeed(tmp_path / "list.json")
