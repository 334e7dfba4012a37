"""Mixtures of experts as a user who knows GSPMD writes them, to compile beside `examples/llm/`.

`jax.jit` with specs: the kernels of experts cut by expert over one mesh axis and over the other by ZeRO, all else cut
over both; parameters cast before they are gathered, and a constraint on the rows at the start of each layer. Each
device sends tokens to those with their experts, and gets the results back, by `lax.all_to_all` in a `shard_map`. An
expert has room for a quarter more tokens of each device than it gets if all get as many. What has no room is dropped.

Shapes: N tokens of a device, X experts of a token, P devices along the axis, E experts of a device, M rows of a device
for one expert.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import llm
from benchmarks.engines import SMALL, narrow

import decoder  # isort: skip
import expert_parallel  # isort: skip
import experts as example  # isort: skip
import training  # isort: skip

EXPERTS, BOTH = expert_parallel.EXPERTS, (expert_parallel.EXPERTS, "data")
ROOM = 1.25


class Exchanged(NamedTuple):
    """Tokens that go to the devices with their experts; has the methods of `expert_parallel.Apart`."""

    cut: P  # of rows
    mesh: Mesh
    count: int  # of all devices together
    shares: jax.Array  # [N, X]
    places: jax.Array  # [N X], among the rows for all experts

    @classmethod
    def of(cls, cut: P, mesh: Mesh, product: str, logits: jax.Array, config: Any) -> Exchanged:
        """Returns the places of tokens."""
        del product

        def of_device(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            chosen, shares = example.route(logits, config)
            flat = chosen.reshape(-1)
            order = jnp.argsort(flat)
            own, sizes = flat[order], jnp.bincount(flat, length=config.count)
            rank = jnp.arange(len(flat)) - (jnp.cumsum(sizes) - sizes)[own]
            room = math.ceil(ROOM * len(flat) / config.count)
            here = jnp.where(rank < room, own * room + rank, config.count * room)  # the last: dropped
            return shares, jnp.zeros_like(flat).at[order].set(here)

        return cls(cut, mesh, config.count, *_on_each(mesh, of_device, (cut,), cut)(logits))

    def spread(self, x: jax.Array) -> jax.Array:
        """[N, I] -> [E, P M, I]."""
        parts, count = self.mesh.shape[EXPERTS], self.count

        def of_device(places: jax.Array, x: jax.Array) -> jax.Array:
            room = math.ceil(ROOM * len(places) / count)
            rows = jnp.zeros((count * room, x.shape[-1]), x.dtype)
            rows = rows.at[places].set(jnp.repeat(x, len(places) // len(x), axis=0), mode="drop")
            there = lax.all_to_all(rows.reshape(parts, -1, *x.shape[1:]), EXPERTS, 0, 0)  # [P, E M, I]
            return (
                there.reshape(parts, count // parts, room, -1).swapaxes(0, 1).reshape(count // parts, -1, x.shape[-1])
            )

        return _on_each(self.mesh, of_device, (self.cut,) * 2, self.cut)(self.places, x)

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[E, P M, I], [E, I, O] -> [E, P M, O]."""
        fn = lambda x, kernel: x @ kernel
        return _on_each(self.mesh, fn, (self.cut, P(EXPERTS)), self.cut)(x, kernel)

    def collect(self, y: jax.Array) -> jax.Array:
        """[E, P M, O] -> [N, O]."""
        parts, count = self.mesh.shape[EXPERTS], self.count

        def of_device(shares: jax.Array, places: jax.Array, y: jax.Array) -> jax.Array:
            rows = y.reshape(count // parts, parts, -1, y.shape[-1]).swapaxes(0, 1)
            back = lax.all_to_all(rows.reshape(parts, -1, y.shape[-1]), EXPERTS, 0, 0).reshape(-1, y.shape[-1])
            back = back.at[places].get(mode="fill", fill_value=0).reshape(*shares.shape, -1)
            return jnp.einsum("nxo,nx->no", back, shares.astype(y.dtype))

        return _on_each(self.mesh, of_device, (self.cut,) * 3, self.cut)(self.shares, self.places, y)


def _on_each(mesh: Mesh, fn: Any, ins: tuple[P, ...], out: P) -> Any:
    """Applies a function on each device to its tokens, and kernels that are whole along ZeRO's axis."""
    axes = {EXPERTS} if out == P(EXPERTS) else set(BOTH)
    return jax.shard_map(fn, mesh=mesh, axis_names=axes, in_specs=ins, out_specs=out, check_vma=False)


@contextlib.contextmanager
def exchanged(axes: Any = EXPERTS) -> Iterator[None]:
    """Within, the decoder of `examples/llm/` exchanges tokens as above, and cuts rows over these axes."""
    cut = P(axes)
    own = lambda x, mesh: x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, cut))
    here = types.SimpleNamespace(of=functools.partial(Exchanged.of, cut))
    with mock.patch.object(decoder, "Apart", here), mock.patch.object(decoder, "own_rows", own):
        yield


def layout_of(path: Any, x: Any, mesh: Mesh) -> NamedSharding:
    """Returns the layout of a parameter or moment."""
    names = [getattr(key, "key", None) for key in path]
    stacked, spec = "layers" in names, [None] * x.ndim
    of_experts = len(names) > 1 and names[-2] in ("gate", "up", "gate_up", "down") and x.ndim == 4
    axis, first = ("data", 2) if of_experts else (BOTH, int(stacked))
    number = math.prod(mesh.shape[a] for a in ([axis] if of_experts else BOTH))
    if of_experts:
        spec[1] = EXPERTS
    dims = [d for d in range(first, x.ndim) if x.shape[d] % number == 0]
    if dims and math.prod(x.shape[first:]) > SMALL:
        spec[max(dims, key=lambda d: x.shape[d])] = axis
    return NamedSharding(mesh, P(*spec))


def step_by_hand(mesh: Mesh, sizes: dict[str, Any], seq: int) -> tuple[Any, Any]:
    """Returns the jitted step and its arguments as shapes; it is to be traced within `exchanged(BOTH)`."""
    model, args = llm.decoder_of(sizes)
    model = training.of_parts(model, args).clone(mesh=mesh)
    kind, rows, tx = model.config.experts, NamedSharding(mesh, P(BOTH)), training.make_optimizer(3e-4, 1000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        losses, weights, router = training.next_token_losses(model, params, batch)
        chosen, _ = example.route(router, kind)
        shares = jax.nn.one_hot(chosen, kind.count).sum(-2).mean((0, 1, 2))
        aux = kind.count * jax.nn.softmax(router, axis=-1).mean((0, 1, 2)) @ shares
        return (losses * weights).sum() / weights.sum() + kind.aux_coef * aux

    def step(masters: Any, opt_state: Any, batch: Any) -> Any:
        params = lax.with_sharding_constraint(narrow(masters), layouts[0])
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = lax.with_sharding_constraint(jax.tree.map(lambda g: g.astype(jnp.float32), grads), layouts[0])
        updates, opt_state = tx.update(grads, opt_state, masters)
        return optax.apply_updates(masters, updates), opt_state, loss

    masters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), llm.shapes_of(model.clone(mesh=None)))
    shapes = (masters, jax.eval_shape(tx.init, masters))
    layouts = jax.tree_util.tree_map_with_path(lambda path, x: layout_of(path, x, mesh), shapes)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    batch = jax.tree.map(lambda x: place(x, rows), llm.batch_of(mesh.size, seq, mesh))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*layouts, None))
    return jitted, (*jax.tree.map(place, shapes, layouts), batch)
