"""Tunes a published model on preferences, by direct preference optimization (DPO, Rafailov et al. 2023).

    python examples/llm/dpo.py --model Qwen2.5-7B-Instruct --data pairs.jsonl --seq 2048 --batch 16 \
        --lora-rank 8 --quantize int8 --lr 5e-6 --out tuned

Adapters learn to prefer one answer to another. The reference is the same base without them, so there is no second model
in memory; a device gathers each layer of the base once more. Options and outputs are those of `finetune.py`. A line has
a prompt, as text or as messages, and two answers:

    {"prompt": "Why is the sky blue?", "chosen": "Air scatters blue light most.", "rejected": "It is not."}

Shapes: B pairs, S tokens.
"""

import argparse
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import finetune
import jzero
import jzero.data
import jzero.hf
from chat_data import BadLineError, Example, example_of, fields_of, load_tokenizer, read_lines
from decoder import Decoder
from training import Batch, make_mesh, next_token_losses, of_parts, say, start, train

LossFn = Callable[[Any, Batch], tuple[jzero.Weighted, dict[str, jzero.Summed]]]


def main(argv: Sequence[str] | None = None, tokenizer: Any = None) -> Any:
    """Reads the command line, trains and exports; returns the last state."""
    args = parse_args(argv)
    start(cluster=args.cluster)
    tokenizer = tokenizer or load_tokenizer(args.model)
    model = Decoder(jzero.hf.read_config(args.model), finetune.make_lora(args), args.products)
    finetune.check_vocabulary(model, tokenizer)
    mesh = make_mesh(model, args)
    parts = of_parts(model, args, mesh)
    pairs = read_pairs(args.data, tokenizer, args.seq + 1)
    held_out = None if args.held_out is None else read_pairs([args.held_out], tokenizer, args.seq + 1)
    sizes = {"batch_size": args.batch, "mesh": mesh}
    loader = jzero.data.make_loader(pairs, **sizes, num_epochs=None, shuffle=True, seed=args.seed)
    args.steps = args.steps or loader.batches_per_epoch
    loss_fn = preference_loss(parts, args.beta)
    evaluate = make_evaluate(loss_fn)
    state = train(
        finetune.make_sharded_state(model, args, mesh),
        jzero.make_train_step(loss_fn, has_aux=True, clip_norm=1.0, accumulate_steps=args.accumulate_steps),
        loader,
        args,
        begin=functools.partial(jzero.load_params, path=args.model, mapping="auto", paths=finetune.BASE, donate=True),
        look=lambda state: {} if held_out is None else evaluate(state, jzero.data.make_loader(held_out, **sizes)),
    )
    if args.out is not None:
        finetune.export(state, model, args)
    return state


def preference_loss(model: Decoder, beta: float) -> LossFn:
    """Returns the mean loss of pairs, and how many of them are in the right order.

    A batch has tokens [B, 2, S + 1], of the chosen and the rejected answers behind their prompts; `learned` says which
    are of the answers; weights [B] are of its pairs.
    """
    reference = model.clone(lora=None)  # it finds adapters among the parameters, and leaves them alone

    def log_probs(model: Decoder, params: Any, batch: Batch) -> jax.Array:  # [B, 2]
        flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in ("tokens", "learned")}
        losses, learned, _ = next_token_losses(model, params, {**flat, "weights": jnp.ones(len(flat["tokens"]))})
        sums = -(losses * learned).sum(-1).reshape(-1, 2)
        return sums if model.context is None else jax.lax.psum(sums, model.context)

    def loss_fn(params: Any, batch: Batch) -> tuple[jzero.Weighted, dict[str, jzero.Summed]]:
        fixed = jax.lax.stop_gradient(log_probs(reference, params, batch))
        gains = log_probs(model, params, batch) - fixed  # of each answer, over the reference
        margins, weights = beta * (gains[:, 0] - gains[:, 1]), batch["weights"]
        right = ((margins > 0) * weights).sum()
        return jzero.Weighted(-(jax.nn.log_sigmoid(margins) * weights).sum(), weights.sum()), {
            "right": jzero.Summed(right)
        }

    return loss_fn


def make_evaluate(loss_fn: LossFn) -> Callable[[Any, jzero.data.Loader], dict[str, float]]:
    """Returns a function from a state and held-out pairs to their mean loss, and the share in the right order."""

    def sums(params: Any, batch: Batch) -> jzero.Summed:
        loss, aux = loss_fn(params, batch)
        return jzero.Summed((loss.sum, loss.weight, aux["right"].value))

    eval_step = jzero.make_eval_step(sums)

    def evaluate(state: Any, loader: jzero.data.Loader) -> dict[str, float]:
        loss, weight, right = np.sum(jax.device_get([eval_step(state, batch) for batch in loader]), axis=0)
        return {"held_out": float(loss / weight), "accuracy": float(right / weight)}

    return evaluate


class Pairs(Sequence[dict[str, np.ndarray]]):
    """Pairs of a chosen and a rejected answer as rows of so many tokens, `tokens` and `learned` [2, S + 1]."""

    def __init__(self, pairs: Sequence[tuple[Example, Example]], row_tokens: int) -> None:
        self.pairs, self.row_tokens = pairs, row_tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all pairs, by which the loader detects a position that was saved for other data."""
        digest = hashlib.sha256(str(self.row_tokens).encode())
        for example in (example for pair in self.pairs for example in pair):
            digest.update(example.tokens.tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        def padded(x: np.ndarray) -> np.ndarray:
            return np.pad(x, (0, self.row_tokens - len(x)))

        fields = ("tokens", "learned")
        return {name: np.stack([padded(getattr(x, name)) for x in self.pairs[index]]) for name in fields}


def read_pairs(paths: Iterable[Any], tokenizer: Any, max_tokens: int) -> Pairs:
    """Returns the pairs of JSONL files; those with an answer that is cut are left out, and counted."""
    pairs, num_cut = [], 0
    for where, line in read_lines(paths):
        try:
            chosen, rejected = (example_of(answer, tokenizer) for answer in _answers(fields_of(line)))
        except BadLineError as error:
            raise BadLineError(f"{where}: {error}") from error
        cut = max(len(chosen.tokens), len(rejected.tokens)) > max_tokens
        num_cut += cut
        pairs += [] if cut else [(chosen, rejected)]
    if not pairs:
        raise ValueError(f"{', '.join(map(str, paths))} have no pair of up to {max_tokens} tokens: raise --seq.")
    say(f"{len(pairs)} pairs; {num_cut} longer than {max_tokens} tokens, and left out")
    return Pairs(pairs, max_tokens)


def _answers(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the two answers as `chat_data` takes them. What precedes them is the same, and cancels."""
    match fields:
        case {"prompt": str(prompt), "chosen": str(chosen), "rejected": str(rejected)}:
            return [{"prompt": prompt, "completion": text} for text in (chosen, rejected)]
        case {"prompt": list(messages), "chosen": str(chosen), "rejected": str(rejected)}:
            return [{"messages": [*messages, {"role": "assistant", "content": text}]} for text in (chosen, rejected)]
    raise BadLineError(
        "A line must have a `prompt`, as text or messages, and the texts `chosen` and `rejected`: got "
        f"{sorted(fields)}."
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    args = finetune.parse_args(argv, "Tune a published model on preferences.", beta=0.1)
    if not args.lora_rank:
        raise SystemExit("The reference is the base without adapters: pass a --lora-rank above 0.")
    return args


if __name__ == "__main__":
    main()
