"""Training with jzero equals training on one device with plain optax, for every optimizer, stage and world size.

In float64 nothing but a wrong formula can exceed 1e-9 after 20 steps. In fp32 the order of summation is the only
difference; optimizers that divide by small numbers (or take signs) amplify it, so those are held to a measured control:
one device and plain optax, with the batch summed in N slices.
"""

from __future__ import annotations

import contextlib
import itertools

import jax
import numpy as np
import pytest

from tests import optimizers
from tests.optimizers import OPTIMIZERS, deviation, run_plain, run_zero
from tests.tiers import default_for

TIGHT = ("adam", "sgd_momentum", "lamb")  # parameters within 1e-5 in fp32
pytestmark = [
    pytest.mark.filterwarnings("ignore:The mesh has one device"),
    pytest.mark.filterwarnings("ignore:The optimizer multiplies"),  # Muon here takes each stack of vectors for a matrix
]


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@pytest.mark.parametrize(("model", "optimizer", "stage", "num_devices"), [("mlp", "every_third_step", 3, 8)])
def test_every_optimizer_in_float64(model, optimizer, stage, num_devices):
    """Several in one step; elementwise ones follow in fp32."""
    with precision("float64"):
        run = run_zero(model, optimizer, "float64", stage, num_devices)
        loss, params = deviation(run, run_plain(model, optimizer, "float64"))
        assert loss < 1e-9
        assert params < 1e-9


ALL = [("gpt", optimizer, *cell) for optimizer in OPTIMIZERS for cell in ((3, 8), (1, 3))]
FP32 = [("one layer", "sgd_momentum", 1, 3), ("one layer", "lion", 3, 8)]


@pytest.mark.parametrize(("model", "optimizer", "stage", "num_devices"), default_for(FP32, FP32 + ALL))
def test_every_optimizer_in_fp32(model, optimizer, stage, num_devices):
    plain = run_plain(model, optimizer, "float32")
    loss, params = deviation(run_zero(model, optimizer, "float32", stage, num_devices), plain)
    if optimizer in TIGHT:
        assert loss < 1e-5
        assert params < 1e-5
        return
    # What two other orders of summation do on one device: a part of the batch for each device, and 24 parts.
    controls = [deviation(run_plain(model, optimizer, "float32", n), plain) for n in (num_devices, 24)]
    control = np.max(controls, axis=0)
    assert loss < (max(1e-5, 3 * control[0]) if optimizer == "lion" else 1e-5)
    # A control can be luckily exact: 2e-6 is what rounding the parameters themselves 20 times may cost.
    assert params < max(3 * control[1], 2e-6)


# A GPT in float64 follows a recorded run in `test_deepspeed_optimizers.py`.
CELLS = [("one layer", *cell) for cell in ((0, 5), (1, 8), (2, 2), (3, 1))]


@pytest.mark.parametrize(("model", "stage", "num_devices"), CELLS)
def test_every_stage_and_world_size_with_adamw(model, stage, num_devices):
    with precision("float64"):
        run = run_zero(model, "adamw", "float64", stage, num_devices)
        loss, params = deviation(run, run_plain(model, "adamw", "float64"))
        assert loss < 1e-9
        assert params < 1e-9


@pytest.mark.smoke
def test_losses_of_the_reference_fall():
    """The comparison means something: the reference itself trains, so its parameters move far beyond the tolerance."""
    with precision("float64"):
        run = run_plain("one layer", "adamw", "float64")
        start, _, _ = optimizers.problem("one layer", "float64")
    assert run.losses[-1] < run.losses[0]
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), run.params, start)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["two layers", "gpt"])
def test_full_matrix_in_float64(model, optimizer, record_property):
    worst = {}
    with precision("float64"):
        for stage, num_devices in itertools.product([0, 1, 2, 3], [1, 2, 3, 5, 8]):
            run = run_zero(model, optimizer, "float64", stage, num_devices)
            worst[stage, num_devices] = deviation(run, run_plain(model, optimizer, "float64"))
    for key, value in worst.items():
        record_property(str(key), str(value))
    assert max(max(pair) for pair in worst.values()) < 1e-9, worst
