"""`jzero.from_deepspeed`: a verdict on every key of real configurations, written by hand, and what is refused.

`data/ds_configs/NAME.json` is a configuration in the manner of those in use, `NAME.expected.json` what becomes of it.
`data/deepspeed_golden.json` is what DeepSpeed itself makes of batch sizes, see `data/make_deepspeed_golden.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import warnings

import numpy as np
import optax
import pytest

import jzero
from jzero.deepspeed.facts import BatchSizes, solve_batch
from tests.deepspeed_configs import DATA, read, verdicts

CONFIGS = sorted(path.stem for path in (DATA / "ds_configs").glob("*.json") if "." not in path.stem)
REPORTED = ("train_batch_size", "micro_batch_size", "accumulate_steps", "clip_norm")


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


def test_every_key_and_field_is_the_expected_one(imported):
    assert len(CONFIGS) >= 12
    config, report, wanted = imported.config, imported.report, imported.expected
    assert verdicts(report) == wanted["verdicts"]
    assert all(row.note.strip() for row in report.rows), "each says why"
    precision = dict(wanted["precision"])
    if isinstance(precision.get("loss_scale"), dict):
        precision["loss_scale"] = jzero.DynamicLossScale(**precision["loss_scale"])
    fields = {**wanted["config"], "offload": jzero.Offload(**wanted["offload"])}
    fields["precision"] = jzero.Precision(**precision)
    fields["quantization"] = jzero.Quantization(**fields.get("quantization", {}))
    assert config == dataclasses.replace(jzero.ZeroConfig(stage=wanted["config"]["stage"]), **fields)
    numbers = wanted["report"]
    assert {name: getattr(report, name) for name in REPORTED} == {name: numbers[name] for name in REPORTED}
    assert (report.optimizer is not None, report.schedule is not None) == (
        numbers["has_optimizer"],
        numbers["has_schedule"],
    )
    assert json.loads(report.to_json())["rows"][0]["key"] == report.rows[0].key
    assert not list(missing(json.loads(path_of(imported.name).read_text()), {row.key for row in report.rows}))


def missing(block, rows, prefix=""):
    """Yields keys of which the expectation forgot one, too: each is a row, or lies in a block that is one."""
    for name, value in block.items():
        path = f"{prefix}{name}"
        if path not in rows:
            yield from missing(value, rows, f"{path}.") if isinstance(value, dict) else [path]


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


def test_the_dictionary_stays_as_it_is():
    config = json.loads(path_of("zero3_offload").read_text())
    jzero.from_deepspeed(config)
    assert config == json.loads(path_of("zero3_offload").read_text())


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
    assert "? micro-batches x ? devices, with `num_devices=` for the rest" in str(report)
    _, report = jzero.from_deepspeed(config, num_devices=8)
    assert "x 2 micro-batches x 8 devices\n" in str(report)
    assert report.step_arguments()["accumulate_steps"] == 2
    with pytest.warns(UserWarning, match="`gradient_accumulation_steps`"):
        _, auto = read({"gradient_accumulation_steps": "auto"}, num_devices=8)
    with pytest.raises(ValueError, match="'auto'"):
        auto.step_arguments()


def test_what_is_not_made_says_for_want_of_what():
    source = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    with pytest.warns(UserWarning, match="`scheduler.params.total_num_steps`"):
        _, report = jzero.from_deepspeed(source)
    assert report.optimizer is None
    assert report.schedule is None
    notes = {row.key: row.note for row in report.rows}
    assert notes["optimizer.type"].endswith("not built without `optimizer.params.lr`")
    assert notes["scheduler.type"].endswith("not built without `scheduler.params.total_num_steps`")
    assert notes["scheduler.params.total_num_steps"].endswith("here: not known")
    source["optimizer"]["params"]["lr"] = 1e-3
    source["scheduler"]["params"]["total_num_steps"] = 100
    assert "not built" not in str(jzero.from_deepspeed(source)[1])


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


@pytest.mark.parametrize(
    ("config", "says"),
    [({"train_batch_size": "auto"}, "open"), ({"bf16": {"enabled": "auto"}}, "not in the file: pass `batch_size=`")],
)
def test_the_batch_is_open_only_if_its_own_key_is(config, says):
    with pytest.warns(UserWarning, match="Nothing decides"):
        _, report = jzero.from_deepspeed(config)
    assert f"batch: {says}\n" in str(report)


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
AUTO = STOCK | {
    "fp16": {"enabled": "auto", "loss_scale": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
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


def test_a_trainers_names_that_the_file_does_not_use_change_nothing():
    source = {"train_batch_size": 8, "bfloat16": {"enabled": True}, "gradient_clipping": 0.5}  # as `ARGUMENTS` say
    (config, report), (same, like) = (jzero.from_deepspeed(source, auto=x) for x in ({}, ARGUMENTS))
    assert (config, report.rows) == (same, like.rows)


WARM = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-4}}
WRITTEN = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": (0.8, 0.95), "eps": "auto"}},
    "scheduler": WARM,
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7},
}


@pytest.mark.parametrize(
    "auto",
    [
        {"train_batch_size": 8},
        {"optimizer.params.lr": np.float64(2e-4)},
        {"zero_optimization.prefetch_bucket_size": 7},
        {"optimizer.params.betas": [0.8, 0.95]},
        {"learning_rate": 2e-4},  # whose floor is another one
        {"adam_beta1": 0.8},
        {"adam_beta2": 0.95, "max_grad_norm": 0.5, "bf16": True},
    ],
    ids=str,
)
def test_values_that_the_file_has_are_no_contradiction(auto):
    """A program passes all its arguments, whatever the file leaves open; a floor that the file has stays."""
    (config, report), (same, like) = (jzero.from_deepspeed(WRITTEN, auto=x) for x in ({}, auto))
    assert (config, report.rows) == (same, like.rows)
    (name, value), *_ = auto.items()
    with pytest.raises(ValueError, match=f"`auto` names '{name}'"):
        jzero.from_deepspeed(WRITTEN, auto={name: [0.1, 0.2] if isinstance(value, list) else value / 2})


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


ON, OFF = {"bf16": {"enabled": True}}, {"bf16": {"enabled": False}}


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ({"train_batch_size": 8}, {"batch_size": 16}, r"`batch_size=16` contradicts `train_batch_size` \(8\)"),
        (ON, {"precision": "fp16"}, r"`precision` \(fp16\) contradicts `bf16.enabled` \(True\)"),
        ({"train_batch_size": 8}, {"auto": {"train_batch_size": 16}}, r"`auto` names 'train_batch_size', which is not"),
        ({"train_batch_size": 8}, {"auto": {"lerning_rate": 1}}, "A trainer has .*'learning_rate'"),
        ({"gradient_clipping": 2}, {"auto": {"max_grad_norm": 1}}, r"It stands for \['gradient_clipping'\]: change"),
        (OFF, {"auto": {"bf16": True}}, r"It stands for \['bf16.enabled', 'fp16.enabled'\]"),
        (STOCK, {"auto": {"learning_rate": "fast"}}, r"`learning_rate` must be a number: got 'fast'"),
        (STOCK, {"auto": {"warmup_ratio": 0.1}}, r"`max_steps` must be known where `warmup_ratio` is"),
        ({}, {"batch_size": "8"}, "`batch_size` must be None or an integer >= 1: got '8'"),
        ({}, {"precision": "int8"}, "`precision` must be 'fp32', 'bf16', 'fp16' or a `Precision`: got 'int8'"),
        ({}, {"optimizer": "adam"}, "`optimizer` must be an optax transformation: got 'adam'"),
    ],
)
def test_arguments_that_decide_nothing(source, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jzero.from_deepspeed(source, **arguments)
