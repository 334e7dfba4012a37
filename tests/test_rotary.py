"""Rotary embeddings of published models: what each kind needs."""

import pytest

from jzero.weights.config import config_of
from jzero.weights.model_types import ROTARY

NUMBERS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("kind", ROTARY)
def test_what_each_kind_needs(kind):
    refused = lambda **fields: [str(x) for x in config_of("f", {**LLAMA, "rope_parameters": fields})[1]]
    whole = {"rope_type": kind, **{name: NUMBERS[name] for name in ROTARY[kind]}}
    others = refused(rope_type="default")
    assert refused(**whole) == others
    for name in ROTARY[kind]:
        (why,) = {*refused(**whole | {name: None})} - {*others}
        assert why == f"`rope_parameters` in f lacks {name}, which its kind {kind!r} needs."
    if kind == "llama3":
        (why,) = {*refused(**whole | {"low_freq_factor": 4.0})} - {*others}
        assert "those below `high_freq_factor`" in why
