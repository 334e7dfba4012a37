"""Files from outside: what cannot be right is refused with the file and the field, before anything is made of it."""

import argparse
import contextlib
import json
import re
import types

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save_file

import adapters
import generate
import jzero
import jzero.hf
from jzero.core.config.documents import check_size
from jzero.core.config.settings import ANY
from jzero.deepspeed.schema import SCHEMA
from jzero.deepspeed.source import ACCELERATE_KEYS, FILE, OF_ACCELERATE, with_value
from jzero.weights import model_types
from jzero.weights.families import known_shapes, param_shapes, resolve_mapping
from jzero.weights.safetensors_files import find_tensors
from tests import hf_models

HUGE = 10**400
NUMBERS = st.one_of(st.booleans(), st.floats(), st.sampled_from([-1, 0, 1, 3, 10**9, 2**31, 2**63, HUGE, -HUGE]))
SCALARS = st.one_of(st.none(), NUMBERS, st.sampled_from(["", "8", "1e-6", "false", "auto", "("]))
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=2), x, max_size=2))
draws = hypothesis.settings(
    max_examples=200,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)


def refuses(read, name, file=""):
    """Calls a function, which returns what it returns, or `None` if it raises an error that has the name."""
    try:
        return read()
    except (ValueError, jzero.CheckpointError) as error:
        said = str(error)
        assert name in said, said
        assert file in said, said
        assert len(said) < 1500, said
    return None


def write(folder, name, fields):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(fields))
    return folder


