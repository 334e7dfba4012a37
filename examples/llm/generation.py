"""Generation in one program: the prompts at once, then a loop over tokens with a cache of keys and values.

Shapes: B prompts, S tokens of a prompt, N new tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoder import Decoder
from kv_cache import make_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose tokens: the most likely at temperature 0, else at random.

    Attributes:
      num_tokens: Most new tokens.
      temperature: Divides the logits.
      top_k: How many of the most likely tokens to choose from; `None` for all.
      top_p: The least probability that the tokens to choose from have together; 0 for the most likely token.
      stop: Tokens that end a row.

    Raises:
      ValueError: A field has a value that means nothing.
    """

    num_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, is_right, rule in (
            ("num_tokens", self.num_tokens >= 1, "at least 1"),
            # A smaller one would make infinities of logits.
            ("temperature", self.temperature == 0 or 1e-6 <= self.temperature < np.inf, "0, or from 1e-6 and finite"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or left out to choose from all"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
        ):
            if not is_right:
                raise ValueError(f"`{name}` must be {rule}: got {getattr(self, name)!r}.")


def generate(model: Decoder, params: Any, prompts: Mapping[str, jax.Array], sampling: Sampling) -> jax.Array:
    """Returns new tokens, int32 [B, N], -1 behind the end of a row.

    Args:
      model: The model.
      params: Its parameters.
      prompts: As `left_padded` makes them.
      sampling: How to choose tokens.
    """
    tokens, lengths = prompts["tokens"], prompts["lengths"]  # [B, S], [B]
    (num_rows, num_places), dtype = tokens.shape, params["embed"]["embedding"].dtype
    keys = jax.random.wrap_key_data(prompts["keys"])  # [B]

    def choose(logits: jax.Array, number: Any) -> jax.Array:  # [B, 1, V] -> [B]
        return choose_token(logits[:, 0], jax.vmap(jax.random.fold_in, (0, None))(keys, number), sampling)

    def ends(chosen: jax.Array) -> jax.Array:
        return jnp.isin(chosen, jnp.array(sampling.stop, jnp.int32))

    positions = jnp.arange(num_places)[None] - (num_places - lengths)[:, None]  # [B, S]; padding is negative
    cache = make_cache(model.config, num_rows, num_places + sampling.num_tokens, dtype)
    logits, cache = model.apply({"params": params}, tokens, positions, cache=cache)
    chosen = choose(logits, 0)
    new = jnp.full((num_rows, sampling.num_tokens), -1).at[:, 0].set(chosen)

    def goes_on(carry: Any) -> jax.Array:
        number, _, ended, _, _ = carry
        return (number < sampling.num_tokens) & ~ended.all()

    def add_token(carry: Any) -> Any:
        number, chosen, ended, new, cache = carry
        positions = (lengths + number - 1)[:, None]
        logits, cache = model.apply({"params": params}, chosen[:, None], positions, cache=cache)
        chosen = choose(logits, number)
        new = new.at[:, number].set(jnp.where(ended, -1, chosen))
        return number + 1, chosen, ended | ends(chosen), new, cache

    return jax.lax.while_loop(goes_on, add_token, (1, chosen, ends(chosen), new, cache))[3]


def choose_token(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:  # [B, V], [B] -> [B]
    if not sampling.temperature or not sampling.top_p:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares  # the probability of all that are likelier
        least = jnp.where(before < sampling.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def left_padded(
    prompts: Sequence[Sequence[int]], key: jax.Array, *, num_rows: int | None = None, multiple_of: int = 1
) -> dict[str, np.ndarray]:
    """Returns prompts as arrays: tokens [B, S], padded at the left, lengths [B], and a key for each row.

    S is the least multiple of a number, for which kernels of attention ask. With `num_rows`, prompts are repeated up to
    that many rows. A row's key depends on `key` and its number only.

    Raises:
      ValueError: A prompt has no tokens, so there is nothing to continue.
    """
    if empty := [number for number, prompt in enumerate(prompts) if not len(prompt)]:
        raise ValueError(f"Each prompt must have tokens to continue: number {empty[0]}, from 0, has none.")
    rows = [prompts[number % len(prompts)] for number in range(num_rows or len(prompts))]
    width = -(-max(map(len, rows)) // multiple_of) * multiple_of
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(rows)))
    return {
        "tokens": np.array([[0] * (width - len(row)) + list(row) for row in rows], np.int32),
        "lengths": np.array([len(row) for row in rows], np.int32),
        "keys": np.asarray(jax.random.key_data(keys)),
    }
