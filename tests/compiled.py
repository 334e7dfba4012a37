"""Programs as XLA makes them by default, whatever flags make the suite fast."""

from __future__ import annotations

from typing import Any

import jax

import jzero

DEFAULT_FUSIONS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None
"""Compiler options that undo what `tests/conftest.py` asks for."""


def analyze(*args: Any, **kwargs: Any) -> jzero.AnalysisReport:
    """Returns `jzero.analyze` of the program that XLA makes by default."""
    options = {} if "topology" in kwargs else {"compiler_options": DEFAULT_FUSIONS}
    return jzero.analyze(*args, **{**options, **kwargs})
