"""What backward passes on GPUs wait for: gradients of what comes after a loop or a recomputed layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero import _compat
from tests.prefetch_models import on


def head_after_a_loop(p, batch):
    hidden = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, p["stack"])[0]
    return jax.nn.logsumexp(hidden @ p["head"], axis=-1).mean()


@pytest.mark.parametrize(
    ("platform", "options", "waits"),
    [
        ("gpu", {"stage": 1}, True),
        ("gpu", {"stage": 2}, True),
        ("gpu", {"stage": 3}, True),
        ("gpu", {"stage": 3, "reshard_after_forward": False}, True),
        ("gpu", {"stage": 3, "rules": {"head": jzero.LeafRule(persistent=True)}}, False),
        ("tpu", {"stage": 2}, False),
        ("tpu", {"stage": 3}, False),
        ("cpu", {"stage": 3}, False),
    ],
)
def test_the_backward_loop_waits_for_the_gradient_of_the_head(platform, options, waits, monkeypatch):
    """Else compilers for GPUs put off the product that makes it, and keep the gradient of the logits meanwhile."""
    on(platform, monkeypatch)
    rng = np.random.default_rng(0)
    sizes = {"stack": (5, 32, 32), "head": (32, 512)}
    params = {name: rng.normal(size=size).astype(np.float32) / 6 for name, size in sizes.items()}
    config = jzero.ZeroConfig(persistence_threshold=0, **options)
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)
    batch = rng.normal(size=(16, 32)).astype(np.float32)
    step = jzero.make_train_step(head_after_a_loop)
    assert ((32, 512 // 8) in waited_for_by_loops(step, state, batch)) == waits
    if platform != "gpu" or options != {"stage": 3}:
        return
    loss, grads = jzero.value_and_grad(head_after_a_loop)(state, batch)
    want_loss, want = jax.jit(jax.value_and_grad(head_after_a_loop))(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), grads, want)


def waited_for_by_loops(fn, *args, kinds=("zero_reduce",)):
    """The shapes of what is reduced over devices, or of other results, before some loop begins."""
    found = set()

    def search(jaxpr):
        needs = {}
        for eqn in jaxpr.eqns:
            of_inputs = [needs.get(v, frozenset()) for v in eqn.invars if not _compat.is_literal(v)]
            needed = frozenset().union(*of_inputs)
            if eqn.primitive.name in ("scan", "while"):
                found.update(needed)
            if eqn.primitive.name in kinds:
                needed |= {v.aval.shape for v in eqn.outvars}
            needs.update(dict.fromkeys(eqn.outvars, needed))
            for inner in _compat.contained_jaxprs(eqn):
                search(inner)

    search(_compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0])
    return found
