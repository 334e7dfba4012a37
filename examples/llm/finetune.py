"""Fine-tunes a published model on chats: all of its parameters, or adapters beside a base in 16, 8 or 4 bits.

    python examples/llm/finetune.py --model Qwen2.5-7B-Instruct --data chats.jsonl --seq 4096 --batch 16 \
        --lora-rank 8 --quantize int8 --checkpoints run1 --out tuned  # run it again to resume

Reads the model's folder, as Hugging Face publishes it, in shards, so no process ever holds all of it. At the end the
folder `--out` has the tuned model, or the adapters for PEFT.
"""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jzero
import jzero.data
import jzero.hf
import jzero.lora
from balance import make_step
from chat_data import load_tokenizer, read_examples
from decoder import PROJECTIONS, Decoder, Lora
from generate import ADAPTERS, decode, encode, stop_tokens
from generation import Sampling, generate, left_padded
from packing import PackedRows
from training import (
    Help,
    add_options,
    attention_of,
    data_file,
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
from vocabulary import with_rows

BASE = rf"(?!{ADAPTERS}$).*"
HOLD_OUT_EVERY = 20  # without --held-out, every so many-th example is kept for evaluation


def main() -> None:
    """Reads the command line, and fine-tunes."""
    args = parse_args()
    start(cluster=args.cluster)
    run(args, load_tokenizer(args.model))


def run(args: argparse.Namespace, tokenizer: Any) -> None:
    """Fine-tunes the published model, or one with rows for all tokens."""
    with contextlib.ExitStack() as stack:
        if args.resize_vocab:
            args.model = stack.enter_context(with_rows(args.model, len(tokenizer)))
        finetune(args, tokenizer)


def finetune(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Fine-tunes and exports; returns the last state."""
    model = Decoder(jzero.hf.read_config(args.model), make_lora(args), args.products)
    check_vocabulary(model, tokenizer)
    mesh = make_mesh(model, args)
    train_data, held_out = load_data(args, tokenizer, mesh)
    args.steps = args.steps or train_data.batches_per_epoch
    state = make_sharded_state(model, args, mesh)
    say(jzero.plan_of(state))
    say_if_none_is_rounded(state, args)
    say(attention_of(model, args, packed=True))
    state = train(
        state,
        make_step(of_parts(model, args, mesh, packed=True), args),
        train_data,
        args,
        begin=functools.partial(jzero.load_params, path=args.model, mapping="auto", paths=BASE, donate=True),
        look=make_look(model, held_out, tokenizer, args, mesh),
    )
    if args.out is not None:
        export(state, model, args)
    return state


def make_sharded_state(model: Decoder, args: argparse.Namespace, mesh: Mesh) -> jzero.TrainState:
    """Returns a state in shards: zeros, which the published weights replace, and adapters if there are any."""
    tx = make_optimizer(args.lr, args.steps)
    trainable = None if model.lora is None else ADAPTERS
    # What is not trained has no masters, so it need not be wider than it is multiplied.
    base_dtype = jnp.bfloat16 if trainable and args.precision == "bf16" else jnp.float32

    def make_state(key: jax.Array) -> jzero.TrainState:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x if path[-1].key in ("lora_a", "lora_b") else x.astype(base_dtype), params
        )
        return jzero.TrainState.create(params=set_apart(params, mesh), tx=tx)

    config, key = zero_config(args, quantize=args.quantize), jax.random.key(args.seed)
    if model.config.experts is not None:  # what a router chooses jumps, so its kernel is not rounded
        config = dataclasses.replace(config, rules=config.rules | {".*/router/.*": jzero.LeafRule(quantize=False)})
    return jzero.init_train_state(make_state, key, config=config, mesh=mesh, trainable=trainable, zeros=BASE)


def say_if_none_is_rounded(state: jzero.TrainState, args: argparse.Namespace) -> None:
    """Says if `--quantize` stores nothing in few bits."""
    frozen = [leaf.param.cut for leaf in jzero.plan_of(state).leaves if not leaf.trained]
    if args.quantize != "none" and not any(cut is not None and cut.blocks is not None for cut in frozen):
        say(
            f"--quantize {args.quantize} stores nothing as {args.quantize}: parameters of up to "
            f"{args.persistence_threshold} elements are whole. Lower --persistence-threshold for so small a model."
        )


def make_lora(args: argparse.Namespace) -> Lora | None:
    """Returns the adapters; `None` for the training of all parameters."""
    if args.lora_rank:
        return Lora(rank=args.lora_rank, alpha=args.lora_alpha, modules=args.lora_modules)
    if args.quantize != "none":
        raise SystemExit(f"--quantize {args.quantize} stores what is not trained: it needs --lora-rank.")
    return None


def check_vocabulary(model: Decoder, tokenizer: Any) -> None:
    """Raises unless the embedding has a row for each token."""
    if len(tokenizer) > model.config.vocab_size:
        raise SystemExit(
            f"The tokenizer has {len(tokenizer)} tokens, but the embedding {model.config.vocab_size} rows: take the "
            "tokenizer of this model, or add rows for new tokens by --resize-vocab."
        )


def load_data(
    args: argparse.Namespace, tokenizer: Any, mesh: Mesh
) -> tuple[jzero.data.Loader, jzero.data.Loader | None]:
    """Returns loaders of the data to train on and of the data held out, if there is enough."""
    read = functools.partial(read_examples, tokenizer=tokenizer, max_tokens=args.seq + 1, skip_bad=args.skip_bad)
    examples, counts = read(args.data)
    if args.held_out is not None:
        held_out, _ = read([args.held_out])
    else:
        held_out = examples[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
        examples = [example for number, example in enumerate(examples, 1) if number % HOLD_OUT_EVERY]
    rows = PackedRows(examples, args.seq + 1)
    say(f"{counts}; {rows}; {len(held_out)} examples held out")
    if len(rows) < args.batch:
        say(
            f"warning: {len(rows)} of the {args.batch} rows of a step have data, the others are padding: lower --batch."
        )
    sizes = {"batch_size": args.batch, "mesh": mesh}
    loader = jzero.data.make_loader(rows, **sizes, num_epochs=None, shuffle=True, seed=args.seed)
    if not held_out:
        return loader, None
    return loader, jzero.data.make_loader(PackedRows(held_out, args.seq + 1), **sizes)


def make_look(
    model: Decoder, held_out: jzero.data.Loader | None, tokenizer: Any, args: argparse.Namespace, mesh: Mesh
) -> Callable[[Any], dict[str, float]]:
    """Returns a function that prints a sample and returns the held-out loss; it takes a state."""
    evaluate = make_evaluate(of_parts(model, args, mesh, packed=True))
    sampling = Sampling(num_tokens=args.sample_tokens, stop=stop_tokens(args.model, tokenizer))
    rows = None
    if args.sample is not None:  # before training, since it may be empty
        prompt = encode(tokenizer, args.sample, raw=False)
        rows = left_padded([prompt], jax.random.key(args.seed), num_rows=jax.device_count())
    sample = jzero.make_eval_step(lambda params, prompts: jzero.PerExample(generate(model, params, prompts, sampling)))

    def look(state: Any) -> dict[str, float]:
        if rows is not None:
            (new, *_) = sample(state, rows).addressable_shards  # other processes have the others
            say(f"sample: {decode(tokenizer, np.asarray(new.data)[0])!r}")
        return {} if held_out is None else {"held_out": evaluate(state, held_out)}

    return look


def export(state: Any, model: Decoder, args: argparse.Namespace) -> None:
    """Writes the tuned model as a folder like the one it came from, or its adapters as PEFT does."""
    lora = model.lora
    if lora is not None and not args.merge:
        say(jzero.hf.export_peft(state, args.out, like=args.model, rank=lora.rank, alpha=lora.alpha))
        return
    options: dict[str, Any] = {"mapping": "auto", "like": args.model, "dtype": model.config.dtype}
    if lora is not None:  # what has no adapters is copied from the published files
        options |= {"paths": rf"layers/({'|'.join(lora.names)})/(kernel|lora_[ab])"}
        options |= {"decode": jzero.lora.merged(lora.rank, lora.alpha)}
    say(jzero.export_params(state, args.out, **options))
    if lora is not None:
        say(f"adapters are added to their kernels as the plan stores these; all else is copied from {args.model}")


def parse_args(
    argv: Sequence[str] | None = None, description: str = "Fine-tune a published model on chats.", **more: float
) -> argparse.Namespace:
    """Reads the command line, with `more` options that are numbers, by their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=Help)
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=float, default=default, help="of the method")
    parser.add_argument("--model", type=model_folder, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--data", type=data_file, nargs="+", required=True, help="JSONL files, see chat_data.py")
    parser.add_argument("--held-out", type=data_file, help="JSONL file; by default every 20th example")
    parser.add_argument("--skip-bad", action="store_true", help="leave out lines that are no examples, and count them")
    parser.add_argument("--lora-rank", type=int, default=8, help="of the adapters; 0 to train all parameters")
    parser.add_argument("--lora-alpha", type=float, default=16.0, help="adapters are multiplied by alpha / rank")
    parser.add_argument("--lora-modules", default=".*", help=f"regular expression over {', '.join(PROJECTIONS)}")
    parser.add_argument(
        "--resize-vocab",
        action="store_true",
        help="add rows for tokens that were added to the tokenizer in --model; needs --lora-rank 0",
    )
    parser.add_argument("--quantize", choices=["none", "int8", "nf4"], default="none", help="store the frozen base so")
    parser.add_argument("--sample", help="prompt to answer at each evaluation")
    parser.add_argument("--sample-tokens", type=int, default=64, help="of that answer, at most")
    parser.add_argument("--out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--merge", action="store_true", help="write the whole model, not only the adapters")
    add_options(parser, lr=2e-4)
    args = parser.parse_args(argv)
    if args.out is not None and args.out.exists():
        parser.error(f"--out {args.out} exists: name a new folder.")
    if args.resize_vocab and args.lora_rank:
        parser.error("--resize-vocab adds rows that only the training of all parameters changes: pass --lora-rank 0.")
    return args


if __name__ == "__main__":
    main()
