"""Trains a model from the start: its sizes from a `config.json`, its data from files of tokens.

    python examples/llm/pretrain.py --config Llama-3.1-8B --data tokens/*.bin --seq 4096 --batch 64 --checkpoints run2

A file holds nothing but tokens, one after another, as numbers of `--token-dtype`. It is mapped, not read: each process
touches only the rows of its own devices. At each logged step the program prints its share of the devices' peak, MFU:
the products of forward and backward pass, without recomputation, per second of wall time.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero
import jzero.data
import jzero.hf
from balance import make_step
from decoder import Decoder
from expert_parallel import of_experts
from jzero.machines.limits import this_machine
from training import (
    Help,
    add_options,
    attention_of,
    make_evaluate,
    make_mesh,
    make_optimizer,
    model_folder,
    of_parts,
    say,
    set_apart,
    start,
    train,
    zero_config,
)


class TokenFile:
    """A file of tokens as rows of `seq + 1`; the last token of a row is the first of the next."""

    def __init__(self, path: str, *, dtype: str, seq: int, vocab_size: int) -> None:
        self.tokens, self.seq, self.vocab_size = np.memmap(path, dtype, mode="r"), seq, vocab_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        start = row * self.seq
        tokens = self.tokens[start : start + self.seq + 1].astype(np.int32)
        if tokens.max() >= self.vocab_size:
            raise ValueError(
                f"There is a token {tokens.max()}, but the model has {self.vocab_size}: is --token-dtype right?"
            )
        return {"tokens": tokens}


def main() -> None:
    """Trains."""
    args = parse_args()
    start(cluster=args.cluster)
    model = Decoder(jzero.hf.read_config(args.config), product=args.products)
    mesh = make_mesh(model, args)
    loader, held_out = (load_data(paths, model, args, mesh) for paths in (args.data, args.held_out))
    args.steps = args.steps or loader.batches_per_epoch
    tx = make_optimizer(args.lr, args.steps)

    def make_state(key: jax.Array) -> jzero.TrainState:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return jzero.TrainState.create(params=set_apart(params, mesh), tx=tx)

    state = jzero.init_train_state(make_state, jax.random.key(args.seed), config=zero_config(args), mesh=mesh)
    say(jzero.plan_of(state))
    say(attention_of(model, args, packed=False))
    parts = of_parts(model, args, mesh)
    evaluate = make_evaluate(parts)
    train(
        state,
        make_step(parts, args),
        loader,
        args,
        begin=lambda state: state,
        look=lambda state: {} if held_out is None else {"held_out": evaluate(state, held_out)},
        sinks=[peak_share(model, args)],
    )


def load_data(
    paths: Any, model: Decoder, args: argparse.Namespace, mesh: jax.sharding.Mesh
) -> jzero.data.Loader | None:
    """Returns a loader of files of tokens, `None` without any; those to train on repeat, each time in another order."""
    if not paths:
        return None
    sizes = {"seq": args.seq, "vocab_size": model.config.vocab_size}
    open_file = functools.partial(TokenFile, dtype=args.token_dtype, **sizes)
    source = jzero.data.FileSource(map(str, sorted(paths)), open_file=open_file)
    epochs = {"num_epochs": None, "shuffle": True, "seed": args.seed} if paths is args.data else {}
    return jzero.data.make_loader(source, batch_size=args.batch, mesh=mesh, **epochs)


def flops_per_token(model: Decoder, seq: int) -> float:
    """Returns the operations of forward and backward pass: of kernels, and of the tokens that a token attends to."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    config, kernels = model.config, 0
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        size = x.size if path[-1].key == "kernel" or (config.tied and path[-1].key == "embedding") else 0
        some = config.experts is not None and of_experts(path)
        kernels += size * config.experts.per_token // config.experts.count if some else size
    attended = sum(min(seq / 2, window or seq) for window in config.windows)  # tokens, summed over layers
    scores = 2 * attended * config.num_heads * config.head_dim  # multiplied with queries, then with values
    return 6 * (kernels + scores)


def peak_share(model: Decoder, args: argparse.Namespace) -> Callable[[int, Mapping[str, float]], None]:
    """Returns a sink that prints the speed of a step, and its share of the devices' published peak."""
    machine, kind = this_machine(jax.devices()), jax.devices()[0].device_kind
    if machine is None:
        say(f"no published peak for {kind!r} devices, so MFU is not shown")
        return lambda step, values: None
    name = {"bf16": "bf16", "fp32": "tf32" if machine.kind == "gpu" else "bf16"}[args.precision]
    peak, flops = machine.flops[name] * jax.device_count(), flops_per_token(model, args.seq)

    def tell(step: int, values: Mapping[str, float]) -> None:
        if (speed := values.get("perf/tokens_per_second")) is not None:
            share = speed * flops / peak
            print(f"step {step}: {speed:,.0f} tokens/s, {share:.1%} of the peak, {peak / 1e15:.2f} Pflop/s")

    return tell


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a language model from the start.", formatter_class=Help)
    parser.add_argument("--config", type=model_folder, required=True, help="config.json, or its folder")
    parser.add_argument("--data", type=pathlib.Path, nargs="+", required=True, help="files of tokens")
    parser.add_argument("--held-out", type=pathlib.Path, nargs="+", help="files of tokens to evaluate on")
    parser.add_argument("--token-dtype", choices=["uint16", "uint32"], default="uint16", help="of these files")
    add_options(parser, lr=3e-4)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