# What is of the wrong kind, by hand.

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 56}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
NO_NUMBER = ("1e-6", True, None, [1.0], {}, float("nan"), float("inf"), -1.0, HUGE)
NO_SIZE = (*NO_NUMBER, 0, 8.0, 1.5, 10**30)
NO_SCALE = (*NO_NUMBER, 0)
NO_FLAG = ("false", 0, 1, None, [], 1.0)
NO_TEXT = (5, True, [], ["silu"], {})
BAD = {
    "llama vocab_size hidden_size num_hidden_layers num_attention_heads": NO_SIZE,
    "qwen3_moe num_experts_per_tok moe_intermediate_size": NO_SIZE,
    "llama head_dim intermediate_size max_position_embeddings": NO_SIZE,
    "llama num_key_value_heads": (*NO_SIZE, 3),  # which does not divide 4
    "mistral sliding_window": NO_SIZE,
    "mixtral num_local_experts": NO_SIZE,
    "llama rms_norm_eps": NO_SCALE,
    "llama rope_theta partial_rotary_factor": NO_SCALE,
    "gemma3_text rope_local_base_freq": NO_SCALE,
    "gemma2 query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping": NO_SCALE,
    "gpt_oss swiglu_alpha swiglu_limit": NO_SCALE,
    "olmoe router_aux_loss_coef": NO_NUMBER,
    "llama attention_bias mlp_bias tie_word_embeddings": NO_FLAG,
    "olmoe norm_topk_prob": NO_FLAG,
    "qwen3 use_sliding_window": NO_FLAG,
    "llama hidden_act model_type": NO_TEXT,
    "gemma2 hidden_activation": NO_TEXT,
    "llama dtype torch_dtype": (*NO_TEXT, "float99", "int8"),
    "llama rope_scaling rope_parameters": ("linear", 3, True, [], [{}]),
    "mistral layer_types": ("full_attention", 3, [1, 2], [[], []], {}, ["sliding_attention"]),
}
NULL = ("head_dim", "intermediate_size", "max_position_embeddings", "num_key_value_heads", "sliding_window")
NULL += ("num_local_experts", "rope_theta", "partial_rotary_factor", "rope_local_base_freq", "query_pre_attn_scalar")
NULL += ("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "dtype", "torch_dtype")
"""The fields that may be null."""
CASES = [(names.split()[0], field, values) for names, values in BAD.items() for field in names.split()[1:]]


@pytest.mark.parametrize(("family", "field", "values"), CASES, ids=lambda x: "" if isinstance(x, tuple) else x)
def test_values_of_the_wrong_kind_are_refused(family, field, values, tmp_path):
    heads = {"num_key_value_heads": 4} if family == "mistral" else {}
    experts = {"num_experts": 4} if field in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob") else {}
    for value in values:
        if value is not None or field not in NULL:
            write(tmp_path, "config.json", {"model_type": family, **SIZES, **heads, **experts, field: value})
            with pytest.raises(ValueError, match=rf"`{field}\b.* in .*config\.json"):
                jzero.hf.read_config(tmp_path)


ROTARY = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTARY |= {"original_max_position_embeddings": 32}


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", [x for x in ROTARY if x != "rope_type"])
def test_fields_of_rotary_embeddings_are_named(name, field, tmp_path):
    for value in ("8", True, [], {}, float("nan"), float("inf"), -1, 0, HUGE):
        write(tmp_path, "config.json", {"model_type": "llama", **SIZES, field: {**ROTARY, name: value}})
        with pytest.raises(ValueError, match=rf"`{field}\.{name}` in .*config\.json must"):
            jzero.hf.read_config(tmp_path)
    write(tmp_path, "config.json", {"model_type": "llama", **SIZES, field: {**ROTARY, "low_freq_factor": 4.0}})
    with pytest.raises(ValueError, match=rf"`{field}\.low_freq_factor`"):
        jzero.hf.read_config(tmp_path)


# What is drawn is refused by name, or makes a model.

FIELDS = model_types.COMMON | model_types.OWN


def test_every_field_that_is_read_has_its_values():
    assert {*FIELDS} == {*model_types.COMMON}.union(*map(set, model_types.FAMILIES.values()))
    assert {name for name, setting in FIELDS.items() if setting is ANY} == {"quantization_config", *model_types.ONLY}


@draws
@hypothesis.given(st.sampled_from(sorted(hf_models.FAMILIES)), st.sampled_from(sorted(FIELDS)), VALUES)
def test_any_value_in_config_json(tmp_path, family, field, value):
    write(tmp_path, "config.json", {**hf_models.fields(family), field: value})
    config = refuses(lambda: jzero.hf.read_config(tmp_path), field, "config.json")
    if config is not None:
        assert all(size > 0 for shape in param_shapes(config).values() for size in shape)
        assert np.isfinite(config.inverse_frequencies).all()
        assert 0 < config.attn_scale < np.inf
    refuses(lambda: known_shapes(tmp_path), field, "config.json")
    refuses(lambda: resolve_mapping("auto", tmp_path), field, "config.json")


PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A folder of adapters."""
    folder = tmp_path_factory.mktemp("adapter")
    home = "base_model.model.model.layers.0.self_attn.q_proj"
    ab = {f"{home}.lora_A.weight": np.zeros((2, 8), np.float32), f"{home}.lora_B.weight": np.zeros((8, 2), np.float32)}
    save_file(ab, folder / "adapter_model.safetensors")
    return folder


@draws
@hypothesis.given(st.sampled_from([*adapters.FIELDS, "of_a_newer_peft"]), VALUES)
def test_any_value_in_adapter_config_json(adapter, field, value):
    write(adapter, "adapter_config.json", {**PEFT, field: value})
    lora = refuses(lambda: adapters.read_lora(adapter), field, "adapter_config.json")
    assert lora is None or (lora.rank == 2 and 0 < lora.alpha < np.inf)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("r", (0, -2, True, "2", 2.0, None, 3, 10**9)),
        ("lora_alpha", (0, -4, True, "x", None, float("nan"), HUGE)),
        ("use_rslora", (1, "true", None)),
        ("target_modules", (5, "(", [5], {}, None, "(" * 10_000)),
        ("exclude_modules", (5, "*", [["q_proj"]])),
        ("target_parameters", (5, "x", [5], {"a": 1})),
    ],
)
def test_values_of_adapters_that_none_of_pefts_has(adapter, field, values):
    for value in values:
        write(adapter, "adapter_config.json", {**PEFT, field: value})
        with pytest.raises(ValueError, match=rf"`{field}.* in .*adapter_config\.json"):
            adapters.read_lora(adapter)


@draws
@hypothesis.given(st.sampled_from(["generation_config.json", "config.json"]), VALUES)
def test_any_value_as_the_end_of_an_answer(tmp_path, name, value):
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    write(tmp_path, name, {"eos_token_id": value})
    tokens = refuses(
        lambda: generate.stop_tokens(tmp_path, types.SimpleNamespace(eos_token_id=2)), "eos_token_id", name
    )
    assert tokens is None or all(type(x) is int and 0 <= x < 2**31 for x in tokens)


@pytest.mark.filterwarnings("ignore:jzero does not honour", "ignore:Nothing decides")
@draws
@hypothesis.given(
    st.sampled_from([*SCHEMA.keys, *SCHEMA.blocks]),
    VALUES,
    st.sampled_from([*SCHEMA.types["optimizer"]]),
    st.sampled_from([*SCHEMA.types["scheduler"]]),
    st.sampled_from([1, 3]),
)
def test_any_value_in_a_configuration_of_deepspeed(path, value, optimizer, schedule, stage):
    ends = {"total_num_steps": 9} if schedule in ("WarmupDecayLR", "WarmupCosineLR") else {}
    ends |= {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} if schedule == "OneCycle" else {}
    raw = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, "fp16": {"enabled": True}}
    raw |= {"optimizer": {"type": optimizer}, "scheduler": {"type": schedule, "params": ends}}
    raw = with_value(raw, path, value)
    found = refuses(lambda: jzero.from_deepspeed(raw, num_devices=2), path.rpartition(".")[2])
    if found is not None:
        assert found[1].to_json()
        assert str(found[1])


@pytest.mark.filterwarnings("ignore:jzero does not honour", "ignore:Nothing decides")
@draws
@hypothesis.given(
    st.sampled_from([*OF_ACCELERATE, *(f"deepspeed_config.{x}" for x in (FILE, *ACCELERATE_KEYS))]), VALUES
)
def test_any_value_in_a_configuration_of_accelerate(tmp_path, path, value):
    raw = with_value({"deepspeed_config": {"zero_stage": 2}}, path, value)
    name = path.rpartition(".")[2]
    name = ACCELERATE_KEYS.get(name, name).rpartition(".")[2]
    try:
        refuses(lambda: jzero.from_deepspeed(write_yaml(tmp_path, raw)), name)
    except OSError:
        assert name == FILE, "there is no such file"


def write_yaml(folder, raw):
    (folder / "a.yaml").write_text(json.dumps(raw))  # which is YAML, but for NaN and infinities
    return folder / "a.yaml"


@pytest.mark.parametrize("value", [10**400, 10**30, float("nan"), float("inf"), "1", True, [], {}, -1])
@pytest.mark.parametrize("key", ["gradient_clipping", "train_batch_size", "zero_optimization.reduce_bucket_size"])
def test_numbers_of_deepspeed_that_are_none(key, value):
    if (key, value) != ("gradient_clipping", 10**30):
        with pytest.raises(ValueError, match=rf"`{key}` must"):
            jzero.from_deepspeed(with_value({"train_batch_size": 8}, key, value))


def test_aliases_and_merged_blocks_of_yaml_may_not_multiply(tmp_path):
    file, head = tmp_path / "a.yaml", "deepspeed_config: {zero_stage: 2}\n"
    chain = [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]" for i in range(9)]
    merges = [f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 9)}]}}" for i in range(9)]
    for lines in (["a: &a [x,x,x,x,x,x,x,x,x]", *chain], ["a: &a {x: 1}", *merges], ["a: &a [*a]"]):
        file.write_text("\n".join([*lines, head]))
        with pytest.raises(ValueError, match=r"a\.yaml.*(holds more than 100,000 values|nested deeper than 50)"):
            jzero.from_deepspeed(file)
    file.write_text("a: &a {zero_stage: 2}\ndeepspeed_config: {<<: *a, gradient_clipping: 0.5}\n")
    assert jzero.from_deepspeed(file, batch_size=8, num_devices=2)[1].clip_norm == 0.5, "a few are fine"
    file.write_text(f"deepspeed_config: {{{FILE}: a.yaml}}\n")
    with pytest.raises(ValueError, match=rf"`{FILE}` .* is one of Accelerate"):
        jzero.from_deepspeed(with_value({}, f"deepspeed_config.{FILE}", str(file)))


# Files that are not what their names say.

NO_FILES = {
    "UTF-16": '{"train_batch_size": 8}'.encode("utf-16"),
    "Latin-1": '{"a": "é"}'.encode("latin-1"),
    "cut short": b'{"train_batch_size": ',
    "empty": b"",
    "a list": b"[1]",
    "a number": b"1" * 5000,
    "deep": b'{"a": ' * 100_000,
    "deep, and whole": b'{"a": ' * 60 + b"1" + b"}" * 60,
    "a key twice": b'{"train_batch_size": 8, "train_batch_size": 16}',
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_files_that_cannot_be_read_are_named(kind, adapter, tmp_path):
    readers = {
        "config.json": lambda: jzero.hf.read_config(tmp_path),
        "adapter_config.json": lambda: adapters.read_lora(tmp_path),
        "generation_config.json": lambda: generate.stop_tokens(tmp_path, argparse.Namespace(eos_token_id=0)),
        "model.safetensors.index.json": lambda: find_tensors(tmp_path),
        "ds_config.json": lambda: jzero.from_deepspeed(tmp_path / "ds_config.json"),
        "a.yaml": lambda: jzero.from_deepspeed(tmp_path / "a.yaml"),
    }
    for name, read in readers.items():
        (tmp_path / name).write_bytes(NO_FILES[kind])
        with pytest.raises((ValueError, jzero.CheckpointError), match=re.escape(name)):
            read()


@pytest.mark.parametrize(
    "where",
    ["../private.safetensors", "sub/../../private.safetensors", "{}/private.safetensors", "link/private.safetensors"],
)
def test_an_index_stays_in_its_folder(where, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "sub").mkdir()
    (model / "link").symlink_to(tmp_path)
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "private.safetensors")
    write(model, "model.safetensors.index.json", {"weight_map": {"w": where.format(tmp_path)}})
    with pytest.raises(jzero.CheckpointError, match=r"index\.json leads out of its folder"):
        find_tensors(model)


def test_the_files_of_an_index_may_be_links_as_in_the_hubs_cache(tmp_path, monkeypatch):
    snapshot, blobs = tmp_path / "snapshots" / "5f0a", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": np.arange(4, dtype=np.float32)}, blobs / "1a2b")
    write(blobs, "3c4d", {"weight_map": {"w": "model-00001-of-00001.safetensors"}})
    for name, blob in (("model-00001-of-00001.safetensors", "1a2b"), ("model.safetensors.index.json", "3c4d")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    monkeypatch.chdir(snapshot)
    for folder in (snapshot, ".", "../5f0a"):
        assert find_tensors(folder)[0]["w"].view(...).tolist() == [0, 1, 2, 3]


@draws
@hypothesis.given(st.sampled_from(["weight_map", "weight_map.w"]), VALUES | st.just("a\0b") | st.just("x" * 5000))
def test_any_value_in_an_index(tmp_path, path, value):
    index = with_value({"weight_map": {"w": "model.safetensors"}}, path, value)
    write(tmp_path, "model.safetensors.index.json", index)
    refuses(lambda: find_tensors(tmp_path), "model.safetensors.index.json")


@pytest.mark.parametrize(("numbers", "most", "fails"), [(4, 5, False), (5, 5, True), (0, 1, False)])
def test_a_document_may_hold_as_many_values_as_said(numbers, most, fails):
    """The block around counts, too."""
    with pytest.raises(ValueError, match=f"x holds more than {most} values") if fails else contextlib.nullcontext():
        check_size([1] * numbers, "x", most=most)
