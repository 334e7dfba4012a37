"""`jzero.from_deepspeed`: a verdict on every key of real configurations, written by hand, and what is refused.

`data/ds_configs/NAME.json` is a configuration in the manner of those in use, `NAME.expected.json` what becomes of it.
`data/deepspeed_golden.json` is what DeepSpeed itself makes of batch sizes, see `data/make_deepspeed_golden.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import re
import sys
import types
import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given

import jzero
from jzero.deepspeed.batch import BatchSizes, solve_batch
from jzero.deepspeed.keys import KEYS
from jzero.deepspeed.settings import OLD_NAMES

DATA = pathlib.Path(__file__).parent / "data"
CONFIGS = sorted(path.stem for path in (DATA / "ds_configs").glob("*.json") if "." not in path.stem)
BATCH = {"train_batch_size": 8}
REPORTED = ("train_batch_size", "micro_batch_size", "accumulate_steps", "clip_norm")


def read(config, *, num_devices=None):
    """Returns `(config, report)` of what must come without a warning."""
    return jzero.from_deepspeed({**BATCH, **config}, num_devices=num_devices)


def read_refused(config, *, num_devices=None):
    with pytest.warns(UserWarning, match="does not honour"):
        return jzero.from_deepspeed({**BATCH, **config}, num_devices=num_devices)


def verdicts(report):
    return {row.key: row.verdict for row in report.rows}


def note(report, key):
    (found,) = [row.note for row in report.rows if row.key == key]
    return found


def path_of(name):
    return DATA / "ds_configs" / f"{name}.json"


@functools.cache
def expected(name):
    return json.loads((DATA / "ds_configs" / f"{name}.expected.json").read_text())


@pytest.fixture(params=CONFIGS)
def imported(request):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_devices = expected(request.param)["num_devices"]
        config, report = jzero.from_deepspeed(path_of(request.param), num_devices=num_devices)
    return types.SimpleNamespace(
        name=request.param, config=config, report=report, caught=caught, expected=expected(request.param)
    )


# Whole files


def test_there_are_files_of_all_kinds():
    assert len(CONFIGS) >= 12


def test_every_key_has_the_expected_verdict(imported):
    assert verdicts(imported.report) == imported.expected["verdicts"]
    assert all(row.note.strip() for row in imported.report.rows), "each says why"


def test_every_key_of_the_file_has_a_row(imported):
    """Also where the expectation forgot one: each key is a row, or lies in a block that is one."""
    rows = {row.key for row in imported.report.rows}

    def missing(block, prefix=""):
        for name, value in block.items():
            path = f"{prefix}{name}"
            if path not in rows:
                yield from missing(value, f"{path}.") if isinstance(value, dict) else [path]

    assert not list(missing(json.loads(path_of(imported.name).read_text())))


def test_fields_are_the_expected_ones(imported):
    config, wanted = imported.config, imported.expected
    defaults = jzero.ZeroConfig(stage=wanted["config"]["stage"])
    precision = dict(wanted["precision"])
    if isinstance(precision.get("loss_scale"), dict):
        precision["loss_scale"] = jzero.DynamicLossScale(**precision["loss_scale"])
    fields = {**wanted["config"], "offload": jzero.Offload(**wanted["offload"])}
    fields["precision"] = jzero.Precision(**precision)
    fields["quantization"] = jzero.Quantization(**fields.get("quantization", {}))
    assert config == dataclasses.replace(defaults, **fields)


@pytest.mark.parametrize(
    ("block", "size", "expected"),
    [({}, 50_000_000, 100_000_000), ({}, 0, 0), ({"offload_param": {"device": "cpu"}}, 50_000_000, None)],
)
def test_what_is_gathered_ahead_is_in_bytes_of_the_dtype_that_travels(block, size, expected):
    zero = {"stage": 3, "stage3_prefetch_bucket_size": size, **block}
    config, report = jzero.from_deepspeed({"bf16": {"enabled": True}, "zero_optimization": zero})
    assert config.prefetch_bytes == expected
    verdict = "compiler" if expected is None else "honoured"
    assert verdicts(report)["zero_optimization.stage3_prefetch_bucket_size"] == verdict


def test_report_has_the_expected_numbers(imported):
    report, wanted = imported.report, imported.expected["report"]
    assert {name: getattr(report, name) for name in REPORTED} == {name: wanted[name] for name in REPORTED}
    assert (report.optimizer is not None) == wanted["has_optimizer"]
    assert (report.schedule is not None) == wanted["has_schedule"]
    assert json.loads(report.to_json())["rows"][0]["key"] == report.rows[0].key


@pytest.mark.parametrize(("verdict", "says"), [("refused", "does not"), ("open", "Nothing decides")])
def test_one_warning_names_all_that_is_refused_or_open(imported, verdict, says):
    refused = [key for key, found in imported.expected["verdicts"].items() if found == verdict]
    assert sorted(row.key for row in getattr(imported.report, verdict)) == sorted(refused)
    caught = [warning for warning in imported.caught if says in str(warning.message)]
    if not refused:
        assert not caught
        if not imported.caught:
            imported.report.verify()
        return
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__
    with pytest.raises(ValueError, match=says) as error:
        imported.report.verify()
    for key in refused:
        assert f"`{key}`" in str(warning.message)
        assert f"`{key}`" in str(error.value)


def test_report_reads_as_a_table():
    _, report = read_refused(
        {"zero_optimization": {"stage": 3, "load_from_fp32_weights": False, "overlap_comm": True}}, num_devices=4
    )
    lines = str(report).splitlines()
    assert lines[0] == "DeepSpeed configuration: 1 refused, 3 honoured, 1 left to the compiler, 0 ignored"
    assert lines[1] == "batch: 8 rows a step = 2 in a micro-batch x 1 micro-batches x 4 devices"
    assert lines[2] == "clipping: at a norm of 1; optimizer: none in the file; schedule: none in the file"
    assert lines[4].split() == ["refused", "value", "what", "becomes", "of", "it"]
    assert lines[5].split()[:2] == ["zero_optimization.load_from_fp32_weights", "false"]
    assert lines[7].split()[:2] == ["honoured", "value"]


# What DeepSpeed's code says about single keys


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({}, "persistence_threshold", 100_000),
        ({"stage3_model_persistence_threshold": sys.maxsize}, "model_persistence_threshold", None),
        ({"stage3_model_persistence_threshold": 5e6}, "model_persistence_threshold", 5_000_000),
        ({"reduce_scatter": False}, "reduce_scatter", False),
        ({"reduce_bucket_size": 1000}, "reduce_bucket_bytes", 4000),
        ({"reduce_bucket_size": 0}, "reduce_bucket_bytes", 1),  # each gradient alone, as DeepSpeed takes it
        ({"mics_shard_size": -1}, "replica_axis", None),
        ({"mics_shard_size": 2}, "replica_axis", "replica"),
    ],
)
def test_fields_at_stage_3(config, field, value):
    found, _ = read({"zero_optimization": {"stage": 3, **config}})
    assert getattr(found, field) == value
    assert type(getattr(found, field)) is type(value)


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        ({}, 4000),
        ({"bf16": {"enabled": True}}, 2000),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, 4000),
        ({"communication_data_type": "bf16"}, 2000),
    ],
)
def test_buckets_are_in_bytes_of_what_is_sent(given, num_bytes):
    config, _ = read({**given, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}})
    assert config.reduce_bucket_bytes == num_bytes


def test_mics_names_the_mesh_that_it_needs():
    def zero(size):
        return {"zero_optimization": {"stage": 3, "mics_shard_size": size}}

    config, report = read(zero(2), num_devices=8)
    advice = note(report, "zero_optimization.mics_shard_size")
    assert "jzero.make_mesh(replica=4, data=2)" in advice
    plan = jzero.plan_train_state(
        jzero.TrainState.create(params={"w": jnp.ones((512, 512))}, tx=optax.adam(1e-3)),
        config=config,
        mesh=jzero.make_mesh(replica=4, data=2),
    )
    assert plan.num_shards == 2
    assert read(zero(8), num_devices=8)[0].replica_axis is None
    with pytest.raises(ValueError, match=r"`zero_optimization.mics_shard_size` \(3\) must divide"):
        read(zero(3), num_devices=8)


def test_hpz_names_the_mesh_that_it_needs():
    def zero(size):
        return {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}

    config, report = read(zero(4), num_devices=8)
    assert (config.node_axis, config.secondary_params) == ("node", True)
    assert "jzero.make_mesh(node=2, data=4)" in note(report, "zero_optimization.zero_hpz_partition_size")
    assert [read(zero(size), num_devices=8)[0].node_axis for size in (0, 1, 8)] == [None] * 3
    with pytest.raises(ValueError, match=r"`zero_optimization.zero_hpz_partition_size` \(3\) must divide"):
        read(zero(3), num_devices=8)


def test_hierarchical_gathers_of_mics_name_the_mesh():
    zero = {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    config, report = read({"zero_optimization": zero}, num_devices=8)
    assert (config.replica_axis, config.node_axis) == ("replica", "node")
    advice = note(report, "zero_optimization.mics_hierarchical_params_gather")
    assert "jzero.make_mesh(replica=..., node=..., data=...)" in advice
    config, report = read({"zero_optimization": {**zero, "mics_shard_size": -1}}, num_devices=8)
    assert config.node_axis is None
    assert verdicts(report)["zero_optimization.mics_hierarchical_params_gather"] == "ignored"


def test_zeropp_becomes_integers():
    keys = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
    zero = {"stage": 3, **dict.fromkeys(keys, True), "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    config, report = read({"zero_optimization": zero})
    assert config.quantization == jzero.Quantization(gather="int8", reduce="int4", frozen="int8")
    found = verdicts(report)
    assert {found[f"zero_optimization.{key}"] for key in keys} == {"honoured"}
    assert found["zero_optimization.zeropp_loco_param"] == "ignored"
    assert "within a node are exact" in note(report, "zero_optimization.zero_quantized_gradients")


@pytest.mark.parametrize(
    ("stage", "block", "skips"),
    [
        (1, {}, True),
        (2, {}, True),
        (3, {}, False),
        (0, {}, False),
        (2, {"check_grad_overflow": False}, False),
        (3, {"check_grad_overflow": True}, True),
    ],
)
def test_bf16_skips_where_deepspeed_does(stage, block, skips):
    config, _ = read({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True, **block}})
    assert config.policy.skip_nonfinite is skips


def test_clipping_has_deepspeeds_default():
    assert read({})[1].clip_norm == 1.0
    assert verdicts(read({})[1])["gradient_clipping"] == "honoured"
    assert read({"gradient_clipping": 0})[1].clip_norm is None
    assert read({"gradient_clipping": 0.25})[1].step_arguments() == {"accumulate_steps": 1, "clip_norm": 0.25}


@pytest.mark.parametrize(("config", "stage"), [(True, 1), (False, 0), ({}, 0), ({"stage": 2}, 2)])
def test_stage(config, stage):
    assert read({"zero_optimization": config})[0].stage == stage


def test_nothing_is_partitioned_at_stage_0_without_the_block():
    config, report = read({})
    assert config == jzero.ZeroConfig(stage=0)
    assert verdicts(report) == {"train_batch_size": "honoured", "gradient_clipping": "honoured"}


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
    with pytest.warns(UserWarning, match="does not honour `zero_optimization.zenflow.select_strategy`"):
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


def test_nvme_needs_a_folder():
    with pytest.raises(ValueError, match=r"set `zero_optimization\.offload_optimizer\.nvme_path`"):
        read({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}})


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_without_nvme_its_keys_are_ignored(device):
    zero = {"stage": 2, "offload_optimizer": {**NVME, "device": device}}
    config, report = read({"zero_optimization": zero, "aio": {"intra_op_parallelism": 4}})
    assert config.offload.path is None
    assert config.offload.optimizer == {"none": "none", "cpu": "host"}[device]
    found = verdicts(report)
    assert found["zero_optimization.offload_optimizer.nvme_path"] == found["aio.intra_op_parallelism"] == "ignored"


def test_parameters_on_nvme_go_with_optimizer_state_there():
    config, report = read({"zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}})
    assert config.offload == jzero.Offload(optimizer="disk", params="disk", path="/local/scratch")
    assert not report.refused
    config, report = read_refused({"zero_optimization": {"stage": 3, "offload_param": NVME}})
    assert config.offload == jzero.Offload()
    assert [row.key for row in report.refused] == ["zero_optimization.offload_param.device"]


@pytest.mark.parametrize("stage", [1, 2])
def test_stage_3_keys_mean_nothing_before(stage):
    quantized = {"zero_quantized_weights": True, "zero_hpz_partition_size": 8, "zero_quantized_gradients": True}
    zero = {"stage": stage, "offload_param": {"device": "cpu"}, "mics_shard_size": 2, **quantized}
    config, report = read({"zero_optimization": {**zero, "stage3_param_persistence_threshold": 7}})
    assert config == jzero.ZeroConfig(stage=stage)
    assert set(list(verdicts(report).values())[2:-1]) == {"ignored"}


def test_old_names_say_the_new_ones():
    zero = {"stage": 3, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": True}
    _, report = read({"zero_optimization": zero})
    assert "`offload_optimizer.device`" in note(report, "zero_optimization.cpu_offload")
    renamed = note(report, "zero_optimization.stage3_gather_fp16_weights_on_model_save")
    assert renamed.startswith("now `gather_16bit_weights_on_model_save`: ")


@pytest.mark.parametrize("value", [{"enabled": True}, {"params": {"a": 1}}, {"nested": {"x": {"enabled": True}}}])
def test_blocks_are_refused_that_are_on(value):
    assert verdicts(read_refused({"compression_training": value})[1])["compression_training"] == "refused"


@pytest.mark.parametrize("value", [{}, {"enabled": False, "theta": 1}, {"nested": {"enabled": False}}, None])
def test_blocks_are_ignored_that_are_off(value):
    assert verdicts(read({"compression_training": value})[1])["compression_training"] == "ignored"


def test_the_table_has_deepspeeds_keys_and_defaults():
    """Those of the classes that DeepSpeed reads its strict blocks into, old and other names included."""
    theirs = json.loads((DATA / "deepspeed_golden.json").read_text())["keys"]
    assert len(theirs) > 70
    blocks = {f"zero_optimization.{name}" for name in ("offload_param", "offload_optimizer", "zenflow")}
    for path, default in theirs.items():
        if path not in blocks:
            key = KEYS[OLD_NAMES.get(path, path)]
            assert default == key.default or path.endswith("leaf_module") or path in OLD_NAMES, path


# Errors


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        ({"zero_optimization": {"stag": 3, "offload_optimizer": {"devise": "cpu"}}}, ["`stage`?", "`device`?"]),
        ({"zero_optimization": {"stage": 4}}, ["`stage`", "4"]),
        ({"zero_optimization": {"stage": "3"}}, ["`zero_optimization.stage` must be a whole number: got '3'"]),
        ({"zero_optimization": {"stage": True}}, ["`zero_optimization.stage` must be a whole number: got True"]),
        ({"zero_optimization": {"overlap_comm": 1}}, ["`zero_optimization.overlap_comm` must be true or false: got 1"]),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": "half"}}},
            ["`zero_optimization.offload_optimizer.ratio` must be a number: got 'half'"],
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
            ["`zero_optimization.offload_optimizer.ratio` must be from 0 to 1: got 1.5"],
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, ["device` must be one of", "'disk'"]),
        (
            {"zero_optimization": {"reduce_bucket_size": -1}},
            ["`zero_optimization.reduce_bucket_size` must be at least 0"],
        ),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, ["must be a whole number: got 1.5"]),
        ({"zero_optimization": [3]}, ["`zero_optimization` must be a block of keys"]),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            ["`zero_optimization.cpu_offload` is the old name"],
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 1}},
            ["are the same key: keep one"],
        ),
        ({"fp16": {"enabled": True, "los_scale": 1}}, ["`fp16.los_scale`", "`loss_scale`?"]),
        ({"fp16": {"enabled": True, "min_loss_scale": 0.00001}}, ["`fp16.min_loss_scale` must be a whole number"]),
        ({"fp16": {"enabled": True, "initial_scale_power": 101}}, ["The block `fp16` makes no loss scale", "initial"]),
        ({"fp16": {"enabled": True, "min_loss_scale": 2**17}}, ["The block `fp16` makes no loss scale", "minimum"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["both true"]),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}, ["`bfloat16` and `bf16` are the same key"]),
        ({"communication_data_type": "int8"}, ["`communication_data_type` must be", "'int8'"]),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, ["`data_types.param_dtype`", "float16"]),
        ({"gradient_clipping": "one"}, ["`gradient_clipping` must be a number: got 'one'"]),
        ({"gradient_clipping": None}, ["`gradient_clipping` must be a number: got None"]),
        ({"gradient_clipping": float("nan")}, ["`gradient_clipping` must be a number: got nan"]),
        ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, ["`optimizer.params.lrr` is not known", "`lr`?"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            ["`optimizer.params.betas` must be two numbers"],
        ),
        ({"optimizer": {"type": "AdamW", "params": 3}}, ["`optimizer.params` must be a block of keys"]),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, ["`scheduler.params.total_num_steps` is missing"]),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}},
            ["warmup_num_steps` must be at least 0"],
        ),
        (
            {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {
                        "cycle_min_lr": 0,
                        "cycle_max_lr": 1,
                        "cycle_first_step_size": 2**20,
                        "cycle_first_stair_count": 2**11,
                    },
                }
            },
            ["below 2^31"],
        ),
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


def test_unknown_keys_outside_pass_with_a_hint():
    _, report = read({"gradient_cliping": 1, "data_types": {"grad_acum_dtype": "fp32"}})
    assert verdicts(report)["gradient_cliping"] == "ignored"
    assert "Did you mean `gradient_clipping`?" in note(report, "gradient_cliping")
    assert "Did you mean `grad_accum_dtype`?" in note(report, "data_types.grad_acum_dtype")


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_num_devices_is_checked(value):
    with pytest.raises(ValueError, match="`num_devices` must be None or an integer >= 1"):
        read({}, num_devices=value)


# Files


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
    with pytest.raises(ValueError, match="must hold a dictionary: got list"):
        jzero.from_deepspeed(tmp_path / "list.json")


def test_the_dictionary_stays_as_it_is():
    config = json.loads(path_of("zero3_offload").read_text())
    jzero.from_deepspeed(config)
    assert config == json.loads(path_of("zero3_offload").read_text())


# Batch sizes

sizes = st.none() | st.integers(1, 12)


def solve_by_trying(train, micro, accumulate, num_devices):
    """All sizes that fit what is given; one micro-batch where only one size (or none) of a step is given."""
    if accumulate is None and None in (train, micro):
        accumulate = 1
    pairs = itertools.product(range(1, 13), range(1, 13))
    found = [(m * a * num_devices, m, a) for m, a in pairs if micro in (None, m) and accumulate in (None, a)]
    return [sizes for sizes in found if train in (None, sizes[0])]


@given(st.none() | st.integers(1, 12), sizes, sizes, st.integers(1, 6))
def test_batch_sizes_are_those_that_trying_finds(train, micro, accumulate, num_devices):
    found = solve_by_trying(train, micro, accumulate, num_devices)
    sizes = BatchSizes(train, micro, accumulate)
    if not found:
        with pytest.raises(ValueError, match="`train_batch_size`"):
            solve_batch(sizes, num_devices)
    elif train is None and micro is None:
        assert solve_batch(sizes, num_devices) == (None, None, accumulate or 1)
    else:
        assert [tuple(solve_batch(sizes, num_devices))] == found


@given(sizes, sizes, sizes, st.integers(1, 6))
def test_batch_sizes_without_devices_contradict_no_number_of_them(train, micro, accumulate, num_devices):
    """What is solved without a number of devices is right for every one; what is refused is wrong for every one."""
    sizes = BatchSizes(train, micro, accumulate)
    try:
        partly = solve_batch(sizes, None)
    except ValueError:
        with pytest.raises(ValueError, match="`train_batch_size`"):
            solve_batch(sizes, num_devices)
        return
    try:
        wholly = solve_batch(sizes, num_devices)
    except ValueError:
        return
    assert all(x in (None, y) for x, y in zip(partly, wholly, strict=True))


def test_batch_sizes_are_deepspeeds():
    rows = json.loads((DATA / "deepspeed_golden.json").read_text())["batches"]
    solved = refused = 0
    for *given_sizes, num_devices, theirs in rows:
        if isinstance(theirs, list):
            assert list(solve_batch(BatchSizes(*given_sizes), num_devices)) == theirs
            solved += 1
        elif given_sizes[0] is not None or given_sizes[1] is not None:  # else jzero leaves open what it is not told
            with pytest.raises(ValueError, match="`train_batch_size`"):
                solve_batch(BatchSizes(*given_sizes), num_devices)
            refused += 1
    assert (solved, refused) == (93, 135)


def test_step_arguments_need_the_number_of_micro_batches():
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    _, report = jzero.from_deepspeed(config)
    with pytest.raises(ValueError, match="`num_devices`"):
        report.step_arguments()
    _, report = jzero.from_deepspeed(config, num_devices=8)
    assert report.step_arguments()["accumulate_steps"] == 2
    with pytest.warns(UserWarning, match="Nothing decides `gradient_accumulation_steps`"):
        _, auto = read({"gradient_accumulation_steps": "auto"}, num_devices=8)
    with pytest.raises(ValueError, match="'auto'"):
        auto.step_arguments()


# Offload works as it is read


def test_offload_fields_place_a_state():
    zero = {"stage": 3, "param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    config, _ = read({"zero_optimization": zero, "bf16": {"enabled": True}})
    params = {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.adam(1e-3)), config=config)
    plan = jzero.plan_of(state)
    assert plan.host_bytes_per_device.total == 12 * 64 * 64 // 8, "master and two moments"


def test_what_is_not_made_says_for_want_of_what():
    source = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    with pytest.warns(UserWarning, match="`optimizer.params.lr`, `scheduler.params.total_num_steps`"):
        _, report = jzero.from_deepspeed(source)
    assert report.optimizer is None
    assert report.schedule is None
    notes = {row.key: row.note for row in report.rows}
    assert notes["optimizer.type"].endswith("none is made, for want of `optimizer.params.lr`")
    assert notes["scheduler.type"].endswith("none is made, for want of `scheduler.params.total_num_steps`")
    assert notes["scheduler.params.total_num_steps"].endswith("here: not known")
    source["optimizer"]["params"]["lr"] = 1e-3
    source["scheduler"]["params"]["total_num_steps"] = 100
    assert "none is made" not in str(jzero.from_deepspeed(source)[1])


AUTO = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def undecided(**arguments):
    config, report = jzero.from_deepspeed(AUTO, num_devices=8, **arguments)
    return config, report, {row.key for row in report.undecided}


def test_what_nothing_decides_is_at_the_head():
    with pytest.warns(UserWarning, match="Nothing decides"):
        _, report, names = undecided()
    head = str(report).split("\n\n")[0]
    assert {"bf16.enabled", "optimizer.params.lr", "train_batch_size", "gradient_clipping"} <= names
    left_open = {row.key for row in report.open}
    usual = {"optimizer.params.betas", "gradient_clipping", "zero_optimization.reduce_bucket_size"}
    assert names - left_open == usual, "what trainers fill in as DeepSpeed does, and what changes no numbers"
    assert all(name in head for name in left_open)
    assert '"auto"' in head
    assert "optimizer: none (open)" in head
    assert "clipping: at a norm of 1;" in head
    data = json.loads(report.to_json())
    assert (set(data["open"]), set(data["undecided"])) == (left_open, names)
    assert not read({"train_batch_size": 8})[1].undecided
    assert "open" not in str(read({"train_batch_size": 8})[1])


STOCK = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ARGUMENTS = {
    "learning_rate": 2e-4,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "max_steps": 1000,
    "warmup_ratio": 0.0301,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "hidden_size": 36,
}


def test_a_trainers_names_decide_what_they_do_there():
    """A stock file of Hugging Face; the values are those that its trainer writes into it."""
    config, report = jzero.from_deepspeed(STOCK, num_devices=8, auto=ARGUMENTS)
    assert not report.undecided
    report.verify()
    assert config.policy == jzero.ZeroConfig(precision="bf16").policy
    assert (report.train_batch_size, report.micro_batch_size, report.accumulate_steps) == (64, 4, 2)
    assert report.clip_norm == 0.5
    assert config.persistence_threshold == 360
    assert (config.reduce_bucket_bytes, config.prefetch_bytes) == (2 * 36 * 36, 2 * int(0.9 * 36 * 36))
    rates = [float(report.schedule(step)) for step in (0, 32, 1001)]  # after a warm-up of 31 steps
    assert rates == pytest.approx([0, 2e-4, 0], rel=1e-6)
    values = {row.key: row.value for row in report.rows}
    assert values["optimizer.params.betas"] == [0.9, 0.95]
    assert (values["optimizer.params.eps"], values["optimizer.params.weight_decay"]) == (1e-6, 0.1)
    assert (values["scheduler.params.warmup_num_steps"], values["fp16.enabled"]) == (31, False)
    (key,) = {"scheduler.params.warmup_num_steps"}
    _, report = jzero.from_deepspeed(STOCK, num_devices=8, auto={**ARGUMENTS, key: 7})
    assert {row.key: row.value for row in report.rows}[key] == 7, "the key itself comes first"


def test_one_precision_excludes_the_other():
    source = {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}, "train_batch_size": 8}
    _, report = jzero.from_deepspeed(source)
    assert not report.undecided
    assert {row.key: row.note for row in report.rows}["fp16.enabled"].endswith("false, since `bf16.enabled` is true")


def test_a_few_of_a_trainers_names_leave_what_is_usual():
    few = {name: ARGUMENTS[name] for name in ("learning_rate", "max_steps", "per_device_train_batch_size", "bf16")}
    few |= {"warmup_steps": 0, "gradient_accumulation_steps": 1}
    _, report = jzero.from_deepspeed(STOCK, num_devices=8, auto=few)
    assert not report.open
    assert {"gradient_clipping", "optimizer.params.betas"} < {row.key for row in report.undecided}
    assert report.optimizer is not None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", jzero.Precision(compute_dtype="bfloat16")])
def test_arguments_decide(precision):
    tx = optax.sgd(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if precision == "fp16" else "error")  # its loss scale stays open
        config, report, names = undecided(batch_size=64, optimizer=tx, precision=precision)
    assert config.policy == jzero.ZeroConfig(precision=precision).policy
    assert (report.train_batch_size, report.micro_batch_size, report.accumulate_steps) == (64, 8, 1)
    assert report.optimizer is tx
    others = {"gradient_clipping", "zero_optimization.reduce_bucket_size"}
    assert names - {"fp16.loss_scale"} == others
    values = {"gradient_clipping": 0.5, "zero_optimization.reduce_bucket_size": 1000}
    config, report, names = undecided(batch_size=64, optimizer=tx, precision="bf16", auto=values)
    assert not names
    assert report.step_arguments() == {"accumulate_steps": 1, "clip_norm": 0.5}
    assert config.reduce_bucket_bytes == 2000


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ({"train_batch_size": 8}, {"batch_size": 16}, r"`batch_size=16` contradicts `train_batch_size` \(8\)"),
        (
            {"bf16": {"enabled": True}},
            {"precision": "fp16"},
            r"`precision` \(fp16\) contradicts `bf16.enabled` \(True\)",
        ),
        ({"train_batch_size": 8}, {"auto": {"train_batch_size": 8}}, r"`auto` names 'train_batch_size', which is not"),
        ({"train_batch_size": 8}, {"auto": {"lerning_rate": 1}}, "A trainer has .*'learning_rate'"),
        ({"train_batch_size": 8}, {"auto": {"max_grad_norm": 1}}, r"It stands for \['gradient_clipping'\]: change"),
        (STOCK, {"auto": {"learning_rate": "fast"}}, r"`auto\['learning_rate'\]` must be a number: got 'fast'"),
        (STOCK, {"auto": {"warmup_ratio": 0.1}}, r"`auto\['max_steps'\]` must be known where `warmup_ratio` is"),
        ({}, {"batch_size": "8"}, "`batch_size` must be None or an integer >= 1: got '8'"),
        ({}, {"precision": "int8"}, "`precision` must be 'fp32', 'bf16', 'fp16' or a `Precision`: got 'int8'"),
        ({}, {"optimizer": "adam"}, "`optimizer` must be an optax transformation: got 'adam'"),
    ],
)
def test_arguments_that_decide_nothing(source, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jzero.from_deepspeed(source, **arguments)
