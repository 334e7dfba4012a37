"""Frequencies of YaRN, by what it says of them: fast pairs keep theirs, slow ones are stretched, others in between."""

import numpy as np
import pytest

from jzero.weights.model_types import inverse_frequencies

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
