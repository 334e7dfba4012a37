"""Attention as one kernel, which computes no masked block of scores, and keeps none in the devices' memory.

    choose("auto", config, platform="tpu", ...) -> Choice("splash", why)

`KERNELS` says what each kernel can do. With long contexts each device has two pieces of a row, `attention.py`; splash
attention gets the part of its table of blocks that belongs to a piece.

Shapes: B rows, S tokens of this device, T places that are attended to, H heads, K heads of keys and values, C size of a
head.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jzero.hf import ModelConfig

INTERPRET = False
"""Whether kernels are interpreted, so that they run without their accelerator. Tests set it."""
LARGEST_BLOCK = 1024


class Kernel(NamedTuple):
    """What a kernel can do.

    Attributes:
      platform: Where it runs.
      can: Of the features of `needs`, those that it has.
      tokens: The number of tokens, of each piece of a row, must be a multiple.
      wide: Whether it takes fp32.
    """

    platform: str
    can: frozenset[str]
    tokens: int
    wide: bool


ALL = frozenset({"windows", "segments", "soft cap", "sinks", "parts of rows"})
KERNELS = {
    "splash": Kernel("tpu", ALL, 128, wide=True),
    "cudnn": Kernel("gpu", frozenset({"windows"}), 1, wide=False),
    "pallas": Kernel("gpu", frozenset({"segments"}), 128, wide=True),
}


class Choice(NamedTuple):
    """The kernel of a run, or "plain", and why."""

    kernel: str
    why: str

    def __str__(self) -> str:
        return f"attention: {self.kernel}, {self.why}"


def choose(  # noqa: PLR0913  # what decides
    wanted: str, config: ModelConfig, platform: str, *, tokens: int, pieces: int, segments: bool, wide: bool
) -> Choice:
    """Returns which attention a run takes.

    Args:
      wanted: "auto", "plain", "fused", or a key of `KERNELS`.
      config: The model.
      platform: That of the devices.
      tokens: Of a row.
      pieces: Into which rows are divided.
      segments: Whether rows are packed.
      wide: Whether products are in fp32.
    """
    if wanted == "plain":
        return Choice("plain", "as --attention says")
    needs = needs_of(config, pieces=pieces, segments=segments)
    reasons = []
    for name, kernel in KERNELS.items():
        if wanted in ("auto", "fused") and kernel.platform != platform:
            continue
        if missing := sorted(needs - kernel.can):
            reasons.append(f"{name} has no {', no '.join(missing)}")
        elif tokens % (pieces * kernel.tokens):
            reasons.append(f"{name} takes multiples of {pieces * kernel.tokens} tokens, not {tokens}")
        elif wide and not kernel.wide:
            reasons.append(f"{name} takes no fp32")
        elif wanted in ("auto", "fused", name):
            return Choice(name, f"the kernel for {platform} that has {', '.join(sorted(needs)) or 'what it takes'}")
    why = "; ".join(reasons) or f"there is no kernel for {platform}"
    if wanted != "auto":
        raise SystemExit(f"--attention {wanted}: {why}. Pass --attention plain.")
    return Choice("plain", why)


def needs_of(config: ModelConfig, *, pieces: int, segments: bool) -> frozenset[str]:
    """Returns the features of `KERNELS` that a model and its rows need, beside causal masks and shared keys."""
    has = {
        "windows": any(window is not None for window in config.windows),
        "segments": segments,
        "soft cap": config.attn_softcap is not None,
        "sinks": config.sinks,
        "parts of rows": pieces > 1,
    }
    return frozenset(name for name, is_needed in has.items() if is_needed)


def attend(  # noqa: PLR0913  # what attention has
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: tuple[jax.Array, jax.Array],
    window: int | None,
    config: ModelConfig,
    sinks: jax.Array | None = None,
    context: str | None = None,
) -> jax.Array:
    """Returns what `attention.attend` does, [B, S, H, C].

    Args:
      kernel: A key of `KERNELS`.
      q: Queries [B, S, H, C].
      k: Keys [B, T, K, C].
      v: Values [B, T, K, C].
      segments: Those of the queries [B, S], and of the keys [B, T]. Within one, positions follow each other.
      window: How many tokens a token sees.
      config: The model.
      sinks: Scores beside those of the keys, [H].
      context: The mesh axis along which devices have two pieces each of rows.
    """
    if kernel == "cudnn":
        local = None if window is None else (window - 1, 0)
        how: dict[str, Any] = {"is_causal": True, "local_window_size": local, "implementation": kernel}
        return jax.nn.dot_product_attention(q, k, v, scale=config.attn_scale, **how)
    if kernel == "pallas":
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        return _mha()(q, k, v, segments[0], sm_scale=config.attn_scale, causal=True, interpret=INTERPRET)
    q = (q.astype(jnp.float32) * config.attn_scale).astype(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [B, H, S, C]
    count = 1 if context is None else 2 * lax.axis_size(context)
    index = 0 if context is None else lax.axis_index(context)
    whole = splash_kernel(q.shape[1], k.shape[2], count, window, config.attn_softcap)
    pieces = [_piece(whole, number, count) for number in ([index] if count == 1 else [index, count - 1 - index])]

    def of_piece(piece: splash.SplashAttentionKernel, q: jax.Array, own: jax.Array) -> jax.Array:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
            return piece(q, k, v, splash.SegmentIds(*ids), sinks)

        return jax.vmap(run)(q, k, v, own, segments[1])

    parts = zip(pieces, jnp.split(q, len(pieces), axis=2), jnp.split(segments[0], len(pieces), axis=1), strict=True)
    return jnp.concatenate([of_piece(*part) for part in parts], axis=2).swapaxes(1, 2)


def splash_kernel(
    heads: int, tokens: int, shards: int, window: int | None, softcap: float | None
) -> splash.SplashAttentionKernel:
    """Returns splash attention for whole rows; its tables can be divided into as many parts as there are shards."""
    size = next(n for n in (LARGEST_BLOCK, 512, 256, 128) if tokens // shards % n == 0)
    inner = min(size, 512)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=inner,
        block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=inner, block_q_dq=size, block_kv_dq=size,
    )  # fmt: skip
    mask = masks.MultiHeadMask([Band((tokens, tokens), window)] * heads)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=shards,
            attn_logits_soft_cap=softcap,
            interpret=INTERPRET,
        )


class Band(masks.LocalMask):
    """A causal mask, perhaps with a window. Of most blocks their place says all, which is quick for long rows."""

    def __init__(self, shape: tuple[int, int], window: int | None) -> None:
        self.window = shape[1] if window is None else window
        super().__init__(shape, (self.window - 1, 0), 0)

    def __getitem__(self, block: Any) -> Any:
        rows, columns = block
        nearest, farthest = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
        if farthest < 0 or nearest >= self.window:
            return np.zeros((1, 1), bool)
        if nearest >= 0 and farthest < self.window:
            return np.ones((1, 1), bool)
        return super().__getitem__(block)


def _piece(kernel: splash.SplashAttentionKernel, number: Any, count: int) -> splash.SplashAttentionKernel:
    """Returns splash attention for one of so many pieces of the queries."""

    def part(x: jax.Array) -> jax.Array:
        size = x.shape[1] // count
        return x if count == 1 else lax.dynamic_slice_in_dim(x, number * size, size, axis=1)

    def cut(info: Any) -> Any:
        size = info.q_sequence.shape[0] // count
        parts = {name: getattr(info, name) for name in ("data_next", "mask_next", "block_mask")}
        parts = {name: None if x is None else part(x) for name, x in parts.items()}
        return info._replace(q_sequence=number * size + jnp.arange(size), **parts)

    infos, how = kernel.tree_flatten()
    return splash.SplashAttentionKernel.tree_unflatten(how, [cut(x) for x in infos])


@functools.cache
def _mha() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # in favour of a package that needs a GPU to import
        from jax.experimental.pallas.ops.gpu.attention import mha  # noqa: PLC0415
    return mha


def windows_of(config: ModelConfig) -> Sequence[int | None]:
    """Returns the different windows of a model's layers, in the order of `PerLayer.window_kind`."""
    return list(dict.fromkeys(config.windows))
