"""Continues prompts with a published or fine-tuned model.

    python examples/llm/generate.py --model Llama-3.1-8B-Instruct --prompt "Why is the sky blue?"

Weights are read in shards, so that no process ever holds all of them, and then laid out for generation: whole on every
device, each of which continues its own prompts; or divided between some devices, which continue the same prompts
together. Unless you choose, the program divides them by as little as fits, and says so.
"""

import argparse
import functools
import json
import pathlib
import re
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
from chat_data import load_tokenizer
from decoder import Decoder
from generation import Sampling, generate, left_padded
from training import start

MEMORY_SHARE = 0.9  # of a device for weights and cache; the rest is for activations
GIB = 2**30
TENSOR_SPECS = {  # over which devices exchange activations twice a layer: behind `o` and behind `down`
    r"embed/embedding": P("model"),
    r"head/kernel": P(None, "model"),
    r"layers/(q|k|v|gate|up)/kernel": P(None, None, "model"),
    r"layers/(q|k|v)/bias": P(None, "model"),
    r"layers/(o|down)/kernel": P(None, "model"),
}


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
    model = Decoder(jzero.hf.read_config(args.model))
    num_places = max(map(len, prompts)) + args.num_tokens
    mesh = choose_mesh(model, num_rows=len(prompts), num_places=num_places, dtype=args.dtype, divide_by=args.divide_by)
    params = load(model, args.model, mesh, args.dtype)
    num_rows = -(-len(prompts) // mesh.shape["data"]) * mesh.shape["data"]
    batch = left_padded(prompts, jax.random.key(args.seed), num_rows=num_rows)
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    new = np.asarray(jax.jit(functools.partial(generate, model, sampling=sampling))(params, batch))
    return [decode(tokenizer, row) for row in new[: len(prompts)]]


def encode(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Returns the tokens of a prompt: as a user's message if the tokenizer has a chat template, else as it is."""
    if raw or not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    return list(
        tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )


def decode(tokenizer: Any, new: np.ndarray) -> str:
    """Returns new tokens as text."""
    return tokenizer.decode(new[new >= 0].tolist(), skip_special_tokens=True)


def stop_tokens(folder: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end an answer, by the model's `generation_config.json` and its tokenizer."""
    file = pathlib.Path(folder) / "generation_config.json"
    said = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    found = [*(said if isinstance(said, list) else [said]), tokenizer.eos_token_id]
    return tuple(sorted({token for token in found if token is not None}))


def choose_mesh(model: Decoder, *, num_rows: int, num_places: int, dtype: Any, divide_by: int | None) -> Mesh:
    """Returns a mesh `data` x `model`, whose second axis divides the weights by as little as fits; prints it."""
    config, num_devices, itemsize = model.config, jax.device_count(), jnp.dtype(dtype).itemsize
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    weights = itemsize * sum(x.size for x in jax.tree.leaves(shapes))
    cache_row = itemsize * 2 * config.num_layers * num_places * config.num_kv_heads * config.head_dim
    limit = memory_limit()
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for size in sizes if divide_by is None else [divide_by]:
        cache = -(-num_rows * size // num_devices) * cache_row
        needed = (weights + cache) / size
        if divide_by is not None or limit is None or needed <= MEMORY_SHARE * limit:
            break
    else:
        raise SystemExit(
            f"{weights / GIB:.2f} GiB of weights and {cache / GIB:.2f} of cache do not fit {num_devices} devices of "
            f"{limit / GIB:.2f} GiB: take more devices, fewer prompts at once, or fewer tokens."
        )
    how = "whole on each of" if size == 1 else f"tensor, divided by {size}, on"
    known = "their memory is unknown" if limit is None else f"of {limit / GIB:.2f} GiB"
    print(f"weights: {how} {num_devices} devices; with the cache {needed / GIB:.2f} GiB on each; {known}")
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((num_devices // size, size), ("data", "model"), axis_types=types)


def memory_limit() -> int | None:
    """Returns the bytes of a device that programs can use; `None` if it does not say, as CPUs do not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def load(model: Decoder, folder: Any, mesh: Mesh, dtype: Any) -> Any:
    """Returns the parameters of a folder, laid out on a mesh."""

    def make_state(key: jax.Array) -> jzero.TrainState:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        return jzero.TrainState.create(params=params, tx=optax.set_to_zero())

    state = jzero.init_train_state(make_state, jax.random.key(0), stage=3, zeros=".*")
    state = jzero.load_params(state, folder, mapping="auto", donate=True)
    shapes = jax.eval_shape(make_state, jax.random.key(0)).params
    return jzero.gather_params(state, shardings=shardings(shapes, mesh))


def shardings(shapes: Any, mesh: Mesh) -> Any:
    """Returns the layout of each parameter; one that the devices cannot divide evenly is whole on each."""

    def sharding(path: Any, x: Any) -> NamedSharding:
        name = "/".join(key.key for key in path)
        spec = next((spec for pattern, spec in TENSOR_SPECS.items() if re.fullmatch(pattern, name)), P())
        fits = all(size % mesh.shape[axis] == 0 for size, axis in zip(x.shape, spec, strict=False) if axis is not None)
        return NamedSharding(mesh, spec if fits else P())

    return jax.tree_util.tree_map_with_path(sharding, shapes)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Continue prompts with a published or fine-tuned model.")
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--raw", action="store_true", help="continue the prompt itself, without the chat template")
    parser.add_argument("--num-tokens", type=int, default=256, help="most new tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token each time")
    parser.add_argument("--top-k", type=int, help="choose among so many")
    parser.add_argument("--top-p", type=float, default=1.0, help="choose among tokens of so much probability")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--divide-by", type=int, help="devices that share the weights; 1: whole on each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
