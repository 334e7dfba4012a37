"""The sizes of a decoder of so many parameters: published ones for known names, else by a rule.

The rule follows the published families: heads of 128, D / 128 layers, feed-forward blocks of 8 D / 3, a vocabulary of
32,000, and a head of its own. D is what comes nearest to the number; then the layers are as many as come nearest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jzero.hf.config import ModelConfig

# D, layers, heads, heads of keys and values, width of feed-forward blocks, vocabulary, tied: published for Llama 2
# (7B, 13B), Llama 3 (8B), 3.1 (70B, 405B) and 3.2 (1B, 3B).
NAMED: Mapping[str, tuple[int, int, int, int, int, int, bool]] = {
    "1B": (2048, 16, 32, 8, 8192, 128_256, True),
    "3B": (3072, 28, 24, 8, 8192, 128_256, True),
    "7B": (4096, 32, 32, 32, 11_008, 32_000, False),
    "8B": (4096, 32, 32, 8, 14_336, 128_256, False),
    "13B": (5120, 40, 40, 40, 13_824, 32_000, False),
    "70B": (8192, 80, 64, 8, 28_672, 128_256, False),
    "405B": (16_384, 126, 128, 8, 53_248, 128_256, False),
}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
HEAD, VOCABULARY, WIDEST = 128, 32_000, 512 * 128
NEAR = 0.1
"""How far the parameters of given sizes may be from the number asked for."""
OPTIONS = {
    "d_model": "--d-model",
    "num_layers": "--layers",
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "d_hidden": "--d-hidden",
    "vocab_size": "--vocab",
}


def parse_count(text: str) -> int:
    """Returns the number that `7B`, `1.5B`, `350M` or `2851e6` says.

    Raises:
      ValueError: It is none.
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        number = round(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    except (ValueError, OverflowError):  # "1.2.3", "1e999"
        number = 0
    if number < 1:
        raise ValueError(f"`--params` must be a number of parameters, such as 7B, 350M or 2851e6: got {text!r}.")
    return number


def model_sizes(text: str, given: Mapping[str, int]) -> ModelConfig:
    """Returns the sizes of a decoder of so many parameters.

    Args:
      text: The number, as for `parse_count`.
      given: Sizes that are not to be chosen, by their name in `ModelConfig`.

    Raises:
      ValueError: `text` is no number, a size is out of range, or the sizes contradict the number.
    """
    wanted = parse_count(text)
    name = next((name for name in NAMED if parse_count(name) == wanted), None)
    if name is None:
        found = _by_rule(wanted, given)
    else:
        found = _replaced(llama(*NAMED[name]), given)
        wanted = count(llama(*NAMED[name]))
    got = count(found)
    if abs(got / wanted - 1) > NEAR:
        raise _contradiction(text, wanted, got, given)
    return found


def count(config: ModelConfig) -> int:
    """Returns the number of parameters, the embedding included."""
    per_layer = config.d_model * (2 + 2 * config.post_norms)  # norms
    per_layer += 2 * config.d_model * (config.num_heads + config.num_kv_heads) * config.head_dim
    per_layer += (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.qkv_bias
    per_layer += 2 * config.head_dim * config.qk_norm + 3 * config.d_model * config.d_hidden
    embeddings = (1 if config.tied else 2) * config.vocab_size * config.d_model
    return embeddings + config.num_layers * per_layer + config.d_model


def llama(  # noqa: PLR0913  # the sizes of a decoder
    d_model: int, num_layers: int, num_heads: int, num_kv_heads: int, d_hidden: int, vocab_size: int, tied: bool = False
) -> ModelConfig:
    """Returns a decoder of these sizes, otherwise a Llama."""
    head_dim = d_model // num_heads
    frequencies = tuple(10_000.0 ** (-i / head_dim) for i in range(0, head_dim, 2))
    return ModelConfig(
        model_type="llama",
        vocab_size=vocab_size,
        d_model=d_model,
        d_hidden=d_hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=1e-5,
        tied=tied,
        gelu=False,
        qkv_bias=False,
        qk_norm=False,
        unit_norm=False,
        post_norms=False,
        embed_scale=1.0,
        attn_scale=head_dim**-0.5,
        attn_softcap=None,
        final_softcap=None,
        inverse_frequencies=(frequencies,) * num_layers,
        windows=(None,) * num_layers,
        dtype="bfloat16",
    )


def _by_rule(wanted: int, given: Mapping[str, int]) -> ModelConfig:
    def sized(d_model: int, num_layers: int) -> ModelConfig:
        heads = given.get("num_heads", max(1, d_model // HEAD))
        hidden = -(-8 * d_model // 3 // 256) * 256  # up to whole multiples
        base = llama(d_model, num_layers, 1, 1, hidden, VOCABULARY)
        return _replaced(base, {"num_heads": heads, "num_kv_heads": heads, **given, "num_layers": num_layers})

    def depth(d_model: int) -> int:
        return given.get("num_layers", max(1, d_model // HEAD))

    widths = [given["d_model"]] if "d_model" in given else range(HEAD, WIDEST + 1, HEAD)
    width = min(widths, key=lambda d_model: abs(count(sized(d_model, depth(d_model))) - wanted))
    if "num_layers" in given:
        return sized(width, given["num_layers"])
    one, two = count(sized(width, 1)), count(sized(width, 2))
    return sized(width, max(1, 1 + round((wanted - one) / (two - one))))


def _replaced(config: ModelConfig, given: Mapping[str, Any]) -> ModelConfig:
    """Returns other sizes, and what follows from them."""
    found = dataclasses.replace(config, **given)
    if "num_heads" in given and "num_kv_heads" not in given and config.num_kv_heads == config.num_heads:
        found = dataclasses.replace(found, num_kv_heads=found.num_heads)
    for what, size, by in (("d_model", found.d_model, "num_heads"), ("num_heads", found.num_heads, "num_kv_heads")):
        number = getattr(found, by)
        if rest := size % number:
            raise ValueError(
                f"`{OPTIONS[what]} {size}` must be a multiple of `{OPTIONS[by]} {number}`, as "
                f"{size - rest or number} and {size - rest + number} are."
            )
    if (head_dim := found.d_model // found.num_heads) % 2:
        raise ValueError(
            f"`--d-model {found.d_model}` over `--heads {found.num_heads}` gives heads of {head_dim}, which must be "
            "even, since rotary positions turn pairs: take half as many heads."
        )
    return llama(
        found.d_model,
        found.num_layers,
        found.num_heads,
        found.num_kv_heads,
        found.d_hidden,
        found.vocab_size,
        found.tied,
    )


def _contradiction(text: str, wanted: int, got: int, given: Mapping[str, int]) -> ValueError:
    sizes = " ".join(f"{OPTIONS[name]} {size}" for name, size in given.items())
    if not sizes:
        return ValueError(
            f"`--params {text}` asks for {wanted:,} parameters, and the nearest that the rule makes is {got:,}: say "
            "sizes, too, such as `--vocab 1000 --d-model 64 --heads 2`."
        )
    return ValueError(
        f"`--params {text}` and `{sizes}` contradict each other: the first is {wanted:,} parameters, and with the "
        f"second it is {got:,}. `--params {short(got)} {sizes}` would do, or `--params {text}` alone."
    )


def short(number: int) -> str:
    """Returns a number as `parse_count` takes it, to four digits."""
    unit = next((unit for unit in "TBMK" if number >= UNITS[unit]), "")
    return f"{number / UNITS[unit]:.4g}{unit}"
