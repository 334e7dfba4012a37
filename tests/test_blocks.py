"""What is recomputed by default and by `remat="cheap"`: scans, and the blocks of unrolled models, one by one."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jzero
from jzero.core.base import compat
from jzero.core.engine.recompute import recompute
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.primitives import REMAT
from jzero.core.jaxpr.repeats import keeps_heavy, split_into_parts
from tests import shared
from tests.block_models import LAYERS, WIDTH, layer, loss_fn, make_batch, make_params, num_activations


def parts(fn, *args):
    return split_into_parts(compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0])


def sharded(params, stage=3, **fields):
    return shared.sharded(params, shared.sgd(1.0), stage, **fields)


def test_several_kinds_of_layers_are_found():
    """An encoder and a decoder, say: the longer row first, then what is before it and after it."""

    def loss(params, batch):
        x = jnp.sin(batch @ params["first"])
        for block in params["blocks"][:3]:
            x = x + jnp.cos(x) @ block["up"] @ block["down"]
        x = x * 2 + 1
        for block in params["blocks"]:
            x = layer(block, x)
        x = x - 1
        for block in params["blocks"][:2]:
            x = jnp.exp(x @ block["up"]) @ block["down"]
        return jnp.square(x).mean()

    blocks = [part for part in parts(loss, make_params(), make_batch()) if part.is_block]
    names = [[eqn.primitive.name for eqn in part.eqns] for part in blocks]
    assert [("cos" in x, "tanh" in x, "exp" in x) for x in names] == [
        *[(True, False, False)] * 3,
        *[(False, True, False)] * LAYERS,
        *[(False, False, True)] * 2,
    ]
    assert {x.count("dot_general") for x in names} == {2}


def kept_by_policy(fn, *args):
    """What the policy says of each operation of a function, calls looked into: `{(name, shape): is kept}`."""
    found = {}

    def search(jaxpr):
        for eqn in jaxpr.eqns:
            inner = list(compat.contained_jaxprs(eqn))
            for x in inner:
                search(x)
            if not inner:
                keeps = keeps_heavy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
                found[eqn.primitive.name, *eqn.outvars[0].aval.shape] = keeps

    search(compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0])
    return found


def test_products_sorting_and_random_numbers_are_kept():
    found = kept_by_policy(lambda x: jax.random.normal(jax.random.key(0), x.shape) @ jnp.sort(x), jnp.ones((4, 4)))
    assert found["dot_general", 4, 4]
    assert found["sort", 4, 4]
    assert found["random_bits", 4, 4]


def test_of_transforms_only_real_results_are_kept():
    found = kept_by_policy(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 1j, 6), jnp.ones((4, 6)))
    assert found["fft", 4, 6]
    assert not found["fft", 4, 4]


LIGHT_FUNCTIONS = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "rms norm": lambda x: x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6),
    "layer norm": lambda x: nn.LayerNorm().apply({"params": {"scale": jnp.ones(6), "bias": jnp.ones(6)}}, x),
    "rotation": lambda x: jnp.concatenate([x[:, :3] * jnp.cos(x[:, 3:]), x[:, 3:] * jnp.sin(x[:, :3])], -1),
    "complex rotation": lambda x: jnp.real(jax.lax.complex(x, x) * jnp.exp(1j * x)),
    "soft cap": lambda x: 30 * jnp.tanh(x / 30),
    "masked": lambda x: jnp.where(jnp.tril(jnp.ones((4, 6), bool)), x, -jnp.inf).max(-1),
    "root": lambda x: jnp.sqrt(jnp.abs(x) + 1) + jnp.cbrt(x) + jnp.log2(jnp.abs(x) + 1) + jnp.arctan(x),
    "power": lambda x: jnp.abs(x) ** 1.5 + x**3,
}


@pytest.mark.smoke
@pytest.mark.parametrize("fn", LIGHT_FUNCTIONS.values(), ids=LIGHT_FUNCTIONS.keys())
def test_activations_and_norms_are_recomputed(fn):
    """In all that differentiation makes of them, too, in this version of jax: whatever is unknown would be kept."""
    found = kept_by_policy(jax.value_and_grad(lambda x: jnp.sum(fn(x))), jnp.ones((4, 6)))
    assert found
    assert not {name for (name, *_), keeps in found.items() if keeps}


@pytest.mark.parametrize(
    ("a", "b", "batched", "is_kept", "why"),
    [
        ((8, 512, 64), (8, 512, 64), True, False, "64 terms for each element of a result larger than both operands"),
        ((8, 512, 512), (8, 512, 512), True, True, "512 terms of 2 bytes: 512 operations per byte"),
        ((8, 512, 256), (8, 512, 256), True, True, "exactly 256 operations per byte"),
        ((8, 512, 255), (8, 512, 255), True, False, "just below"),
        ((8, 16, 64), (8, 16, 64), True, True, "the result is smaller than the operands"),
        ((8, 2, 64), (8, 512, 64), True, True, "smaller than one of them"),
        ((512, 8), (512, 8), False, True, "no batch: an activation by a weight"),
        ((8, 512, 0), (8, 512, 0), True, True, "nothing to sum"),
    ],
)
def test_which_products_are_computed_again(a, b, batched, is_kept, why):
    last = len(a) - 1
    numbers = (((last,), (last,)), (((0,), (0,)) if batched else ((), ())))
    product = lambda a, b: jax.lax.dot_general(a, b, numbers)
    found = kept_by_policy(product, *(jnp.ones(x, jnp.bfloat16) for x in (a, b)))
    assert list(found.values()) == [is_kept], why


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["plain", "jit"])
def test_each_block_keeps_its_products_alone(wrap):
    params, batch = make_params(), make_batch()
    jaxpr = jax.make_jaxpr(wrap(loss_fn))(params, batch)
    leaves = jax.tree.leaves((params, batch))
    rewritten = recompute(jaxpr, "cheap", [])
    assert sum(eqn.primitive.name in REMAT for eqn in equations_of(rewritten)) == LAYERS
    # What the backward pass gets: of each layer its input, its first product, and its weights.
    kept = kept_of(lambda *xs: jaxpr_as_fun(rewritten)(*xs)[0], *leaves)
    kept = [x.shape for x in kept if x.shape == (24, 64)]
    assert len(kept) == LAYERS  # without: the square's input, its result, the derivative of tanh, and so on
    assert len([x for x in kept_of(loss_fn, params, batch) if x.shape == (24, 64)]) >= 2 * LAYERS


def kept_of(fn, *args):
    """The shapes of what a function keeps for its backward pass."""
    return jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))


def counting_loss(wrap):
    """A callback has no derivative; nor have whole numbers that layers hand on."""

    def counting(w, x, count, batch):
        twice = jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(batch.shape, batch.dtype), batch)
        return layer(w, x) + twice.mean(), count + (x > 0).sum()

    def loss(params, batch):
        x, count = jnp.sin(batch @ params["first"]), jnp.zeros((), jnp.int32)
        for block in params["blocks"]:
            x, count = wrap(counting)(block, x, count, batch)
        return jnp.square(x).mean() * (1 + count % 2)

    return loss


@functools.cache
def counted_on_one_device():
    """The mean over eight parts of the batch."""
    loss, batch = counting_loss(lambda fn: fn), make_batch()
    mean = lambda params: jax.lax.map(lambda x: loss(params, x), batch.reshape(8, -1, batch.shape[1])).mean()
    return jax.jit(jax.value_and_grad(mean))(make_params(2))


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint], ids=["by default", "by the loss"])
def test_what_depends_on_the_batch_alone_needs_no_derivative(wrap):
    params = make_params(2)
    new, metrics = jzero.make_train_step(counting_loss(wrap))(sharded(params), make_batch())
    want_loss, want = counted_on_one_device()
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-6)
    for old, x, g in zip(*map(jax.tree.leaves, (params, shared.whole(new.params), want)), strict=True):
        # Sums over the batch in another order: float32's rounding, relative to the largest element.
        np.testing.assert_allclose(old - x, g, rtol=1e-4, atol=1e-5 * float(jnp.abs(g).max()) + 1e-7)


# What is recomputed by default, and where.


def make_stack():
    blocks = make_params()["blocks"]
    return {name: np.stack([block[name] for block in blocks]) for name in ("up", "down")}


@pytest.mark.parametrize(
    ("fields", "remat", "expected"),
    [
        ({}, None, "cheap"),
        ({}, "as_written", "as_written"),
        ({"reshard_after_forward": False}, None, "as_written"),
        ({"persistence_threshold": 10**6}, None, "as_written"),
        ({"stage": 2}, None, "as_written"),
        ({"stage": 2}, "cheap", "cheap"),
    ],
)
def test_layers_are_recomputed_by_default_where_parameters_are_gathered_again(fields, remat, expected):
    step = jzero.make_train_step(loss_fn, remat=remat)
    assert step.recomputation(sharded(make_params(2), **fields), make_batch()) == expected


def test_what_is_recomputed_by_default_is_told():
    notes = jzero.analyze(jzero.make_train_step(loss_fn), sharded(make_params(2)), make_batch()).notes
    assert any('`remat="as_written"` keeps what the loss keeps' in note for note in notes)


def test_gradients_outside_of_a_step_are_recomputed_alike():
    state, gradients = sharded(make_params()), jzero.value_and_grad
    fns = (gradients(loss_fn), gradients(loss_fn, remat="as_written"), jzero.make_eval_step(loss_fn))
    jaxprs = [compat.open_jaxpr(jax.make_jaxpr(fn)(state, make_batch()))[0] for fn in fns]
    differentiated, as_written, evaluated = map(num_activations, jaxprs)
    assert differentiated == 2 * LAYERS
    assert as_written == evaluated == LAYERS


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_what_prints_is_not_run_twice(scan, capfd):
    """`jax.debug.print` in a layer: a recomputed one would say everything again."""

    def noisy(w, x):
        jax.debug.print("a layer: {}", x[0, 0])
        return layer(w, x)

    def loss(params, batch):
        if scan:
            return jnp.square(jax.lax.scan(lambda x, w: (noisy(w, x), None), batch, params)[0]).mean()
        for block in params["blocks"]:
            batch = noisy(block, batch)
        return jnp.square(batch).mean()

    params, batch = (make_stack() if scan else make_params()), np.ones((24, WIDTH), np.float32)
    jax.block_until_ready(jzero.make_train_step(loss)(sharded(params), batch))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("a layer") == LAYERS * jax.device_count()


def test_an_option_that_changes_nothing_says_so():
    """At stage 3 it says that parameters do not stay either."""
    states = {stage: sharded(make_params(1), stage=stage) for stage in (2, 3)}
    with pytest.warns(UserWarning, match="`remat='cheap'` changes nothing"):
        jzero.make_train_step(loss_fn, remat="cheap").trace(states[2], make_batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jzero.make_train_step(loss_fn, remat="cheap").trace(states[3], make_batch())
        jzero.make_train_step(loss_fn).trace(states[2], make_batch())
