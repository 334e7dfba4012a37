"""Continues prompts with a published or fine-tuned model.

    python examples/llm/generate.py --model Qwen2.5-7B-Instruct --prompt "Why is the sky blue?"

Weights are read in shards, so that no process ever holds all of them, and then laid out for generation: whole on every
device, each of which continues its own prompts; or divided between some devices, which continue the same prompts
together. Unless you choose, the program divides them as little as it can, and prints the layout.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import jzero.hf
from adapters import read_lora
from chat_data import load_tokenizer, without_end
from decoder import Decoder
from generation import Sampling, generate, left_padded
from jzero.attention import KERNELS
from jzero.core.config.documents import parse
from jzero.core.config.settings import Setting, block, check, integer, list_of, optional
from layouts import choose_mesh, shardings
from training import attention_of, model_folder, start

ADAPTERS = r"layers/.*/lora_[ab]"
TOKEN = integer(0, most=2**31 - 1)
STOPS = block(
    {
        "eos_token_id": Setting(
            "None, a token, or a list of tokens, which are integers from 0",
            lambda x: list_of(TOKEN).of(x) if isinstance(x, list) else optional(TOKEN).of(x),
        )
    }
)
"""What is read of `generation_config.json`."""
WIDTHS = 128
"""Prompts have a multiple of so many places where a kernel reads them."""
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}


def main() -> None:
    """Prints the continuation of each prompt."""
    args = parse_args()
    start()
    tokenizer = load_tokenizer(args.model)
    for prompt, text in zip(args.prompt, complete(args, tokenizer), strict=True):
        print(f"--- {prompt}\n{text}")


def complete(args: argparse.Namespace, tokenizer: Any) -> list[str]:
    """Returns the continuation of each prompt."""
    prompts = [encode(tokenizer, text, raw=args.raw) for text in args.prompt]
    sampling = Sampling(
        num_tokens=args.num_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop=stop_tokens(args.model, tokenizer),
    )
    lora = None if args.adapter is None else read_lora(args.adapter)
    model = Decoder(jzero.hf.read_config(args.model), lora)
    num_places = max(map(len, prompts)) + args.num_tokens
    mesh = choose_mesh(model, num_rows=len(prompts), num_places=num_places, dtype=args.dtype, divide_by=args.divide_by)
    num_rows = -(-len(prompts) // mesh.shape["data"]) * mesh.shape["data"]
    attending = model
    if mesh.shape["model"] == 1:
        width = -(-max(map(len, prompts)) // WIDTHS) * WIDTHS
        asked = getattr(args, "attention", "auto")  # callers that make `args` themselves may not know it
        how = argparse.Namespace(attention=asked, context=1, seq=width, precision=PRECISIONS[args.dtype])
        choice = attention_of(model, how, packed=True)  # padding is a segment
        attending = model.clone(attention=choice.kernel)
        print(f"prompts: {choice}", file=sys.stderr)
    fused = attending.attention != "plain"
    batch = left_padded(prompts, jax.random.key(args.seed), num_rows=num_rows, multiple_of=WIDTHS if fused else 1)
    params = load(model, args, mesh)
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    print(f"compiling for {num_places} tokens, and generating", file=sys.stderr)
    program = functools.partial(generate, attending, sampling=sampling)
    if fused:  # a kernel is for the rows of one device
        program = jax.shard_map(program, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    new = np.asarray(jax.jit(program)(params, batch))
    return [decode(tokenizer, row) for row in new[: len(prompts)]]


def encode(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Returns the tokens of a prompt: as a user's message if the tokenizer has a chat template, else as it is."""
    if raw or not tokenizer.chat_template:
        return without_end(prompt, tokenizer)
    messages = [{"role": "user", "content": prompt}]
    how = {"tokenize": True, "add_generation_prompt": True, "return_dict": True}
    return list(tokenizer.apply_chat_template(messages, **how)["input_ids"])


def decode(tokenizer: Any, new: np.ndarray) -> str:
    """Returns new tokens as text."""
    return tokenizer.decode(new[new >= 0].tolist(), skip_special_tokens=True)


def stop_tokens(folder: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end an answer: by `generation_config.json` or else `config.json`, and the tokenizer."""
    files = [pathlib.Path(folder) / name for name in ("generation_config.json", "config.json")]
    file = next((file for file in files if file.exists()), None)
    said = None if file is None else check("", parse(file.read_bytes(), file), STOPS, file=file).get("eos_token_id")
    found = [*(said if isinstance(said, list) else [said]), tokenizer.eos_token_id]
    return tuple(sorted({token for token in found if token is not None}))


def load(model: Decoder, args: argparse.Namespace, mesh: Mesh) -> Any:
    """Returns the parameters of a folder, and of adapters if there are some, laid out on a mesh."""

    def make_state(key: jax.Array) -> jzero.TrainState:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        params = jax.tree.map(lambda x: x.astype(args.dtype), params)
        return jzero.TrainState.create(params=params, tx=optax.set_to_zero())

    state = jzero.init_train_state(make_state, jax.random.key(0), stage=3, zeros=".*")
    state = jzero.load_params(state, args.model, mapping="auto", paths=rf"(?!{ADAPTERS}$).*", donate=True)
    if model.lora is not None:
        options = {"mapping": jzero.hf.peft_mapping(args.model, rank=model.lora.rank), "paths": ADAPTERS}
        state = jzero.load_params(state, args.adapter / "adapter_model.safetensors", donate=True, **options)
    if mesh.size == 1:  # the shards are the weights
        return state.params
    shapes = jax.eval_shape(make_state, jax.random.key(0)).params
    return jzero.gather_params(state, shardings=shardings(shapes, mesh))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Continue prompts with a published or fine-tuned model.")
    parser.add_argument("--model", type=model_folder, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--adapter", type=pathlib.Path, help="folder of adapters, as finetune.py and PEFT write it")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--raw", action="store_true", help="continue the prompt itself, without the chat template")
    parser.add_argument("--num-tokens", type=int, default=256, help="most new tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token each time")
    parser.add_argument("--top-k", type=int, help="choose among so many")
    parser.add_argument("--top-p", type=float, default=1.0, help="choose among tokens of so much probability")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--attention", choices=["auto", "plain", "fused", *KERNELS], default="auto", help="of prompts; see pretrain.py"
    )
    parser.add_argument("--divide-by", type=int, help="devices that share the weights; 1: whole on each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
