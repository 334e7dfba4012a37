"""Texts of values that processes compare are equal exactly if the values are."""

import ml_dtypes
import numpy as np
import pytest

from jzero.core.processes.fingerprints import COLUMNS, describe_value

ROW = 8 * COLUMNS  # bytes


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("size", [8, ROW - 8, ROW, ROW + 8, 5 * ROW + 24])
def test_any_changed_bit_changes_the_text(dtype, size):
    data = np.random.default_rng(size).integers(0, 64, size, np.uint8)  # no NaN
    text = describe_value("x", data.view(dtype))
    assert text == describe_value("x", data.copy().view(dtype))
    for place in {0, size // 2, size - 1, size - ROW // 2} & set(range(size)):
        changed = data.copy()
        changed[place] ^= 1
        assert describe_value("x", changed.view(dtype)) != text
    assert describe_value("x", np.roll(data, dtype(0).itemsize).view(dtype)) != text
