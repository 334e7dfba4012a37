"""Optimizers, losses, steps and policies that take turns in one process: each must stay what it is when it comes alone.

Whatever is compiled or traced is kept somewhere, under a key. If a key leaves out a part of what the value depends on,
the first of two users passes its own on to the second. The reference is optax on one device, which keeps nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import shared
from tests.disk_states import two_devices
from tests.tiers import slow

WEIGHTS = {"w": np.linspace(-1, 1, 5 * 27, dtype=np.float32).reshape(5, 27)}
BATCH = np.sin(np.arange(16 * 5, dtype=np.float32)).reshape(16, 5)


LOSSES = {
    "squares": lambda params, batch: jnp.square(batch @ params["w"] - 1.0).mean(),
    "tanh": lambda params, batch: jnp.tanh(batch @ params["w"]).mean(),
}
STEPS = {"clipped": ("squares", 1e-2), "free": ("squares", None), "other loss": ("tanh", None)}
SCALED = jzero.Precision(loss_scale=128.0)  # a power of two: no value changes
STATES = {
    "downhill": (optax.sgd(1e-1, momentum=0.9), "fp32"),
    "uphill": (optax.sgd(-1e-1, momentum=0.9), "fp32"),  # its state has the same layout
    "scaled": (optax.sgd(1e-1, momentum=0.9), SCALED),
}
TURNS = 2 * [("downhill", "clipped"), ("uphill", "free"), ("downhill", "free"), ("scaled", "other loss")]
TURNS += [("downhill", "clipped"), ("downhill", "other loss"), ("uphill", "free")]
LAYOUTS = {
    "near": {},
    "host": {"optimizer": "host", "chunk_bytes": 2048},
    "disk": {"optimizer": "disk"},
    "delayed": {"optimizer": "host", "compute": "host", "delay": 1},
    "flow": {"optimizer": "host", "compute": "host", "zenflow": jzero.ZenFlow(topk_ratio=0, update_interval=1)},
}


class Reference:
    """Training on one device; if `waits`, each gradient is applied by the step after its own."""

    def __init__(self, tx, waits):
        self.tx, self.waits, self.params, self.pending = tx, waits, WEIGHTS, None
        self.opt_state = tx.init(WEIGHTS)

    def step(self, loss, clip_norm):
        grads = jax.grad(LOSSES[loss])(self.params, BATCH)
        if clip_norm is not None:
            norm = float(np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads))))
            factor = min(1.0, clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * factor, grads)
        grads, self.pending = (self.pending, grads) if self.waits else (grads, None)
        self.apply(grads)

    def apply(self, grads):
        if grads is not None:
            updates, self.opt_state = self.tx.update(grads, self.opt_state, self.params)
            self.params = optax.apply_updates(self.params, updates)


@pytest.mark.parametrize(
    ("layout", "stage"), [("disk", 3), ("delayed", 3), slow("near", 3), slow("host", 1), slow("flow", 1)]
)
def test_each_state_and_step_keeps_its_own(layout, stage, tmp_path):
    fields = LAYOUTS[layout] | ({"path": str(tmp_path)} if layout == "disk" else {})
    waits = layout in ("delayed", "flow")
    steps = {name: jzero.make_train_step(LOSSES[loss], clip_norm=clip) for name, (loss, clip) in STEPS.items()}
    states, expected = {}, {}
    for name, (tx, precision) in STATES.items():
        offload = jzero.Offload(**fields)
        states[name] = shared.sharded(WEIGHTS, tx, stage, mesh=two_devices(), precision=precision, offload=offload)
        expected[name] = Reference(tx, waits)
    for state, step in TURNS:
        states[state], _ = steps[step](states[state], BATCH)
        expected[state].step(*STEPS[step])
    for name, state in states.items():
        expected[name].apply(expected[name].pending)
        got = jzero.gather_params(jzero.apply_pending(state))
        for leaf, want in expected[name].params.items():
            # Of values up to 1, the order of summation changes a few units in the last place.
            np.testing.assert_allclose(got[leaf], want, rtol=0, atol=1e-6, err_msg=f"{name}, {leaf}")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["disk", "delayed"])
def test_a_step_that_overflows_is_skipped_by_an_optimizer_with_norms(layout, tmp_path):
    """LAMB reads records twice; a step that changes nothing reads none, and has none of its sums."""
    fields = LAYOUTS[layout] | ({"path": str(tmp_path)} if layout == "disk" else {})
    tx, huge, precision = optax.lamb(1e-2), np.float32(1e30) * BATCH, jzero.Precision(loss_scale=128.0)
    state = shared.sharded(WEIGHTS, tx, 3, mesh=two_devices(), precision=precision, offload=jzero.Offload(**fields))
    step, expected = jzero.make_train_step(LOSSES["squares"]), Reference(tx, waits=False)
    applied = []
    for batch in (huge, BATCH, huge):
        state, metrics = step(state, batch)
        applied.append(bool(metrics["step_applied"]))
    state = jzero.apply_pending(state)
    assert (applied, int(state.step)) == ([False, True, False], 1)
    expected.step("squares", None)
    np.testing.assert_allclose(jzero.gather_params(state)["w"], expected.params["w"], rtol=0, atol=3e-6)
