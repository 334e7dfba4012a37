"""A decoder in plain JAX by the sizes of a `ModelConfig`, to estimate and compile steps of published models.

Scanned layers, each recomputed in the backward pass; grouped queries, rotary positions, gated feed-forward blocks.
Windows and soft caps of attention change no shape, so they are left out: this decoder is for memory and time, not for
weights. What is computed a part at a time, and what devices exchange, is as in `examples/llm`.

Shapes: B batch, S tokens of this device, T tokens of a row, D model width, H heads, K heads of keys and values, C head
size, V vocabulary; of mixtures of experts N tokens, E experts of this device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.core.layout.mesh import AnyMesh
from jzero.core.state.train_state import TrainState
from jzero.weights.config import ModelConfig
from jzero.weights.families import param_shapes

PyTree = Any
Product = Callable[[jax.Array, jax.Array], jax.Array]
ADAPTERS = r".*/lora_[ab]"
"""The paths of adapters."""
ALPHA_OVER_RANK = 2.0
CONTEXT, EXPERTS = "context", "experts"
"""The mesh axes along which devices have parts of rows, and different experts."""
OF_EXPERTS = ("gate", "up", "gate_up", "down")
ROOM = 1.25
"""The rows of an expert's block, of those that it gets if all get as many."""
MOST_SCORES = 2**28
"""Scores of attention that exist at a time: 1 GiB in fp32."""


def make_state(
    config: ModelConfig, *, rank: int, base_dtype: Any, mesh: AnyMesh | None = None
) -> Callable[[jax.Array], TrainState]:
    """Returns a function from a key to a train state with AdamW.

    Args:
      config: The sizes.
      rank: Rank of the adapters beside each kernel of a layer; 0 for none.
      base_dtype: The dtype of what is not an adapter.
      mesh: The mesh, if it has an axis for experts.
    """
    shapes = _shapes(config, rank)

    def make(key: jax.Array) -> TrainState:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(leaves))
        initialised = [
            _leaf(path[-1].key, shape, base_dtype, key) for (path, shape), key in zip(leaves, keys, strict=True)
        ]
        if mesh is not None:
            over = NamedSharding(mesh, P(None, EXPERTS))
            initialised = [
                lax.with_sharding_constraint(x, over) if path[-2].key in OF_EXPERTS else x
                for x, (path, _) in zip(initialised, leaves, strict=True)
            ]
        return TrainState.create(
            params=jax.tree.unflatten(treedef, initialised), tx=optax.adamw(3e-4, weight_decay=0.1)
        )

    return make


def _shapes(config: ModelConfig, rank: int) -> PyTree:
    nested: PyTree = {}
    for path, shape in param_shapes(config, rank=rank).items():
        *outer, last = path.split("/")
        functools.reduce(lambda tree, key: tree.setdefault(key, {}), outer, nested)[last] = shape
    return nested


def _leaf(name: str, shape: tuple[int, ...], base_dtype: Any, key: jax.Array) -> jax.Array:
    dtype = jnp.float32 if name.startswith("lora") else base_dtype
    if name == "scale":
        return jnp.ones(shape, dtype)
    if name in ("bias", "lora_b", "sinks"):
        return jnp.zeros(shape, dtype)
    return 0.02 * jax.random.normal(key, shape, dtype)


