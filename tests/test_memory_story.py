"""One account of a step's memory: the same states whoever is asked, and a verdict against the card's memory."""

import pytest

from jzero.analysis.ledger import Ledger
from jzero.plan.plan import BytesPerDevice

GIB = 2**30
STATES = BytesPerDevice(3 * GIB, GIB, 8 * GIB)


def test_a_ledger_says_what_it_knows():
    known = Ledger(STATES, 18 * GIB, 17 * GIB, 20 * GIB)
    assert (known.states_bytes, known.step_bytes, known.peak, known.left, known.fits) == (
        12 * GIB, 6 * GIB, 17 * GIB, 3 * GIB, True,
    )  # fmt: skip
    assert str(known).splitlines() == [
        "states  exact     12.00 GiB  parameters 3.00, gradients 1.00, optimizer 8.00",
        "step    reckoned   6.00 GiB  activations, gathered weights, logits",
        "peak    reckoned  18.00 GiB",
        "peak    compiled  17.00 GiB",
        "device  usable    20.00 GiB  fits: 3.00 GiB left",
    ]


@pytest.mark.parametrize(
    ("ledger", "fits", "verdict"),
    [
        (Ledger(STATES, limit=20 * GIB), None, "the states leave 8.00 GiB for the step"),
        (Ledger(STATES, limit=10 * GIB), False, "does not fit: the states alone take 2.00 GiB more"),
        (Ledger(STATES, 18 * GIB, limit=10 * GIB), False, "does not fit: the step takes 8.00 GiB more"),
        (Ledger(STATES, 18 * GIB), None, None),
    ],
)
def test_a_ledgers_verdict(ledger, fits, verdict):
    assert ledger.fits == fits
    last = str(ledger).splitlines()[-1]
    assert last.endswith(verdict) if verdict else last.endswith("jzero analyze")


def test_a_ledger_of_states_that_are_more_than_the_peak():
    """Stage 1 adds up whole gradients only if there are several micro-batches; the plan counts them."""
    step = str(Ledger(STATES, 11 * GIB)).splitlines()[1]
    assert "reckoned  -1.00 GiB" in step
    assert "never all there at once" in step


def test_a_small_ledger_has_small_units():
    assert "12.00 KiB  parameters 3.00, gradients 1.00, optimizer 8.00" in str(
        Ledger(BytesPerDevice(3072, 1024, 8192), host=512)
    )
