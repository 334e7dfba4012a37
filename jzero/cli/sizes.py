"""The sizes of a decoder of so many parameters: published ones for known names, else by a rule.

The rule follows the published families: heads of 128, D / 128 layers, feed-forward blocks of 8 D / 3, a vocabulary of
32,000, and a head of its own. D is what comes nearest to the number; then the layers are as many as come nearest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from jzero.cli.request import SIZES
from jzero.core.config.settings import check
from jzero.weights.config import ModelConfig, config_of
from jzero.weights.families import param_shapes
from jzero.weights.model_types import COMMON

Sizes = tuple[int, int, int, int, int, int, bool]

# D, layers, heads, heads of keys and values, width of feed-forward blocks, vocabulary, tied: published for Llama 2
# (7B, 13B), Llama 3 (8B), 3.1 (70B, 405B) and 3.2 (1B, 3B).
NAMED: Mapping[str, Sizes] = {
    "1B": (2048, 16, 32, 8, 8192, 128_256, True),
    "3B": (3072, 28, 24, 8, 8192, 128_256, True),
    "7B": (4096, 32, 32, 32, 11_008, 32_000, False),
    "8B": (4096, 32, 32, 8, 14_336, 128_256, False),
    "13B": (5120, 40, 40, 40, 13_824, 32_000, False),
    "70B": (8192, 80, 64, 8, 28_672, 128_256, False),
    "405B": (16_384, 126, 128, 8, 53_248, 128_256, False),
}
MOST = 10**15
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
HEAD, VOCABULARY, WIDEST = 128, 32_000, 512 * 128
TOLERANCE = 0.1
"""How far the parameters of given sizes may be from the number asked for."""


def parse_count(text: str) -> int:
    """Returns the number that `7B`, `1.5B`, `350M` or `2851e6` says.

    Raises:
      ValueError: It is none.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        number = round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    except (ValueError, OverflowError):  # "1.2.3", "1e999"
        number = 0
    if not 1 <= number <= MOST:
        raise ValueError(
            f"`--params` must be a number of parameters up to 1000T, such as 7B, 350M or 2851e6: got {text!r:.200}."
        )
    return number


def model_sizes(text: str, sizes: Mapping[str, int]) -> ModelConfig:
    """Returns the sizes of a decoder of so many parameters.

    Args:
      text: The number, as for `parse_count`.
      sizes: Sizes that are fixed, by their name in `ModelConfig`.

    Raises:
      ValueError: `text` is no number, a size is out of range, or the sizes contradict the number.
    """
    for size, value in sizes.items():
        check(SIZES[size].option, value, COMMON[SIZES[size].field])
    target = parse_count(text)
    name = next((name for name in NAMED if parse_count(name) == target), None)
    if name is None:
        config = _by_rule(target, sizes)
    else:
        config, target = _llama(NAMED[name], sizes), count(_llama(NAMED[name], {}))
    got = count(config)
    if abs(got / target - 1) > TOLERANCE:
        raise _contradiction(text, target, got, sizes)
    return config


def count(config: ModelConfig) -> int:
    """Returns the number of parameters, the embedding included."""
    return sum(math.prod(shape) for shape in param_shapes(config).values())


def _by_rule(target: int, sizes: Mapping[str, int]) -> ModelConfig:
    def sized(d_model: int, num_layers: int) -> ModelConfig:
        heads = max(1, d_model // HEAD)
        hidden = -(-8 * d_model // 3 // 256) * 256  # up to whole multiples
        base = (d_model, num_layers, heads, heads, hidden, VOCABULARY, False)
        return _llama(base, {**sizes, "num_layers": num_layers})

    def depth(d_model: int) -> int:
        return sizes.get("num_layers", max(1, d_model // HEAD))

    widths = [sizes["d_model"]] if "d_model" in sizes else range(HEAD, WIDEST + 1, HEAD)
    width = min(widths, key=lambda d_model: abs(count(sized(d_model, depth(d_model))) - target))
    if "num_layers" in sizes:
        return sized(width, sizes["num_layers"])
    one, two = count(sized(width, 1)), count(sized(width, 2))
    return sized(width, max(1, 1 + round((target - one) / (two - one))))


def _llama(base: Sizes, sizes: Mapping[str, int]) -> ModelConfig:
    """Returns a Llama of the sizes in `base` but for those in `sizes`, and of what follows from these."""
    *_, tied = base
    own = dict(zip(SIZES, base, strict=False))
    found = {**own, **sizes}
    if "num_kv_heads" not in sizes and own["num_kv_heads"] == own["num_heads"]:
        found["num_kv_heads"] = found["num_heads"]
    for name, divisor in (("d_model", "num_heads"), ("num_heads", "num_kv_heads")):
        size, number = found[name], found[divisor]
        if rest := size % number:
            raise ValueError(
                f"`{SIZES[name].option} {size}` must be a multiple of `{SIZES[divisor].option} {number}`, as "
                f"{size - rest or number} and {size - rest + number} are."
            )
    if (head_dim := found["d_model"] // found["num_heads"]) % 2:
        raise ValueError(
            f"`--d-model {found['d_model']}` over `--heads {found['num_heads']}` gives heads of {head_dim}, which must "
            "be even, since rotary positions turn pairs: take half as many heads."
        )
    fields: dict[str, object] = {SIZES[name].field: size for name, size in found.items()}
    fields |= {"model_type": "llama", "tie_word_embeddings": tied, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
    return config_of("`--params`", fields)[0]


def _contradiction(text: str, target: int, got: int, sizes: Mapping[str, int]) -> ValueError:
    options = " ".join(f"{SIZES[name].option} {size}" for name, size in sizes.items())
    if not options:
        return ValueError(
            f"`--params {text}` asks for {target:,} parameters, and the nearest that the rule makes is {got:,}: say "
            "sizes, too, such as `--vocab 1000 --d-model 64 --heads 2`."
        )
    return ValueError(
        f"`--params {text}` and `{options}` contradict each other: the first is {target:,} parameters, and with the "
        f"second it is {got:,}. `--params {short(got)} {options}` would do, or `--params {text}` alone."
    )


def short(number: int) -> str:
    """Returns a number as `parse_count` takes it, to four digits."""
    unit = next((unit for unit in "TBMK" if number >= UNITS[unit]), "")
    return f"{number / UNITS[unit]:.4g}{unit}"
