"""The layout of single leaves, by path."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jzero.core.config.precision import DTYPE, STATE_DTYPE, DtypeName
from jzero.core.config.settings import FLAG, check_fields, integer, one_of, optional


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafRule:
    """Overrides the default layout of the leaves that match one path.

    Attributes:
      dim: Dimension (of the natural shape) that the ZeRO axis cuts; padded if the axis size does
        not divide it. `None` lets the layout choose.
      persistent: `True` keeps the parameter whole at stage 3, whatever its size (its gradient and
        optimizer state are still cut); `False` cuts it, however small and odd. `None` lets
        `persistence_threshold` and `padding_threshold` decide.
      replicated: `True` keeps parameter, gradient and optimizer state whole at every stage.
      scan_dim: The dimension that a `lax.scan` runs over, which is never cut; -1 says that there
        is none. `None` lets the layout infer it from the tree.
      compute_dtype: The leaf's dtype in the loss, e.g. "float32" for a normalization scale in a
        16-bit model. `None`: `Precision.compute_dtype`.
      state_dtype: The stored dtype of optimizer state of the leaf's shape: "bfloat16" (rounded
        stochastically) or "float32". `None`: `Precision.state_dtype`.
      offload: `True` puts what `Offload` offloads of the leaf on the host or the disk, `False` keeps it on the device.
        `None` lets `Offload` decide. Scalars, vectors among parameters, and parameters that stage 3 keeps whole always
        stay.
      quantize: `False` keeps the leaf as it is, whatever `Quantization` says.

    Raises:
      ValueError: A field is out of range, or two fields contradict each other.

    Example:
      >>> jzero.ZeroConfig(stage=3, rules={"embed/.*": jzero.LeafRule(dim=0)}).stage
      3
    """

    dim: int | None = None
    persistent: bool | None = None
    replicated: bool = False
    scan_dim: int | None = None
    compute_dtype: DtypeName | None = None
    state_dtype: Literal["bfloat16", "float32"] | None = None
    offload: bool | None = None
    quantize: Literal[False] | None = None

    def __post_init__(self) -> None:
        allowed = {
            "dim": optional(integer(0)),
            "persistent": one_of(None, True, False, says="None, True or False"),
            "replicated": FLAG,
            "scan_dim": optional(integer(-1)),
            "compute_dtype": DTYPE,
            "state_dtype": STATE_DTYPE,
            "offload": one_of(None, True, False, says="None, True or False"),
            "quantize": one_of(None, False, says="None or False"),
        }
        check_fields(self, allowed, prefix="LeafRule.")
        if self.replicated and (self.dim is not None or self.persistent is False):
            raise ValueError(
                "`LeafRule(replicated=True)` keeps the leaf whole, so `dim` and `persistent=False` contradict "
                f"it: got dim={self.dim!r}, persistent={self.persistent!r}. Drop one of them."
            )
        if self.dim is not None and self.dim == self.scan_dim:
            raise ValueError(
                f"`LeafRule.dim` and `LeafRule.scan_dim` are both {self.dim}: a scanned dimension cannot be cut, "
                "since the loop would gather the whole stack. Cut another dimension."
            )
