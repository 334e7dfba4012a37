"""`config.json`: both spellings, and what is refused."""

import json

import numpy as np
import pytest

import jzero.hf
from jzero.weights.model_types import COMMON, FAMILIES
from tests.hf_models import SIZES, STRETCHED

LLAMA = {"model_type": "llama", **SIZES}


def read(folder, **fields):
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return jzero.hf.read_config(folder)


@pytest.mark.smoke
def test_both_spellings_mean_the_same(tmp_path):
    old = read(tmp_path, rope_theta=5e5, rope_scaling=STRETCHED, torch_dtype="bfloat16")
    new = read(tmp_path, rope_parameters={"rope_theta": 5e5, **STRETCHED}, dtype="bfloat16")
    assert old == new
    assert new.dtype == "bfloat16"
    # Pairs turn by theta^(-2i/6): 1 and 0.0126 and 0.000159 per position. 32 tokens hold 5.1, 0.064 and 0.0008 turns.
    np.testing.assert_allclose(new.inverse_frequencies[0], [1, 5e5 ** (-1 / 3) / 8, 5e5 ** (-2 / 3) / 8], rtol=1e-12)
    assert jzero.hf.read_config(tmp_path / "config.json") == new, "the file will do"


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_gemma_3_turns_local_layers_faster(tmp_path, spelling):
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    }
    fields = {"model_type": "gemma3_text", "head_dim": 6, "sliding_window": 8, "sliding_window_pattern": 2}
    config = read(tmp_path, **fields, **(old if spelling == "old" else new))
    assert config.windows == (8, None, 8)
    np.testing.assert_allclose(config.inverse_frequencies[0], [1e4 ** (-i / 3) for i in range(3)])
    np.testing.assert_allclose(config.inverse_frequencies[1], [1e6 ** (-i / 3) / 8 for i in range(3)])
    assert (config.tied, config.gelu, config.unit_norm, config.embed_scale) == (True, True, True, 6.0)


def test_windows_are_those_of_the_family(tmp_path):
    assert read(tmp_path, model_type="mistral", sliding_window=8).windows == (8, 8, 8)
    assert read(tmp_path, model_type="mistral", sliding_window=None).windows == (None, None, None)
    assert read(tmp_path, model_type="qwen2", sliding_window=8, use_sliding_window=False).windows == (None,) * 3
    some = read(tmp_path, model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert some.windows == (None, None, 8)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert read(tmp_path, model_type="mistral", sliding_window=8, layer_types=types).windows == (None, 8, None)
    assert read(tmp_path, model_type="gemma2", sliding_window=8, layer_types=types).windows == (None, 8, None)


def test_a_family_reads_its_own_fields_only(tmp_path):
    """As `transformers` does: others change nothing, whatever their values."""
    every = {name: value for family in FAMILIES.values() for name, value in family.items() if name not in COMMON}
    others = {name: 0.1 if isinstance(value, float) else 7 for name, value in every.items()}
    for family, own in FAMILIES.items():
        mixture = {"num_experts": 7, "num_experts_per_tok": 2} if "num_experts" in own else {}
        plain = read(tmp_path, model_type=family, head_dim=6, **mixture)
        ignored = {name: value for name, value in others.items() if name not in own}
        assert {"llama": 9, "gemma2": 6}.get(family, 3) <= len(ignored)
        assert read(tmp_path, model_type=family, head_dim=6, **mixture, **ignored) == plain, family


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "`model_type` .*got 'mamba'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "`rope_scaling.rope_type` .*dynamic"),
        ({"rope_scaling": {"type": "linear"}}, r"`rope_scaling` .* lacks factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quantization_config` .*gptq"),
        ({"is_causal": False}, r"`is_causal` .* is False"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, r"`use_bidirectional_attention` .* is True"),
        ({"hidden_act": "relu"}, "`hidden_act` .*'relu'"),
        ({"partial_rotary_factor": 0.5}, r"`partial_rotary_factor` .* is 0\.5"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, r"`layer_types` .* 3 layers"),
        ({"num_hidden_layers": None}, "`num_hidden_layers` .*got None"),
        ({"model_type": "mixtral"}, "`num_experts` .*got None"),
        (
            {"model_type": "olmoe", "num_experts": 2, "num_experts_per_tok": 3},
            "`num_experts_per_tok` .* 2 experts: got 3",
        ),
        ({"model_type": "olmoe", "num_experts": 8, "clip_qkv": 7.0}, r"`clip_qkv` .* is 7\.0"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0]}, r"`mlp_only_layers` .* is \[0\]"),
        ({"head_dim": 9}, r"`head_dim` .* must be even.* got 9"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **fields)


def test_no_config_or_none_that_can_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"Pass a model.s folder: there is no .*config\.json"):
        jzero.hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        jzero.hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="got a list"):
        jzero.hf.read_config(tmp_path)
