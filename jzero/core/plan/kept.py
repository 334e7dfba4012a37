"""What a step keeps between its passes (`Keep`), for its plan."""

from __future__ import annotations

from typing import NamedTuple


class Kept(NamedTuple):
    """Values that stay on a device from the forward to the backward pass, though stage 3 could make them anew.

    Attributes:
      params: The paths of the parameters that stay whole, of those that are partitioned.
      of_params: How many are partitioned.
      param_bytes: Their bytes on one device.
      blocks: How many of the loss's repeated blocks, and of its loops over layers, keep what `Keep` says.
      of_blocks: How many there are.
      block_bytes: The bytes that these blocks save on one device for the backward pass.
      peak: The estimated peak of the step on one device, if the step chose by itself what it keeps.
      limit: What a step may use of a device, likewise.
    """

    params: frozenset[str]
    of_params: int
    param_bytes: int
    blocks: int
    of_blocks: int
    block_bytes: int
    peak: int | None = None
    limit: int | None = None