def make_loss(
    config: ModelConfig, *, context: str | None = None, loss_chunks: int = 1, mesh: AnyMesh | None = None
) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Returns the loss of tokens [B, T + 1]: the mean cross-entropy of each after those before it.

    Args:
      config: The sizes.
      context: The mesh axis along which devices have parts of the same rows, if any.
      loss_chunks: The parts of a row whose logits exist one at a time.
      mesh: The mesh, if it has an axis for experts.
    """

    def own_part(x: jax.Array) -> jax.Array:  # [B, T] -> [B, S]
        if context is None:
            return x
        size = x.shape[1] // lax.axis_size(context)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(context) * size, size, axis=1)

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        embedding = params["embed"]["embedding"]
        head = embedding.T if config.tied else params["head"]["kernel"]

        def losses(x: jax.Array, targets: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels((x @ head).astype(jnp.float32), targets)

        with jax.named_scope("embed"):
            x = _own_rows(config.embed_scale * embedding[own_part(tokens[:, :-1])], mesh)  # [B, S, D]
        with jax.named_scope("layers"):
            layer = jax.checkpoint(lambda x, w: (_layer(config, x, w, context, mesh), None), prevent_cse=False)
            x, _ = lax.scan(layer, x, params["layers"])
        with jax.named_scope("head"):
            return _in_parts(losses, loss_chunks, _norm(config, x, params["norm"]), own_part(tokens[:, 1:])).mean()

    return loss_fn


def _in_parts(fn: Callable[..., jax.Array], count: int, *arrays: jax.Array) -> jax.Array:
    """Applies a function to one of so many parts of the tokens at a time, [B, S, ...]."""
    if count == 1:
        return fn(*arrays)
    parts = [jnp.moveaxis(x.reshape(len(x), count, -1, *x.shape[2:]), 1, 0) for x in arrays]
    results = lax.map(lambda part: jax.checkpoint(fn)(*part), parts)
    return jnp.moveaxis(results, 0, 1).reshape(*arrays[0].shape[:2], *results.shape[3:])


def _layer(config: ModelConfig, x: jax.Array, w: PyTree, context: str | None, mesh: AnyMesh | None) -> jax.Array:
    """Attention, then a feed-forward block, each behind a norm and added to the stream [B, S, D]."""

    def added(x: jax.Array, y: jax.Array, name: str) -> jax.Array:
        return x + (_norm(config, y, w[name]) if config.post_norms else y)

    x = _own_rows(x, mesh)
    x = added(x, _attention(config, _norm(config, x, w["attention_norm"]), w, context), "attention_post_norm")
    y = _norm(config, x, w["mlp_norm"])
    return added(x, _gated(config, y, w) if config.experts is None else _mixture(config, y, w, mesh), "mlp_post_norm")


def _own_rows(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """Returns rows cut over the axis for experts, if there is one."""
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, P(EXPERTS)))


def _gated(config: ModelConfig, x: jax.Array, w: PyTree, multiply: Product = jnp.matmul) -> jax.Array:
    def dense(x: jax.Array, name: str) -> jax.Array:
        return _dense(x, w[name], multiply)

    packed = "gate_up" in w
    gate, up = jnp.split(dense(x, "gate_up"), 2, axis=-1) if packed else (dense(x, "gate"), dense(x, "up"))
    return dense((jax.nn.gelu if config.gelu else jax.nn.silu)(gate) * up, "down")


def _mixture(config: ModelConfig, x: jax.Array, w: PyTree, mesh: AnyMesh | None) -> jax.Array:
    """A mixture of experts; devices along the axis for them exchange their tokens."""
    assert config.experts is not None
    flat = x.reshape(-1, x.shape[-1])
    best, _ = lax.top_k(_dense(flat, w["router"]), config.experts.per_token)  # [N, experts of a token]
    kernels = {name: w[name] for name in OF_EXPERTS if name in w}
    if mesh is None:
        return _experts(config, flat, best, kernels).reshape(x.shape)

    def of_device(flat: jax.Array, best: jax.Array, kernels: PyTree) -> jax.Array:
        flat, best = (lax.all_gather(x, EXPERTS, tiled=True) for x in (flat, best))
        return lax.psum_scatter(_experts(config, flat, best, kernels), EXPERTS, tiled=True)

    over = P(EXPERTS)
    each = jax.shard_map(of_device, mesh=mesh, axis_names={EXPERTS}, in_specs=over, out_specs=over, check_vma=False)
    return each(flat, best, kernels).reshape(x.shape)


def _experts(config: ModelConfig, flat: jax.Array, best: jax.Array, kernels: PyTree) -> jax.Array:
    """Experts' products in blocks of rows; which rows makes no difference here. [N, D], [N, X] -> [N, D]."""
    assert config.experts is not None
    count = len(kernels["down"]["kernel"])
    size = math.ceil(ROOM * best.size / config.experts.count)
    num_blocks = count + (best.size - 1) // size
    rows = jnp.repeat(flat, best.shape[1], axis=0)
    rows = jnp.pad(rows, ((0, num_blocks * size - best.size), (0, 0))).reshape(num_blocks, size, -1)
    experts = jnp.append(jnp.arange(count), best.reshape(-1)[: num_blocks - count].astype(int) % count)

    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The first block of each expert, and those for experts with more tokens, if there are such."""

        def zeros(x: jax.Array) -> jax.Array:
            return jnp.zeros((*x.shape[:-1], kernel.shape[-1]), x.dtype)

        def of_block(x: jax.Array, expert: jax.Array) -> jax.Array:
            return lax.cond(expert < count, lambda: x @ kernel[expert], lambda: zeros(x))

        def of_more(x: jax.Array, experts: jax.Array) -> jax.Array:
            each = functools.partial(lax.map, lambda block: jax.checkpoint(of_block)(*block))
            return lax.cond(experts[0] < count, lambda: each((x, experts)), lambda: zeros(x))

        y = x[:count] @ kernel
        return jnp.concatenate([y, of_more(x[count:], experts[count:])]) if num_blocks > count else y

    biases = {"bias": lambda x: x[experts]}
    kernels = {name: {k: biases.get(k, lambda x: x)(x) for k, x in w.items()} for name, w in kernels.items()}
    y = _gated(config, rows, kernels, multiply)
    y = y.reshape(num_blocks * size, -1)[: best.size].reshape(*best.shape, -1)
    return jnp.einsum("nxd,nx->nd", y, jax.nn.softmax(best, axis=-1))


def _attention(config: ModelConfig, x: jax.Array, w: PyTree, context: str | None) -> jax.Array:
    def heads(name: str, number: int) -> jax.Array:  # [B, S, H or K, C]
        y, shape = _dense(x, w[name]), (*x.shape[:2], number, config.head_dim)
        y = y if config.joint_qk_norm else y.reshape(shape)
        y = _norm(config, y, w[f"{name}_norm"]) if config.qk_norm and name != "v" else y
        return y.reshape(shape)

    num_rows, size = x.shape[:2]
    positions = (0 if context is None else lax.axis_index(context) * size) + jnp.arange(size)
    angles = jnp.outer(positions, jnp.asarray(config.inverse_frequencies[0], jnp.float32))  # [S, C / 2]
    query, key = (_rotate(heads(*x), angles) for x in (("q", config.num_heads), ("k", config.num_kv_heads)))
    value = heads("v", config.num_kv_heads)
    if context is not None:
        key, value = (lax.all_gather(x, context, axis=1, tiled=True) for x in (key, value))  # [B, T, K, C]

    num_seen = key.shape[1]
    wide = [x.astype(jnp.float32) for x in (key, value)]  # in which the gradients of all parts are added

    def attend(query: jax.Array, positions: jax.Array) -> jax.Array:
        seen = positions[:, None, :, None] >= jnp.arange(num_seen)[None, None, None]  # [B, 1, s, T]
        key, value = (x.astype(query.dtype) for x in wide)
        return jax.nn.dot_product_attention(query, key, value, scale=config.attn_scale, mask=seen)

    most = max(1, MOST_SCORES // (num_rows * config.num_heads * num_seen))
    count = next(n for n in range(1, size + 1) if size % n == 0 and size // n <= most)
    attended = _in_parts(attend, count, query, jnp.broadcast_to(positions, (num_rows, size)))
    return _dense(attended.reshape(num_rows, size, -1), w["o"])


def _dense(x: jax.Array, w: PyTree, multiply: Product = jnp.matmul) -> jax.Array:
    y = multiply(x, w["kernel"])
    if "bias" in w:
        y = y + _row(w["bias"], y)
    if "lora_a" in w:
        y = y + ALPHA_OVER_RANK * multiply(multiply(x, w["lora_a"].astype(x.dtype)), w["lora_b"].astype(x.dtype))
    return y


def _norm(config: ModelConfig, x: jax.Array, w: PyTree) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.eps)
    return (wide * _row(w["scale"].astype(jnp.float32), x)).astype(x.dtype)


def _row(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a vector, or one per expert, with the dimensions of `like` before its last one."""
    return jnp.expand_dims(x, tuple(range(x.ndim - 1, like.ndim - 1)))


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns [B, S, H, C] by the angles of its positions, [S, C / 2]."""
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
