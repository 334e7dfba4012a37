"""DeepSpeed configurations that cannot be read: each error names the key, and all come at once."""

from __future__ import annotations

import importlib.util
import re
import sys
import types

import pytest

import jzero
from tests.deepspeed_configs import BATCH, read, verdicts

CYCLE = {"cycle_min_lr": 0, "cycle_max_lr": 1}

# Errors


def zero(**keys):
    return {"zero_optimization": keys}


def offload(**keys):
    return zero(stage=3, offload_optimizer={"device": "cpu", **keys})


def fp16(**keys):
    return {"fp16": {"enabled": True, **keys}}


def adam(params):
    return {"optimizer": {"type": "AdamW", "params": params}}


def schedule(name, **params):
    return {"scheduler": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        (zero(stag=3, offload_optimizer={"devise": "cpu"}), ["`stage`?", "`device`?"]),
        (zero(stage=4), ["`stage`", "4"]),
        (zero(stage="3"), ["`zero_optimization.stage` must be a whole number: got '3'"]),
        (zero(overlap_comm=1), ["`zero_optimization.overlap_comm` must be true or false: got 1"]),
        (offload(ratio="half"), ["`zero_optimization.offload_optimizer.ratio` must be a number: got 'half'"]),
        (offload(ratio=1.5), ["`zero_optimization.offload_optimizer.ratio` must be from 0 to 1: got 1.5"]),
        (offload(device="disk"), ["device` must be one of", "'disk'"]),
        (zero(reduce_bucket_size=-1), ["`zero_optimization.reduce_bucket_size` must be at least 0"]),
        ({"zero_optimization": [3]}, ["`zero_optimization` must be a block of keys"]),
        (zero(cpu_offload=True, **offload()["zero_optimization"]), ["`zero_optimization.cpu_offload` is the old name"]),
        (zero(stage3_max_live_parameters=1, max_live_parameters=1), ["are the same key: keep one"]),
        (fp16(los_scale=1), ["`fp16.los_scale`", "`loss_scale`?"]),
        (fp16(min_loss_scale=0.00001), ["`fp16.min_loss_scale` must be a whole number"]),
        (fp16(initial_scale_power=101), ["The block `fp16` makes no loss scale", "initial"]),
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
