"""The precision policy: dtypes to compute, reduce, accumulate and store in; loss scaling."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jzero.core.base.types import DType
from jzero.core.config.settings import Setting, check_fields, integer, number, optional

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
MAX_LOSS_SCALE = 2.0**100
"""The inverse of a larger scale would not be a normal fp32 number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """A loss scale that adapts to overflows, by DeepSpeed's rules.

    An overflow skips the step. The first `hysteresis - 1` overflows only use up hysteresis; later ones halve the scale,
    down to `minimum`, where one more raises an error. After `window + 1` steps in a row without overflow the scale
    doubles, and then after every `window` more; this also restores the hysteresis.

    Attributes:
      initial: The scale of the first step.
      window: Steps without overflow between two doublings; the first step of a row does not count.
      hysteresis: Number of overflows that halve the scale.
      minimum: The smallest scale.
      consecutive_hysteresis: Every good step restores the hysteresis, so that only overflows in a row count.

    Raises:
      ValueError: A field is out of range.

    Example:
      >>> jzero.Precision(compute_dtype="float16", loss_scale=jzero.DynamicLossScale(window=500)).loss_scale.initial
      65536.0
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        scale, count = number("a number > 0, up to 2^100", _is_scale), integer(1)
        allowed = {"initial": scale, "minimum": scale, "window": count, "hysteresis": count}
        check_fields(self, allowed, prefix="DynamicLossScale.")
        if self.minimum > self.initial:
            raise ValueError(
                f"`DynamicLossScale.minimum` ({self.minimum}) is above `initial` ({self.initial}): lower one of them."
            )


def _is_scale(value: float) -> bool:
    return 0 < value <= MAX_LOSS_SCALE


def _loss_scale(value: object) -> float | DynamicLossScale | None:
    if isinstance(value, str) and value == "dynamic":
        return DynamicLossScale()
    return value if value is None or isinstance(value, DynamicLossScale) else number("", _is_scale).of(value)


LOSS_SCALE = Setting('None, a number > 0 up to 2^100, "dynamic" or a `DynamicLossScale`', _loss_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a training run. By default every leaf keeps its own dtype.

    Only floating-point leaves are cast. `LeafRule(compute_dtype=...)` overrides `compute_dtype` by path.

    Attributes:
      compute_dtype: The dtype of parameters in the loss and in gathers. Stages 0-2 store the parameters in it; stage 3
        casts each shard before its gather. Parameters that are not trained keep their own dtype, at every stage.
        `None`: the dtype of each parameter. The batch is not cast.
      reduce_dtype: The dtype in which gradients are reduced over devices. `None`: that of the gradient
        (`compute_dtype`).
      accumulate_dtype: The dtype in which reduced gradients are kept and summed over micro-batches. `None`:
        `reduce_dtype`.
      master_dtype: The dtype of the copy that the optimizer updates, kept between steps. `None`: float32 if
        `compute_dtype` is set. "bfloat16" keeps no wider copy anywhere: updates are rounded stochastically.
      state_dtype: "bfloat16" stores optimizer state of a parameter's shape (moments) in 16 bits, rounded
        stochastically; the optimizer computes in its own dtype. "float32" widens narrower state. `None`: the
        optimizer's own dtype. `LeafRule(state_dtype=...)` decides by path.
      loss_scale: `None`, a number (static), "dynamic" or a `DynamicLossScale`. A step that overflows is skipped.
      skip_nonfinite: Whether to skip steps with a gradient that is not finite. With a loss scale they always are.

    Raises:
      ValueError: A field has an impossible value, or two contradict each other.

    Example:
      >>> jzero.Precision(compute_dtype="bfloat16", reduce_dtype="float32").master
      dtype('float32')

    References:
      Micikevicius et al., Mixed Precision Training, 2018. DeepSpeed's `bf16`, `fp16` and `data_types`.
    """

    compute_dtype: DtypeName | None = None
    reduce_dtype: DtypeName | None = None
    accumulate_dtype: DtypeName | None = None
    master_dtype: DtypeName | None = None
    state_dtype: Literal["bfloat16", "float32"] | None = None
    loss_scale: float | Literal["dynamic"] | DynamicLossScale | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        dtypes = dict.fromkeys(("compute_dtype", "reduce_dtype", "accumulate_dtype", "master_dtype"), DTYPE)
        check_fields(self, {**dtypes, "state_dtype": STATE_DTYPE, "loss_scale": LOSS_SCALE}, prefix="Precision.")
        if self.master_dtype is not None and self.compute_dtype is None:
            raise ValueError(
                f"`Precision.master_dtype` is {self.master_dtype!r} but `compute_dtype` is None, which leaves all "
                "parameters as they are: set `compute_dtype` too."
            )
        if self.master_dtype == "float16":
            raise ValueError("`Precision.master_dtype` must be 'float32' or 'bfloat16': float16 loses small updates.")
        if self.master_dtype == "bfloat16" and self.compute_dtype != "bfloat16":
            raise ValueError(
                "`Precision.master_dtype='bfloat16'` goes with `compute_dtype='bfloat16'` only: got "
                f"{self.compute_dtype!r}."
            )

    @property
    def compute(self) -> DType | None:
        """`compute_dtype` as a dtype."""
        return None if self.compute_dtype is None else jnp.dtype(self.compute_dtype)

    @property
    def master(self) -> DType | None:
        """The dtype of masters; `None` if parameters keep their own dtypes."""
        return None if self.compute_dtype is None else jnp.dtype(self.master_dtype or "float32")

    @property
    def reduce(self) -> DType | None:
        """`reduce_dtype` as a dtype."""
        return None if self.reduce_dtype is None else jnp.dtype(self.reduce_dtype)

    @property
    def accumulate(self) -> DType | None:
        """The dtype of reduced gradients; `None` if it is the parameter's compute dtype."""
        name = self.accumulate_dtype or self.reduce_dtype
        return None if name is None else jnp.dtype(name)

    @property
    def skips(self) -> bool:
        """Whether steps with a gradient that is not finite are skipped."""
        return self.skip_nonfinite or self.loss_scale is not None


