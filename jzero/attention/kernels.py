"""Attention as one kernel, which computes no masked block of scores, and keeps none in the devices' memory.

    choose(wanted, needs, *, platform, tokens, pieces, wide) -> Choice

`KERNELS` says what each kernel can do. With long contexts each device has two pieces of a row, see `plain`; splash
attention gets the part of its table of blocks that belongs to a piece.

Shapes: B rows, S tokens of this device, T places that are attended to, H heads, K heads of keys and values, C size of a
head.
"""

import functools
import warnings
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jzero.attention.exchange import NOWHERE
from jzero.attention.plain import Scores

LARGEST_BLOCK = 1024
SAVED = "attention"
"""The name of splash attention's result and statistics, one lane of them."""
OPERATIONS = ("pallas_call", "dot_product_attention_fwd_wrapper")


class Kernel(NamedTuple):
    """What a kernel can do.

    Attributes:
      platform: Where it runs.
      can: Features that it has, beside causal masks and shared keys.
      tokens: The number of tokens, of each piece of a row, must be a multiple.
      wide: Whether it takes fp32.
      absent: Whether jax traces it for devices that are not here.
    """

    platform: str
    can: frozenset[str]
    tokens: int
    wide: bool
    absent: bool = True


FEATURES = frozenset({"windows", "segments", "soft cap", "sinks", "parts of rows"})
KERNELS = {
    "splash": Kernel("tpu", FEATURES, 128, wide=True),
    "cudnn": Kernel("gpu", frozenset({"windows"}), 1, wide=False, absent=False),
    "pallas": Kernel("gpu", frozenset({"segments"}), 128, wide=True),
}


class Choice(NamedTuple):
    """The kernel to take, a key of `KERNELS` or "plain", and why."""

    kernel: str
    why: str

    def __str__(self) -> str:
        return f"attention: {self.kernel}, {self.why}"


def choose(  # noqa: C901  # one reason after the other
    wanted: str, needs: Collection[str], *, platform: str, tokens: int, pieces: int = 1, wide: bool = False
) -> Choice:
    """Returns which attention to take.

    Args:
      wanted: "auto", "plain", "fused" (any kernel, but not "plain"), or a key of `KERNELS`.
      needs: Features of `FEATURES` that it must have.
      platform: That of the devices: "cpu", "gpu" or "tpu".
      tokens: Of a row.
      pieces: Into which rows are divided.
      wide: Whether products are in fp32.

    Returns:
      The choice, which `print` shows with its reason.

    Raises:
      ValueError: No kernel suffices, and "auto" is not wanted; or a name is unknown.

    Example:
      >>> from jzero.attention import choose
      >>> print(choose("auto", {"windows"}, platform="tpu", tokens=4096))
      attention: splash, the kernel for tpu that has windows
      >>> print(choose("auto", {"sinks"}, platform="gpu", tokens=4096))
      attention: plain, cudnn has no sinks; pallas has no sinks
    """
    if wanted not in ("auto", "plain", "fused", *KERNELS):
        raise ValueError(f"`kernel` must be one of auto, plain, fused, {', '.join(KERNELS)}: got {wanted!r}.")
    if unknown := set(needs) - FEATURES:
        raise ValueError(f"`needs` must be of {sorted(FEATURES)}: got {sorted(unknown)}.")
    if wanted == "plain":
        return Choice("plain", "as asked for")
    reasons = []
    for name, kernel in KERNELS.items():
        if wanted in ("auto", "fused") and kernel.platform != platform:
            continue
        if missing := sorted(set(needs) - kernel.can):
            reasons.append(f"{name} has no {', no '.join(missing)}")
        elif tokens % (pieces * kernel.tokens):
            reasons.append(f"{name} takes multiples of {pieces * kernel.tokens} tokens, not {tokens}")
        elif wide and not kernel.wide:
            reasons.append(f"{name} takes no fp32")
        elif not kernel.absent and wanted != name and jax.default_backend() != traced_platform() == platform:
            reasons.append(f"jax traces {name} where its devices are")
        elif wanted in ("auto", "fused", name):
            return Choice(name, f"the kernel for {platform} that has {', '.join(sorted(needs)) or 'what it takes'}")
    why = "; ".join(reasons) or f"there is no kernel for {platform}"
    if wanted != "auto":
        raise ValueError(f"No kernel of attention is as asked for, {wanted!r}: {why}. Take 'plain', or 'auto'.")
    return Choice("plain", why)


