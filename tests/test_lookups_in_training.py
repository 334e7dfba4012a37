"""Tables beside what is frozen, adapted, of integers, clipped or on a disk: training equals plain optax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import shared
from tests.shared import whole
from tests.tiers import default_for

V, D, RANK = 961, 64, 3
TX = optax.sgd(0.5, momentum=0.9)  # Adam divides by rounding where gradients are tiny


def adapted(p, ids):
    """An embedding with adapters of a low rank."""
    return jnp.square(jnp.tanh(p["table"][ids] + p["lora_a"][ids] @ p["lora_b"]) @ p["w"]).mean()


def coded(p, ids):
    """Codes of a quantized table, which no optimizer knows."""
    return jnp.square((p["codes"][ids] / 7.0 + p["table"][ids]) @ p["w"]).mean()


def params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)
    codes = jnp.asarray(rng.integers(-7, 8, (V, D)), jnp.int32)
    tables = {"table": normal(V, D), "lora_a": normal(V, RANK), "lora_b": normal(RANK, D)}
    return {**tables, "w": normal(D, 5), "codes": codes}


def batch(seed):
    return np.random.default_rng(seed).integers(0, V, (48, 3)).astype(np.int32)


CASES = {
    "adapters": (adapted, ("lora_a", "lora_b"), ("codes",)),
    "a table of integers": (coded, ("table", "w"), ("lora_a", "lora_b")),
    "all": (adapted, ("table", "lora_a", "lora_b", "w"), ("codes",)),
}


ALL = list(itertools.product(CASES, (8, 3), (2, 3)))


@pytest.mark.parametrize(("case", "devices", "stage"), default_for([ALL[1], ALL[6], ALL[11]], ALL))
def test_tables_train_beside_others(case, devices, stage):
    loss, trained, absent = CASES[case]
    plain = {k: v for k, v in params().items() if k not in absent}
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    trainable = "|".join(trained)
    state = shared.sharded(plain, TX, stage, mesh=mesh, trainable=trainable)
    step = jzero.make_train_step(loss, clip_norm=0.1, accumulate_steps=2)
    assert ("table" in step.plan(state, batch(0)).lookups) == (stage == 3 or "table" in trained)
    assert "codes" not in step.plan(state, batch(0)).lookups

    tx = optax.chain(optax.clip_by_global_norm(0.1), TX)
    mine, frozen = ({k: v for k, v in plain.items() if (k in trained) == want} for want in (True, False))
    want = shared.by_optax(lambda p, ids: loss({**p, **frozen}, ids), mine, tx, map(batch, range(3)))
    for seed, norm in enumerate(want.norms):
        state, metrics = step(state, batch(seed))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    for name, x in whole(state.params).items():
        np.testing.assert_allclose(x, {**want.params, **frozen}[name], rtol=0, atol=2e-6, err_msg=name)
    value = jzero.make_eval_step(loss)(state, batch(9))
    np.testing.assert_allclose(value, loss({**want.params, **frozen}, batch(9)), rtol=1e-5)


@pytest.mark.parametrize("offload", ["disk", "delay"])
def test_tables_train_with_their_optimizer_elsewhere(offload, tmp_path):
    how = (
        {"optimizer": "disk", "path": tmp_path}
        if offload == "disk"
        else {"optimizer": "host", "compute": "host", "delay": 1}
    )
    states = []
    for options in (how, {}):
        plain = {k: v for k, v in params().items() if k != "codes"}
        state = shared.sharded(plain, TX, 3, offload=jzero.Offload(**options))
        step = jzero.make_train_step(adapted)
        for seed in range(2 if offload == "disk" else 1):
            state, _ = step(state, batch(seed))
        states.append(whole(jzero.apply_pending(state).params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), *states)
