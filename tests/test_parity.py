"""Training with jzero equals training on one device with plain optax, for every optimizer, stage and world size.

In float64 nothing but a wrong formula can exceed 1e-9 after 20 steps. In fp32 the order of summation is the only
difference; optimizers that divide by small numbers (or take signs) amplify it, so those are held to a measured control:
one device and plain optax, with the batch summed in N slices.
"""

import contextlib
import itertools

import jax
import numpy as np
import pytest

from tests import optimizers
from tests.optimizers import OPTIMIZERS, deviation, run_plain, run_zero

pytestmark = [
    pytest.mark.filterwarnings("ignore:The mesh has one device"),
    pytest.mark.filterwarnings("ignore:The optimizer multiplies"),  # Muon here takes each stack of vectors for a matrix
]


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def test_several_optimizers_in_float64():
    """In one step; elementwise ones follow in fp32, and all of them in the slow tier."""
    with precision("float64"):
        run = run_zero("two layers", "every_third_step", "float64", 3, 8)
        loss, params = deviation(run, run_plain("two layers", "every_third_step", "float64"))
        assert loss < 1e-9
        assert params < 1e-9


@pytest.mark.parametrize(("optimizer", "stage", "num_devices"), [("sgd_momentum", 1, 3), ("lion", 3, 8)])
def test_the_order_of_summation_in_fp32(optimizer, stage, num_devices):
    plain = run_plain("one layer", optimizer, "float32")
    loss, params = deviation(run_zero("one layer", optimizer, "float32", stage, num_devices), plain)
    if optimizer == "sgd_momentum":
        assert loss < 1e-5
        assert params < 1e-5
        return
    # What two other orders of summation do on one device: a part of the batch for each device, and 24 parts.
    controls = [deviation(run_plain("one layer", optimizer, "float32", n), plain) for n in (num_devices, 24)]
    control = np.max(controls, axis=0)
    assert loss < max(1e-5, 3 * control[0])
    # A control can be luckily exact: 2e-6 is what rounding the parameters themselves 20 times may cost.
    assert params < max(3 * control[1], 2e-6)


# A GPT in float64 follows a recorded run in `test_deepspeed.py`.
@pytest.mark.parametrize(("stage", "num_devices"), [(0, 5), (1, 8), (2, 2), (3, 1)])
def test_every_stage_and_world_size_with_adamw(stage, num_devices):
    with precision("float64"):
        run = run_zero("one layer", "adamw", "float64", stage, num_devices)
        loss, params = deviation(run, run_plain("one layer", "adamw", "float64"))
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


CELLS = itertools.cycle([(3, 8), (1, 3), (2, 5), (3, 2), (1, 8)])


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "cell"), [*zip(OPTIMIZERS, CELLS, strict=False)])
def test_every_optimizer_in_float64(optimizer, cell):
    with precision("float64"):
        run = run_zero("two layers", optimizer, "float64", *cell)
        assert max(deviation(run, run_plain("two layers", optimizer, "float64"))) < 1e-9