def traced_platform() -> str:
    """Returns the platform for which jax traces, be it that of this machine or of a topology.

    Kernels that are taken for CPUs are interpreted.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def attend_by(  # noqa: PLR0913  # what attention has
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: tuple[jax.Array, jax.Array],
    how: Scores,
    context: str | None,
) -> jax.Array:
    """Returns what `attend_plainly` does, [B, S, H, C].

    Args:
      kernel: A key of `KERNELS`.
      q: Queries [B, S, H, C].
      k: Keys [B, T, K, C]. Without `context`, splash takes more keys than queries, whose last ones are the same tokens.
      v: Values [B, T, K, C].
      segments: Those of the queries [B, S], and of the keys [B, T]. Within one, positions follow each other.
      how: How scores are made; the window is part of the program.
      context: The mesh axis along which devices have two pieces each of rows.
    """
    if kernel == "cudnn":
        local = None if how.window is None else (how.window - 1, 0)
        mask: dict[str, Any] = {"is_causal": True, "local_window_size": local}
        return jax.nn.dot_product_attention(q, k, v, scale=how.scale, implementation="cudnn", **mask)
    if kernel == "pallas":
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        return _mha()(q, k, v, segments[0], sm_scale=how.scale, causal=True, interpret=traced_platform() == "cpu")
    count = 1 if context is None else 2 * lax.axis_size(context)
    index = 0 if context is None else lax.axis_index(context)
    tokens = q.shape[1] if context is None else k.shape[1]
    if missing := -k.shape[1] % _block_size(tokens // count):
        k, v = (jnp.pad(x, ((0, 0), (missing, 0), (0, 0), (0, 0))) for x in (k, v))
        segments = segments[0], jnp.pad(segments[1], ((0, 0), (missing, 0)), constant_values=NOWHERE)
    q = (q.astype(jnp.float32) * how.scale).astype(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [B, H, S, C]
    whole = splash_kernel(q.shape[1], tokens, count, how.window, how.softcap, before=k.shape[2] - tokens)
    pieces = [_piece(whole, number, count) for number in ([index] if count == 1 else [index, count - 1 - index])]

    def of_piece(piece: splash.SplashAttentionKernel, q: jax.Array, own: jax.Array) -> jax.Array:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
            attended: Any = piece(q, k, v, splash.SegmentIds(*ids), how.sinks)
            return attended

        return jax.vmap(run)(q, k, v, own, segments[1])

    parts = zip(pieces, jnp.split(q, len(pieces), axis=2), jnp.split(segments[0], len(pieces), axis=1), strict=True)
    return jnp.concatenate([of_piece(*part) for part in parts], axis=2).swapaxes(1, 2)


def save_attention(prim: Any, *_: Any, **params: Any) -> bool:
    """Saves what kernels of attention compute, and nothing else: a policy for `jax.checkpoint`.

    So a layer that is recomputed does not run its kernel twice. It takes the bytes of the kernel's result, and four for
    each query. Plain attention has nothing to save, since its backward pass reads the scores.

    Args:
      prim: The operation.
      **params: Its parameters.

    Returns:
      Whether to save its results.

    Example:
      >>> from jzero.attention import attend, save_attention
      >>> layer = jax.checkpoint(lambda x, w: attend(x @ w, x, x), policy=save_attention)
      >>> layer(jnp.ones((2, 128, 4, 64)), jnp.eye(64)).shape
      (2, 128, 4, 64)
    """
    if prim.name == "name":
        return bool(params["name"] == SAVED)
    if prim.name in OPERATIONS:
        return "splash" not in str(params.get("name"))  # whose statistics have all lanes there
    return prim.name == "custom_vjp_call" and _has_kernel(params["call_jaxpr"])  # the forward pass of "pallas"


def _has_kernel(jaxpr: Any) -> bool:
    parts = [x for eqn in jaxpr.eqns for x in eqn.params.values() if hasattr(x, "eqns")]
    return any(eqn.primitive.name in OPERATIONS for eqn in jaxpr.eqns) or any(map(_has_kernel, parts))


def splash_kernel(
    heads: int, tokens: int, shards: int, window: int | None, softcap: float | None, *, before: int = 0
) -> splash.SplashAttentionKernel:
    """Returns splash attention for whole rows; its tables can be divided into as many parts as there are shards.

    There may be keys before the first query, in full blocks.
    """
    size = _block_size(tokens // shards)
    inner = min(size, 512)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=inner,
        block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=inner, block_q_dq=size, block_kv_dq=size,
    )  # fmt: skip
    mask = masks.MultiHeadMask([Band((tokens, before + tokens), window)] * heads)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=shards,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=SAVED,
            interpret=traced_platform() == "cpu",
        )


def _block_size(tokens: int) -> int:
    return next(n for n in (LARGEST_BLOCK, 512, 256, 128) if tokens % n == 0)


class Band(masks.LocalMask):
    """A causal mask, perhaps with a window. Of most blocks their place says all, which is quick for long rows.

    The last query is the last key.
    """

    def __init__(self, shape: tuple[int, int], window: int | None) -> None:
        self.window = shape[1] if window is None else window
        super().__init__(shape, (self.window - 1, 0), shape[1] - shape[0])

    def __getitem__(self, block: Any) -> Any:
        rows, columns = block
        first, last = rows.start + self.offset, rows.stop + self.offset - 1
        nearest, farthest = first - columns.stop + 1, last - columns.start
        if farthest < 0 or nearest >= self.window:
            return np.zeros((1, 1), bool)
        if nearest >= 0 and farthest < self.window:
            return np.ones((1, 1), bool)
        return super().__getitem__(block)


def _piece(kernel: splash.SplashAttentionKernel, number: Any, count: int) -> splash.SplashAttentionKernel:
    """Returns splash attention for one of so many pieces of the queries."""

    def part(x: jax.Array) -> jax.Array:
        size = x.shape[1] // count
        return lax.dynamic_slice_in_dim(x, number * size, size, axis=1)

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
