"""Losses that use parameters in every way that the engine must follow, one each."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jzero
from tests import shared
from tests.drawn import to_jax
from tests.shared import whole

D = 24


def params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: to_jax(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), jnp.float32)
    return {
        "w": normal(D, D),
        "v": normal(D, 17),
        "b": normal(D * 5)[:D],
        "odd": normal(13, 11),
        "stack": {"w": normal(6, D, D), "b": normal(6, D)},
        "unused": normal(D, D),
    }


def batch(rows=24):
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(rows, D)).astype(np.float32), "y": rng.normal(size=(rows, 17)).astype(np.float32)}


def out(p, h, batch):
    return jnp.square(h @ p["v"] - batch["y"]).mean()


def plain(p, batch):
    return out(p, jnp.tanh(batch["x"] @ p["w"] + p["b"][None]), batch)


def scan(p, batch):
    body = lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), None)
    return out(p, lax.scan(body, batch["x"], p["stack"])[0], batch)


def scan_reversed_with_outputs(p, batch):
    body = lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), (layer["b"] * 2).sum())
    h, ys = lax.scan(body, batch["x"], p["stack"], reverse=True, unroll=2)
    return out(p, h, batch) + ys.sum()


def scan_carrying_weights(p, batch):
    body = lambda carry, _: ((jnp.tanh(carry[0] @ carry[1]), carry[1]), None)
    return out(p, lax.scan(body, (batch["x"], p["w"]), None, length=3)[0][0], batch)


def fori_indexing_the_stack(p, batch):
    def body(i, h):
        layer = jax.tree.map(lambda x: x[i], p["stack"])
        return jnp.tanh(h @ layer["w"] + layer["b"][None])

    return out(p, lax.fori_loop(0, 6, body, batch["x"]), batch)


def remat(p, batch):
    block = jax.checkpoint(lambda w, b, h: jnp.tanh(h @ w + b[None]))
    return out(p, block(p["w"], p["b"], block(p["w"], p["b"], batch["x"])), batch)


def remat_with_policy(p, batch):
    policy = jax.checkpoint_policies.everything_saveable
    block = jax.checkpoint(lambda w, b, h: jnp.sin(jnp.tanh(h @ w.T.reshape(D, D) + b[None])), policy=policy)
    return out(p, block(p["w"], p["b"], batch["x"]), batch)


def scan_of_remat(p, batch):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    body = jax.checkpoint(lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), None), policy=policy)
    return out(p, lax.scan(body, batch["x"], p["stack"])[0], batch)


@jax.jit
def _inner(w, b, h):
    return jnp.tanh(h @ w + b[None])


def nested_jit(p, batch):
    outer = jax.jit(lambda q, h: (_inner(q["w"], q["b"], h), q))
    h, q = outer(p, batch["x"])
    return out(q, _inner(q["w"], q["b"], h), batch)


def jit_casting_all_parameters(p, batch):
    half = jax.jit(lambda q: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), q))(p)
    return plain(half, batch)


def branches(p, batch):
    h = lax.cond(batch["x"].sum() > 0, lambda q, x: x @ q["w"], lambda q, x: x * q["b"][None], p, batch["x"])
    h = lax.switch(jnp.int32(1), [lambda x: x, lambda x: x @ p["w"] + p["b"][None], jnp.sin], h)
    return out(p, jnp.tanh(h), batch)


def while_loop(p, batch):
    steps = lax.while_loop(lambda c: (c[1] * jnp.abs(p["b"]).max()) < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0))[0]
    return plain(p, batch) * lax.stop_gradient(steps.astype(jnp.float32))


@jax.custom_vjp
def scaled(w, h):
    return jnp.sin(h @ w)


scaled.defvjp(lambda w, h: (scaled(w, h), (w, h)), lambda r, g: ((r[1].T @ g), 2 * (g @ r[0].T)))


@jax.custom_jvp
def cubed(x):
    return x**3


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 2 * primals[0] ** 2 * tangents[0]))


def custom_rules(p, batch):
    h = scaled(p["w"], batch["x"] @ p["w"])  # a gradient that differs from autodiff's, on purpose
    return out(p, h + cubed(p["b"])[None], batch) + cubed(p["odd"]).sum()


def vmapped(p, batch):
    return jax.vmap(lambda x, y: jnp.square(jnp.tanh(p["w"] @ x + p["b"]) @ p["v"] - y).mean())(
        batch["x"], batch["y"]
    ).mean()


def gradient_inside(p, batch):
    inner = jax.grad(lambda w: jnp.tanh(batch["x"] @ w).mean())(p["w"])
    return plain(p, batch) + jnp.square(inner).sum() * 0 + jnp.mean(batch["x"] @ p["w"])


def tied(p, batch):
    return out(p, jnp.tanh(jnp.tanh(batch["x"] @ p["w"]) @ p["w"].T), batch)


def weight_decay_over_all_leaves(p, batch):
    return plain(p, batch) + 0.1 * sum(jnp.square(x).sum() for x in jax.tree.leaves(p))


def weight_norm(p, batch):
    w = p["w"] / jnp.sqrt(jnp.square(p["w"]).sum(0, keepdims=True) + 1e-6)
    return out(p, jnp.tanh(batch["x"] @ w), batch) + optax.tree.norm(p)


def mixed_parameters(p, batch):
    w = p["w"] + p["unused"] @ p["stack"]["w"][2] + jnp.concatenate([p["w"][:, 12:], p["w"][:, :12]], axis=1)
    return out(p, jnp.tanh(batch["x"] @ jnp.where(w > 0, w, 0.1 * w)), batch) + jnp.sort(p["odd"], axis=0)[3].sum()


def loop_after_layers_that_count(p, batch):
    """Layers also hand on what has no derivative, to what cannot be differentiated."""

    def layer(carry, w):
        h, count = carry
        h = jnp.tanh(h @ w["w"] + w["b"][None])
        one = lax.stop_gradient(h * 0 + 1)
        return (h, count + one.max()), one.mean()

    carry, ones = lax.scan(layer, (batch["x"], 0.0), p["stack"])
    for checkpointed in (layer, jax.checkpoint(layer), jax.checkpoint(layer)):
        carry, one = checkpointed(carry, {"w": p["w"], "b": p["b"]})
        ones = jnp.append(ones, one)
    h, count = carry
    count = lax.while_loop(lambda x: x < 50, lambda x: 2 * x, count + ones.sum())
    return out(p, h, batch) * count


def loops_after_whole_numbers(p, batch):
    """Calls and loops in loops hand on whole numbers, flags and keys, to what cannot be differentiated."""
    whole = {"w": p["w"], "b": p["b"]}

    def layer(carry, w):
        h, (count, flag, key) = carry
        h = jnp.tanh(h @ w["w"] + w["b"][None])
        next_key = jax.random.wrap_key_data(jax.random.key_data(key) + jnp.uint32(count))
        return (h, (count + 1, ~flag, next_key)), count

    def layers(carry, _):
        carry, counts = lax.scan(layer, carry, p["stack"])
        carry, count = layer(carry, whole)
        return carry, counts.sum() + count

    carry, counts = lax.scan(layers, (batch["x"], (0, True, jax.random.key(0))), None, length=2)
    (h, (count, flag, key)), last = jax.jit(jax.checkpoint(layer))(carry, whole)
    rows = jnp.searchsorted(p["b"], jnp.linspace(-1, 1, 4)).astype(jnp.int32)
    size = jnp.abs(lax.stop_gradient(p["w"]) - 1).sum()
    start = (size + count + counts.sum() + last + flag + rows[0] + jax.random.key_data(key)[1] / 10, key)
    size, key = lax.while_loop(lambda x: x[0] < 1e4, lambda x: (2 * x[0], jax.random.clone(x[1])), start)
    return out(p, h, batch) * size * 1e-4 * (1 + jax.random.key_data(key)[1] / 100)


def parameters_handed_on(p, batch):
    """Through a barrier, and out of a loop that transposes its rows."""

    def layer(h, w):
        return jnp.tanh(h @ w["w"] + w["b"][None]), (w["w"].T, w["b"])

    h, (stack, rows) = lax.scan(layer, batch["x"], p["stack"])
    w, h = lax.optimization_barrier((p["w"], h))
    return out(p, jnp.tanh(h @ w @ stack[1] + rows[2][None]), batch)


@functools.cache
def sharded(stage, num_devices, **options):
    sizes = {"replica": 2, "data": -1} if "replica_axis" in options else {}
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices], **sizes)
    return shared.sharded(params(), optax.sgd(1.0), stage, mesh=mesh, **options)


COUPLED = (branches, gradient_inside, loop_after_layers_that_count)
"""Losses that ask something of all rows of a device, with the same answer everywhere."""


def gradients(state, loss_fn, batch, *, check_rows=True, **options):
    """Loss and whole gradients, as NumPy arrays."""
    check_rows = check_rows and loss_fn not in COUPLED
    loss, grads = jzero.value_and_grad(loss_fn, check_rows=check_rows, **options)(state, batch)
    return loss, whole(grads)


def assert_equal(state, loss_fn, batch, *, want=None, check_rows=True, **options):
    """Compares loss and gradients with `want`, by default those of plain jax on one device."""
    # Where the loss casts its parameters to bf16, each device's gradient is rounded to 8 bits before the sum, as in
    # DeepSpeed.
    rtol, atol = (2e-2, 2e-3) if loss_fn is jit_casting_all_parameters else (1e-4, 1e-6)
    want_loss, want_grads = want or jax.jit(jax.value_and_grad(loss_fn))(params(), batch)
    loss, grads = gradients(state, loss_fn, batch, check_rows=check_rows, **options)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), grads, want_grads)