def cast_dtype(dtype: DType, to: DType | None) -> DType:
    """Returns `to` for real floating-point dtypes; `dtype` for others, or if `to` is `None`."""
    return to if to is not None and jnp.issubdtype(dtype, jnp.floating) else dtype


def is_float8(dtype: DTypeLike) -> bool:
    """Whether a dtype is a float of at most 8 bits, which jax does not promote."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 2


def is_key(dtype: DTypeLike) -> bool:
    """Whether a dtype is one of random keys, which are neither trained nor cut."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def cast(x: jax.Array, dtype: DType) -> jax.Array:
    """Returns `x.astype(dtype)`; at once if it has the dtype, which jax takes a hundred calls to see."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def widen(x: jax.Array) -> jax.Array:
    """Returns `x` in fp32 or wider; integers do not change."""
    return cast(x, wide_dtype(x.dtype))


def wide_dtype(dtype: DType) -> DType:
    """Returns the dtype of widened gradients: fp32 or wider; integer dtypes do not change."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    # NumPy's promotion: jax's raises under `jax_numpy_dtype_promotion="strict"`.
    return jnp.dtype(jnp.float32) if is_float8(dtype) else np.promote_types(dtype, np.float32)


def scale_by(grad: jax.Array, *factors: jax.Array) -> jax.Array:
    """Returns a gradient in fp32 or wider, multiplied by one factor after another; integers do not change."""
    grad = widen(grad)
    for factor in factors if jnp.issubdtype(grad.dtype, jnp.inexact) else ():
        grad = lax.mul(grad, cast(factor, grad.dtype))  # traced faster than `*`
    return grad


def _dtype_name(*allowed: str) -> Setting[str | None]:
    def name(value: object) -> str:
        if not isinstance(value, str | np.dtype | type):  # an array would count as its own dtype
            raise TypeError
        dtype = str(jnp.dtype(value).name)
        if dtype not in allowed:
            raise ValueError
        return dtype

    return optional(Setting(f"one of {allowed}", name))


DTYPE = _dtype_name("float32", "bfloat16", "float16")
"""A dtype of a policy, kept as its name."""
STATE_DTYPE = _dtype_name("float32", "bfloat16")
"""A stored dtype of optimizer state."""


PRESETS = {
    "fp32": Precision(),
    "bf16": Precision(compute_dtype="bfloat16"),
    "fp16": Precision(compute_dtype="float16", loss_scale="dynamic"),
}


def resolve_precision(precision: object) -> Precision:
    """Returns the policy for a name, or the policy itself."""
    if isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str) or precision not in PRESETS:
        raise ValueError(f"`precision` must be one of {tuple(PRESETS)} or a `jzero.Precision`: got {precision!r}.")
    return PRESETS[precision]
