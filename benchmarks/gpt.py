"""The model of the benchmarks: a pre-norm GPT, scanned or unrolled, recomputed or not, plain or FSDP by hand.

With a mesh that has an axis `"model"` it is tensor parallel, as Megatron does it: heads and hidden units lie over that
axis, and the vocabulary of the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"
MODEL = "model"


@dataclasses.dataclass(frozen=True)
class Size:
    """What a GPT is made of."""

    width: int
    layers: int
    vocab: int = 50304
    head: int = 64


SIZES = {
    "tiny": Size(256, 4, vocab=2048),
    "124M": Size(768, 12),
    "1.4B": Size(2048, 24),
    "7B": Size(4096, 32, head=128),
}


def gather(box: Any) -> jax.Array:
    """Returns a parameter whole, in bf16, from its shard and the name of the dimension that is cut."""
    if not isinstance(box, nn.Partitioned):
        return box.astype(jnp.bfloat16)
    x = box.value.astype(jnp.bfloat16)
    return lax.all_gather(x, AXIS, axis=box.names.index(AXIS), tiled=True) if AXIS in box.names else x


def by_hand(module: Any) -> Any:
    """Returns a module class that gathers its own parameters, as FSDP tutorials for Flax do."""
    gather_all = lambda tree: jax.tree.map(gather, tree, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    return nn.map_variables(module, "params", trans_in_fn=gather_all, mutable=False)


class Block(nn.Module):
    """A pre-norm decoder block."""

    width: int
    heads: int
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:  # [B, S, D]
        y = nn.LayerNorm()(x)
        if self.mesh is None:
            q, k, v = jnp.split(nn.Dense(3 * self.width, use_bias=False)(y), 3, axis=-1)
            heads = (*x.shape[:2], self.heads, -1)
            q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(heads)
        else:  # one product, too, but such that all three are cut by heads
            y = nn.DenseGeneral((3, self.heads, self.width // self.heads), use_bias=False, name="qkv")(y)
            q, k, v = jnp.moveaxis(constrained(y, self.mesh, None, None, MODEL, None), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        out, up, down = ("out", "up", "down") if self.mesh else (None, None, None)
        x = x + nn.Dense(self.width, use_bias=False, name=out)(y.reshape(x.shape))
        y = nn.Dense(4 * self.width, use_bias=False, name=up)(nn.LayerNorm()(x))
        y = nn.gelu(constrained(y, self.mesh, None, MODEL))
        return x + nn.Dense(self.width, use_bias=False, name=down)(y), None


def constrained(x: jax.Array, mesh: Mesh | None, *names: str | None) -> jax.Array:
    """Returns `x`, over the mesh as named, its rows over the devices that share the batch."""
    if mesh is None:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(AXIS, *names)))


def placed(params: Any, mesh: Mesh | None) -> Any:
    """Returns shapes of parameters with the layout that tensor parallelism gives them."""

    def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dim = {"qkv": -2, "out": -2, "up": -1, "down": -2, "head": -1}.get(path[-2].key)
        names = [MODEL if d - x.ndim == dim else None for d in range(x.ndim)]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*names)))

    return params if mesh is None else jax.tree_util.tree_map_with_path(place, params)


class GPT(nn.Module):
    """Tokens [B, S] to logits [B, S, V].

    Attributes:
      size: Its size.
      scan: Whether blocks are one `nn.scan`.
      remat: Whether blocks are recomputed in the backward pass.
      fsdp: Whether modules gather their own parameters, see `by_hand`.
      mesh: The mesh, if it is tensor parallel.
    """

    size: Size
    scan: bool = True
    remat: bool = True
    fsdp: bool = False
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        wrapped = by_hand if self.fsdp else lambda module: module
        size = self.size
        x = wrapped(nn.Embed)(size.vocab, size.width, name="embed")(tokens)
        block = wrapped(Block)
        if self.remat:
            block = nn.remat(block, prevent_cse=not self.scan)
        shape = (size.width, size.width // size.head, self.mesh)
        if self.scan:
            blocks = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=size.layers,
                metadata_params={nn.PARTITION_NAME: None},
            )
            x, _ = blocks(*shape, name="layers")(x, None)
        else:
            for i in range(size.layers):
                x, _ = block(*shape, name=f"layer_{i}")(x, None)
        x = wrapped(nn.LayerNorm)(name="norm")(x)
        logits = wrapped(nn.Dense)(size.vocab, use_bias=False, name="head")(x)
        return constrained(logits, self.mesh, None, MODEL)


def loss_of(model: GPT) -> Callable[..., jax.Array]:
    """Returns `loss(params, batch)` for tokens [B, S + 1]."""

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return loss_fn


def init_of(model: GPT) -> Callable[[jax.Array], Any]:
    """Returns what makes the parameters, fp32, from a key."""
    plain = dataclasses.replace(model, fsdp=False)
    return lambda key: plain.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
