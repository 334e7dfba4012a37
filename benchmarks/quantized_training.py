"""Training with integers on the links: 300 steps of a small GPT on bytes, with each kind of rounding.

    python -m benchmarks.quantized_training [--seeds 0 1 2] [--kinds exact gather=int8 ...]

Each line is one run on 2 x 2 virtual CPU devices: the mean of the last 50 losses, and its difference to that of
unrounded training from the same seed, on the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jzero
from examples.text_data import load_corpus, sample_batch

WIDTH, LAYERS, HEADS, LENGTH, ROWS, STEPS, TAIL = 128, 3, 4, 64, 16, 300, 50
KINDS = ("exact", "gather=int8", "reduce=int8", "reduce=int4", "gather=int8,reduce=int4", "gather=int8,reduce=int8")


def make_params(seed: int) -> dict[str, jax.Array]:
    """Returns the parameters of a GPT; its layers are stacked."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def draw(*shape: int, scale: float) -> jax.Array:
        return jax.random.normal(next(keys), shape) * scale

    wide = 4 * WIDTH
    return {
        "embed": draw(256, WIDTH, scale=0.02),
        "position": draw(LENGTH, WIDTH, scale=0.02),
        "head": draw(WIDTH, 256, scale=WIDTH**-0.5),
        "layers": {
            "qkv": draw(LAYERS, WIDTH, 3 * WIDTH, scale=WIDTH**-0.5),
            "out": draw(LAYERS, WIDTH, WIDTH, scale=0.4 * WIDTH**-0.5),
            "up": draw(LAYERS, WIDTH, wide, scale=WIDTH**-0.5),
            "down": draw(LAYERS, wide, WIDTH, scale=0.4 * wide**-0.5),
            "norm": jnp.ones((LAYERS, 2, WIDTH)),
        },
    }


def loss_fn(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte. [rows, LENGTH + 1] -> scalar."""

    def normed(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        heads = jnp.split(normed(x, w["norm"][0]) @ w["qkv"], 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in heads)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + mixed @ w["out"]
        return x + jax.nn.gelu(normed(x, w["norm"][1]) @ w["up"]) @ w["down"], None

    x = params["embed"][tokens[:, :-1]] + params["position"]
    x, _ = lax.scan(layer, x, params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(normed(x) @ params["head"], tokens[:, 1:]).mean()


def tail_of(kind: str, seed: int, text: np.ndarray) -> float:
    """Returns the mean of the last losses of one run."""
    kinds = {} if kind == "exact" else dict(pair.split("=") for pair in kind.split(","))
    config = jzero.ZeroConfig(
        stage=3,
        persistence_threshold=0,
        node_axis="node",
        secondary_params=True,
        quantization=jzero.Quantization(**kinds),
    )
    tx = optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS, 0.1))
    plain = jzero.TrainState.create(params=make_params(seed), tx=tx)
    state = jzero.shard_train_state(plain, config=config, mesh=jzero.make_mesh(node=2, data=2))
    step, rng, losses = jzero.make_train_step(loss_fn, clip_norm=1.0), np.random.default_rng(seed), []
    for _ in range(STEPS):
        state, metrics = step(state, sample_batch(text, rng, batch_size=ROWS, seq_len=LENGTH))
        losses.append(metrics["loss"])
    return statistics.mean(map(float, losses[-TAIL:]))


def main() -> None:
    """Prints one line for each run, and one for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    text = load_corpus().train
    exact: dict[int, float] = {}
    for kind in dict.fromkeys(["exact", *options.kinds]):
        off = []
        for seed in options.seeds:
            start = time.perf_counter()
            tail = tail_of(kind, seed, text)
            off.append(tail - exact.setdefault(seed, tail))
            seconds = time.perf_counter() - start
            print(f"{kind:24} seed {seed}  {tail:.4f}  {off[-1]:+.4f}  {seconds:.0f} s", flush=True)
        print(f"{kind:24} mean    {statistics.mean(off):+.4f}", flush=True)


if __name__ == "__main__":
    main()
