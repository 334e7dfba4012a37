"""Configurations of DeepSpeed, and what is read of them."""

from __future__ import annotations

import pathlib

import pytest

import jzero

DATA = pathlib.Path(__file__).parent / "data"
BATCH = {"train_batch_size": 8}


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
