"""LoRA on a base in int8: `Quantization(frozen="int8")` with plain parameters as adapters, beside qwix.

    python -m benchmarks.qlora              # needs qwix: pip install 'qwix>=0.1.8'

Both train the decoder of `examples/llm/` on the same base, which is pretrained here for a moment, so that there is
something to round, and on the same batches; their adapters begin alike. Eight virtual CPU devices.
"""

import argparse
import json
import os
import pathlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
import jzero.hf

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "llm"))
import decoder
import training
from decoder import Decoder, Lora

SIZES = {"vocab_size": 256, "d_model": 128, "d_hidden": 344, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
STEPS, ROWS, SEQ, RANK, ALPHA = 100, 16, 64, 8, 16.0
PROJECTION = decoder.Projection
ADAPTERS = r".*lora_[ab]"


def model_config(dtype: str = "float32") -> jzero.hf.ModelConfig:
    head = SIZES["d_model"] // SIZES["num_heads"]
    rotary = tuple((10_000.0 ** -(np.arange(0, head, 2) / head)).tolist())
    layers = SIZES["num_layers"]
    return jzero.hf.ModelConfig(
        model_type="llama", head_dim=head, eps=1e-5, tied=False, gelu=False, qkv_bias=False, qk_norm=False,
        unit_norm=False, post_norms=False, embed_scale=1.0, attn_scale=head**-0.5, attn_softcap=None,
        final_softcap=None, inverse_frequencies=(rotary,) * layers, windows=(None,) * layers, dtype=dtype, **SIZES,
    )  # fmt: skip


def text(pattern: str) -> np.ndarray:
    """Returns real text as bytes: sources of the standard library."""
    folder = pathlib.Path(os.__file__).parent
    return np.frombuffer(b"".join(file.read_bytes() for file in sorted(folder.glob(pattern)))[:2_000_000], np.uint8)


def batches(data: np.ndarray, seed: int):
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(data) - SEQ - 1, size=ROWS)
        tokens = data[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)
        yield {"tokens": tokens, "weights": np.ones(ROWS, np.float32)}


def state_of(model, params, *, config, trainable=None, lr=1e-2):
    plain = jzero.TrainState.create(params=params, tx=optax.adamw(lr))
    return jzero.shard_train_state(plain, config=config, trainable=trainable)


def pretrained(model):
    """Returns base parameters that know some Python."""
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    state = state_of(model, params, config=jzero.ZeroConfig(stage=3, persistence_threshold=0), lr=3e-3)
    step, data = jzero.make_train_step(training.next_token_loss(model), clip_norm=1.0), batches(text("*.py"), 0)
    for _ in range(150):
        state, metrics = step(state, next(data))
    print(f"base: loss {float(metrics['loss']):.4f}")
    return jax.device_get(jzero.gather_params(state))


# What a user writes ---------------------------------------------------------------------------------------------------


def by_jzero(config, base, frozen="int8", **fields):
    model = Decoder(config, Lora(rank=RANK, alpha=ALPHA))
    params = jax.jit(model.init)(jax.random.key(7), jnp.zeros((1, 4), jnp.int32))["params"]
    params = merge_trees(params, base)
    zero = jzero.ZeroConfig(stage=3, quantization=jzero.Quantization(frozen=frozen), **fields)
    return model, params, zero


class Dense(nn.Dense):
    """As qwix needs it: it finds kernels that are multiplied as they are, and its adapters would widen the stream."""

    def __call__(self, x):
        return super().__call__(x).astype(x.dtype)


def by_qwix(config, base, **fields):
    import qwix
    from qwix._src.core import qarray
    from qwix._src.providers import ptq

    provider = qwix.LoraProvider(module_path=r"layers/.*", rank=RANK, alpha=ALPHA, weight_qtype=jnp.int8)
    model = qwix.apply_lora_to_model(Decoder(config), provider)
    params = jax.jit(model.init)(jax.random.key(7), jnp.zeros((8, 16), jnp.int32))["params"]

    def encode(like, array):  # `qwix.quantize_params` takes the stack for a channel, so each layer by itself
        if not isinstance(like, ptq.WithAux):
            return array
        return ptq.WithAux(jax.vmap(lambda layer: qarray.quantize(layer, like.how))(array), like.how)

    params = merge_trees(params, base, encode)
    zero = jzero.ZeroConfig(stage=3, **fields)
    return model, params, zero


# ----------------------------------------------------------------------------------------------------------------------


def merge_trees(params, base, encode=lambda like, array: array):
    """Returns `params` with the leaves of `base` in their places."""
    if not isinstance(base, dict):
        return encode(params, base)
    return {name: merge_trees(x, base[name], encode) if name in base else x for name, x in params.items()}


def begin_alike(params, adapters):
    """Returns parameters whose adapters, named as qwix names them, are those of jzero's way."""
    layers = {}
    for name, layer in params["layers"].items():
        renamed = {f"kernel_lora_{x}": adapters[name][f"lora_{x}"] for x in "ab" if f"kernel_lora_{x}" in layer}
        layers[name] = {**layer, **renamed}
    return {**params, "layers": layers}


def run(name, variant):
    model, params, config = variant
    state = state_of(model, params, config=config, trainable=ADAPTERS)
    step = jzero.make_train_step(training.next_token_loss(model), clip_norm=1.0)
    data = batches(text("encodings/*.py"), 1)
    report = jzero.analyze(step, state, next(data))
    report.verify()
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, next(data))
        losses.append(float(metrics["loss"]))
    sent = {}
    for row in report.collectives:
        if row.kind == "all-gather":
            sent[row.dtype] = sent.get(row.dtype, 0) + row.sent_bytes
    row = {
        "way": name,
        "precision": config.policy.compute_dtype or "float32",
        "first": losses[0],
        "last": float(np.mean(losses[-20:])),
        "gathered_bytes": sum(sent.values()),
        "by_dtype": sent,
        "resident_bytes": jzero.plan_of(state).bytes_per_device.total,
        "peak_bytes": report.memory.peak,
    }
    print(json.dumps(row), flush=True)


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.environ.setdefault("PJRT_NPROC", "32")
    jax.config.update("jax_num_cpu_devices", 8)
    config = model_config()
    base = pretrained(Decoder(config))
    small = {"persistence_threshold": 1000}
    for precision in ("fp32", "bf16"):
        scales = {".*/scale": jzero.LeafRule(compute_dtype="float32")} if precision == "bf16" else {}
        wide = {"embed/.*|head/.*": jzero.LeafRule(quantize=False)}  # as qwix leaves them
        ours = by_jzero(config, base, precision=precision, rules=scales | wide, **small)
        run("jzero", ours)
        run("jzero, embedding too", by_jzero(config, base, precision=precision, rules=scales, **small))
        run("jzero, nf4", by_jzero(config, base, "nf4", precision=precision, rules=scales | wide, **small))
        decoder.Projection = lambda features, bias, lora, name: Dense(features, use_bias=bias, name=name)
        model, params, zero = by_qwix(config, base, precision=precision, rules=scales, **small)
        run("qwix", (model, begin_alike(params, ours[1]["layers"]), zero))
        decoder.Projection = PROJECTION
    exact = Decoder(config, Lora(rank=RANK, alpha=ALPHA)), ours[1], jzero.ZeroConfig(stage=3, **small)
    run("no integers", exact)


if __name__ == "__main__":
    main()
