"""Configuration of what travels, or is stored, as integers of 8 or 4 bits."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jzero.core.config.settings import check_fields, one_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """What travels, or is stored, in blocks of integers, each with a scale: for slow links between devices.

    A block is up to 256 elements at one index of the dimension that is cut, so rounded parameters are the same bits on
    any number of devices that cut this dimension. NaN and infinity fill their block, so a loss scale still finds them.
    Vectors and a few other leaves stay as they are; `plan.unquantized` names each with its reason, and
    `LeafRule(quantize=False)` adds some.

    Attributes:
      gather: "int8": stage 3 rounds each parameter once per step, on its shard, and gathers the integers (ZeRO++'s
        qwZ). Forward, backward and recomputation see the same rounded parameter; masters stay exact.
      reduce: "int8" or "int4": gradients are rounded before they cross nodes, and summed in fp32 (ZeRO++'s qgZ). Sums
        within a node are exact. Without `ZeroConfig.node_axis`, all devices exchange rounded gradients.
      frozen: "int8" or "nf4": stage 3 stores parameters that are not trained so. A step gathers the integers. Their
        dimension of blocks follows from the shape alone, so any number of devices has the same bits. nf4 has 16 levels,
        quantiles of a normal distribution, and blocks of 64 (QLoRA).

    Raises:
      ValueError: A field has an impossible value.

    Example:
      >>> jzero.ZeroConfig(stage=3, quantization=jzero.Quantization(gather="int8")).quantization.reduce
      'none'

    References:
      Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023.
      Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    gather: Literal["none", "int8"] = "none"
    reduce: Literal["none", "int8", "int4"] = "none"
    frozen: Literal["none", "int8", "nf4"] = "none"

    def __post_init__(self) -> None:
        allowed = {
            "gather": one_of("none", "int8"),
            "reduce": one_of("none", "int8", "int4"),
            "frozen": one_of("none", "int8", "nf4"),
        }
        check_fields(self, allowed, prefix="Quantization.")
