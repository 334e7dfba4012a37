"""Rotary embeddings: what each kind needs, and YaRN: fast pairs keep their frequencies, slow ones are stretched."""

import numpy as np
import pytest

from jzero.weights.config import config_of
from jzero.weights.model_types import ROTARY, inverse_frequencies

HEAD_DIM, THETA, FACTOR = 24, 1e4, 8.0


@pytest.mark.parametrize(("context", "fast", "slow"), [(4096, 32, 1), (512, 16, 2)])
def test_frequencies_of_yarn(context, fast, slow):
    fields = {
        "rope_theta": THETA,
        "factor": FACTOR,
        "original_max_position_embeddings": context,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": False,
    }
    found, _ = inverse_frequencies("yarn", fields, HEAD_DIM)
    plain = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turns = context * plain / (2 * np.pi)
    kept = np.clip(np.log(turns / slow) / np.log(fast / slow), 0, 1)
    assert 0 < ((kept > 0) & (kept < 1)).sum() < len(plain)
    np.testing.assert_allclose(found, kept * plain + (1 - kept) * plain / FACTOR, rtol=1e-12)


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
