"""Small models with awkward sizes, and their data."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.drawn import to_jax

VOCAB, D_MODEL, HEADS, LAYERS, SEQ = 509, 120, 5, 2, 8


class Block(nn.Module):
    """A pre-LN decoder layer; no key bias, since its true gradient is zero and would be rounding noise."""

    d_model: int
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, _=None):
        dense = functools.partial(nn.Dense, param_dtype=self.dtype)
        heads = lambda y: y.reshape(*y.shape[:2], self.heads, -1)
        y = nn.LayerNorm(param_dtype=self.dtype)(x)
        q, v = (heads(dense(self.d_model, name=name)(y)) for name in ("query", "value"))
        k = heads(dense(self.d_model, use_bias=False, name="key")(y))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / float(np.sqrt(q.shape[-1]))
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + dense(self.d_model, name="out")(y)
        y = nn.LayerNorm(param_dtype=self.dtype)(x)
        y = dense(self.d_model, name="down")(nn.gelu(dense(4 * self.d_model, name="up")(y)))
        return x + y, None


class GPT(nn.Module):
    vocab: int = VOCAB
    d_model: int = D_MODEL
    heads: int = HEADS
    layers: int = LAYERS
    scan: bool = True
    remat: Any = None
    tied: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, self.d_model, param_dtype=self.dtype)
        position = self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.d_model), self.dtype)
        x = embed(tokens) + position[None]
        block = Block if self.remat is None else nn.remat(Block, **self.remat)
        if self.scan:
            scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = scanned(self.d_model, self.heads, self.dtype, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = block(self.d_model, self.heads, self.dtype, name=f"layer_{i}")(x)
        x = nn.LayerNorm(param_dtype=self.dtype)(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, param_dtype=self.dtype)(x)


def gpt_loss(model):
    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return loss_fn


def tokens(rows: int, seed: int = 0, vocab: int = VOCAB, seq: int = SEQ) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (rows, seq + 1)).astype(np.int32)


def draw_params(model: nn.Module, *inputs: Any, seed: int = 0) -> Any:
    """Returns parameters of a module that NumPy draws: to compile `model.init` takes as long as to compile a step."""
    return draw_like(jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"], seed)


def draw_like(shapes: Any, seed: int = 0) -> Any:
    """Returns parameters of these shapes that NumPy draws."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, x: Any) -> jax.Array:
        name, values = path[-1].key, rng.normal(size=x.shape)
        if name == "scale":
            values = 1 + values / 10
        elif name == "bias":
            values /= 10
        else:
            values /= np.sqrt(x.shape[-2 if name == "kernel" else -1])
        return to_jax(values, x.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def gpt_state(model, tx, seed: int = 0) -> TrainState:
    params = draw_params(model, jnp.zeros((1, SEQ), jnp.int32), seed=seed)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


MLP_SIZES = (37, 127, 61, 11)
TWO_LAYERS = (37, 127, 11)
ONE_LAYER = (37, 11)


def mlp_params(dtype: Any = jnp.float32, sizes: tuple[int, ...] = MLP_SIZES) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    pairs = itertools.pairwise(sizes)
    return {
        f"layer_{i}": {
            "kernel": to_jax(rng.normal(size=(m, n)) / np.sqrt(m), dtype),
            "bias": to_jax(rng.normal(size=n) / 10, dtype),
        }
        for i, (m, n) in enumerate(pairs)
    }


def mlp_loss(params, batch):
    x, num_layers = batch["x"], sum(name.startswith("layer_") for name in params)
    for i in range(num_layers):
        layer = params[f"layer_{i}"]
        x = x @ layer["kernel"] + layer["bias"][None]
        x = jnp.tanh(x) if i < num_layers - 1 else x
    return jnp.square(x - batch["y"]).mean()


def mlp_batch(rows: int, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, MLP_SIZES[0])).astype(dtype),
        "y": rng.normal(size=(rows, MLP_SIZES[-1])).astype(dtype),
    }
