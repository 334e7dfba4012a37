"""Fine-tunes a GPT with LoRA: the model is frozen but still partitioned, and only adapters are trained.

    python examples/lora.py                                # trains the model first, then adapters on other text
    python examples/lora.py --pretrained base.safetensors  # keeps the model in this file, and reuses it
    python examples/lora.py --merged tuned.safetensors     # writes the merged model

The model learns the sources of the standard library; the adapters (Flax's own, `nnx.LoRALinear`) then learn its
`encodings`, mostly tables of characters. At stage 3 every device holds its part of the frozen weights, without
gradients, masters or moments; adapters have all of these. It runs on all accelerators if there are any, else on eight
virtual CPU devices.
"""

import argparse
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import gpt_nnx
import jzero
from cpu_devices import use_virtual_cpu_devices
from gpt import GPTConfig, next_byte_loss
from memory_by_stage import bytes_on
from text_data import Corpus, load_corpus, sample_batch

ADAPTED = ("qkv", "attention_out", "mlp_in", "mlp_out")
WITHOUT_ADAPTERS = r"(?!.*/lora_[ab]).*"
NUM_VALIDATION_BATCHES = 8

State = tuple[gpt_nnx.GPT, nnx.Optimizer]


def loss_fn(model: gpt_nnx.GPT, batch: jax.Array) -> jax.Array:
    """Returns the loss in nats per byte, with adapters or without."""
    return next_byte_loss(model(batch[:, :-1]), batch[:, 1:])


train_step = jzero.make_train_step(loss_fn, clip_norm=1.0)
eval_step = jzero.make_eval_step(loss_fn)


def main() -> None:
    """Pretrains or loads, fine-tunes, merges, exports."""
    args = parse_args()
    use_virtual_cpu_devices()
    num_devices = jzero.make_mesh().size
    if args.batch_size % num_devices:
        raise SystemExit(f"--batch-size must be a multiple of {num_devices} (devices): got {args.batch_size}.")
    config = jzero.ZeroConfig(stage=args.stage, persistence_threshold=args.persistence_threshold)
    with tempfile.TemporaryDirectory() as scratch:
        pretrained = args.pretrained or pathlib.Path(scratch) / "pretrained.safetensors"
        if not pretrained.exists():
            pretrain(pretrained, args, config)
        state = with_adapters(pretrained, args, config)

    print(jzero.plan_of(state))
    corpus = load_corpus("encodings/*.py")
    before = validation_loss(state, corpus, args)
    state = train(state, corpus, args, steps=args.steps)
    after = validation_loss(state, corpus, args)
    merged = merge(state, config, args)
    print(
        f"fine-tuned: validation loss {before:.4f} -> {after:.4f}, merged {validation_loss(merged, corpus, args):.4f}"
    )
    print_bytes(state)
    if args.merged is not None:
        print(jzero.export_params(merged, args.merged))


def pretrain(path: pathlib.Path, args: argparse.Namespace, config: jzero.ZeroConfig) -> None:
    """Trains the whole model, and writes its parameters."""
    make_state = gpt_nnx.make_state_fn(model_config(args), optax.adamw(args.pretrain_lr))
    state = jzero.init_train_state(make_state, jax.random.key(args.seed), config=config)
    corpus = load_corpus()
    before = validation_loss(state, corpus, args)
    state = train(state, corpus, args, steps=args.pretrain_steps)
    print(f"pretrained: validation loss {before:.4f} -> {validation_loss(state, corpus, args):.4f}")
    jzero.export_params(state, path)


def with_adapters(pretrained: pathlib.Path, args: argparse.Namespace, config: jzero.ZeroConfig) -> State:
    """Returns a model with pretrained weights and new adapters, and an optimizer for only the adapters."""

    def make_state(key: jax.Array) -> State:
        rngs = nnx.Rngs(key)
        model = gpt_nnx.GPT(model_config(args), rngs=rngs)
        for block in model.blocks:
            for name in ADAPTED:
                linear = getattr(block, name)
                adapted = nnx.LoRALinear(linear.in_features, linear.out_features, lora_rank=args.rank, rngs=rngs)
                setattr(block, name, adapted)
        return model, nnx.Optimizer(model, optax.adamw(args.lr), wrt=nnx.LoRAParam)

    # The state is created in shards, and the file is read into them: no device ever holds the whole model.
    state = jzero.init_train_state(make_state, jax.random.key(args.seed), config=config)
    return jzero.load_params(state, pretrained, paths=WITHOUT_ADAPTERS)


def merge(state: State, config: jzero.ZeroConfig, args: argparse.Namespace) -> State:
    """Returns an equal model without adapters; each device briefly holds all of it."""
    tuned, _ = jzero.unshard_train_state(state)
    model = gpt_nnx.GPT(model_config(args), rngs=nnx.Rngs(0))
    for block in tuned.blocks:
        for name in ADAPTED:
            adapted = getattr(block, name)
            adapted.kernel[...] += adapted.lora.lora_a[...] @ adapted.lora.lora_b[...]
            del adapted.lora
    nnx.update(model, nnx.state(tuned))
    pair = (model, nnx.Optimizer(model, optax.set_to_zero(), wrt=nnx.Param))
    return jzero.shard_train_state(pair, config=config, donate=True)


def train(state: State, corpus: Corpus, args: argparse.Namespace, *, steps: int) -> State:
    """Returns the state after a number of steps."""
    rng = np.random.default_rng(args.seed)
    for _ in range(steps):
        state, _ = train_step(state, sample_batch(corpus.train, rng, batch_size=args.batch_size, seq_len=args.seq_len))
    return state


def validation_loss(state: State, corpus: Corpus, args: argparse.Namespace) -> float:
    """Returns the loss in nats per byte on batches of the held-out files, the same batches every time."""
    rng, sizes = np.random.default_rng(0), {"batch_size": args.batch_size, "seq_len": args.seq_len}
    losses = [eval_step(state, sample_batch(corpus.validation, rng, **sizes)) for _ in range(NUM_VALIDATION_BATCHES)]
    return float(np.mean(jax.device_get(losses)))


def model_config(args: argparse.Namespace) -> GPTConfig:
    """Returns the sizes of the model; its blocks are unrolled, so that each can get adapters."""
    sizes: dict[str, Any] = {"d_model": args.d_model, "num_layers": args.layers, "num_heads": args.heads}
    return GPTConfig(**sizes, seq_len=args.seq_len, scan=False, remat=False)


def print_bytes(state: State) -> None:
    """Prints the bytes of model and optimizer state on the first device."""
    device = jax.local_devices()[0]
    model, optimizer = (bytes_on(device, nnx.state(part)) for part in state)
    whole, _ = (bytes_on(device, nnx.state(part)) for part in jzero.unshard_train_state(state))
    print(f"on each device: model {model:,} bytes ({whole:,} whole), optimizer {optimizer:,} bytes")


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a GPT with LoRA and ZeRO.")
    parser.add_argument("--pretrained", type=pathlib.Path, help="safetensors of the model; trained if not there")
    parser.add_argument("--merged", type=pathlib.Path, help="file to write the merged model to")
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--persistence-threshold", type=int, default=300, help="elements kept whole at stage 3")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--d-model", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step over all devices")
    parser.add_argument("--pretrain-steps", type=int, default=150)
    parser.add_argument("--pretrain-lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=100, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
