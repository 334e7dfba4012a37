"""Named scopes: in a profile, every collective and operation of a step says which part of ZeRO it belongs to."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import shared
from tests.tiers import slow

WIDTH, LAYERS, CLASSES = 32, 3, 19


def scanned_state(tx, **config):
    rng = np.random.default_rng(0)
    params = {
        "layers": {"kernel": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 6, "bias": np.zeros((LAYERS, WIDTH))},
        "head": rng.normal(size=(WIDTH, CLASSES)),
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return shared.sharded(params, tx, persistence_threshold=50, **config)


def scanned_loss(params, batch):
    def layer(x, weights):
        return jnp.tanh(x @ weights["kernel"] + weights["bias"][None]), None

    x, _ = jax.lax.scan(layer, batch, params["layers"])
    return jax.nn.logsumexp(x @ params["head"], axis=-1).mean()


def operations(text):
    """Returns `(opcode, op_name)` of the instructions of a compiled program."""
    found = re.findall(r'= [^=]*? ([a-z-]+)\([^\n]*?op_name="([^"]*)"', text)
    assert len(found) > 100
    return found


def scope(op_name):
    """Returns the innermost of ZeRO's scopes that an operation is in."""
    found = re.findall(r"zero_\w+", op_name)
    return found[-1] if found else None


@pytest.mark.smoke
@pytest.mark.parametrize(("stage", "accumulate_steps"), [(2, 2), (3, 1), slow(1, 2)])
def test_every_part_of_a_step_is_in_its_scope(stage, accumulate_steps):
    state = scanned_state(optax.rmsprop(1e-3), stage=stage)
    step = jzero.make_train_step(scanned_loss, clip_norm=1.0, accumulate_steps=accumulate_steps)
    found = operations(step.lower(state, np.ones((32, WIDTH), np.float32)).compile().as_text())
    names = collections.defaultdict(list)
    for opcode, name in found:
        names[opcode].append(name)

    dots = names["dot"]
    assert {scope(name) for name in dots} == {"zero_compute"}
    assert any("transpose(" in name and "while/body" in name for name in dots), "the backward pass of a scan"
    assert any("transpose(" not in name and "while/body" in name for name in dots), "the forward pass of a scan"

    scatters = names["reduce-scatter"]
    assert {scope(name) for name in scatters} == {"zero_reduce"}
    assert any("while/body" in name for name in scatters) == (stage > 1 or accumulate_steps == 1)
    # What is left is numbers: the loss and the norm of the gradients, which is the optimizer's.
    assert {scope(name) for name in names["all-reduce"]} <= {"zero_reduce", "zero_update"}

    gathers = [scope(name) for name in names["all-gather"]]
    if stage == 3:
        assert {"zero_gather"} <= set(gathers) <= {"zero_gather", "zero_update"}, "the biases are whole"
        in_scans = [name for name in names["all-gather"] if "zero_gather" in name and "while/body" in name]
        assert any("transpose(" in name for name in in_scans), "gathered again in the backward pass"
        assert any("transpose(" not in name for name in in_scans)
    else:
        assert set(gathers) == {"zero_update"}, "updated parameters, gathered by the compiler"

    # The only roots: those of rmsprop and of the norm. The loss has none.
    roots = names["sqrt"] + names["rsqrt"]
    assert len(roots) >= 3
    assert {scope(name) for name in roots} == {"zero_update"}
    assert max(name.count("zero_update") for _, name in found) == 1, "entered once"
