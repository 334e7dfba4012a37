"""Names of machines as people write them: `2x8xH100`, `a100-80gb:8`, `p5.48xlarge`."""

from __future__ import annotations

import math
import re

from jzero.machines.accelerators import GPUS

# Of the vendors' lists of instances: EC2's "P family" and "G family", Compute Engine's "GPU machine types", Azure's "ND
# family", and NVIDIA's own systems.
INSTANCES = {
    "p4d.24xlarge": "a100-40:8",
    "p4de.24xlarge": "a100-80:8",
    "p5.48xlarge": "h100:8",
    "p5e.48xlarge": "h200:8",
    "p5en.48xlarge": "h200:8",
    "p6-b200.48xlarge": "b200:8",
    "g6e.48xlarge": "l40s:8",
    "a2-highgpu-8g": "a100-40:8",
    "a2-ultragpu-8g": "a100-80:8",
    "a3-highgpu-8g": "h100:8",
    "a3-megagpu-8g": "h100:8",
    "a3-ultragpu-8g": "h200:8",
    "a4-highgpu-8g": "b200:8",
    "standard_nd96asr_v4": "a100-40:8",
    "standard_nd96amsr_a100_v4": "a100-80:8",
    "standard_nd96isr_h100_v5": "h100:8",
    "standard_nd96isr_h200_v5": "h200:8",
    "dgx-h100": "h100:8",
    "dgx-h200": "h200:8",
    "dgx-b200": "b200:8",
}
"""Machines of vendors, with 8 GPUs each."""


def spelt(name: str) -> str:
    """Returns a name in the spelling of `jzero.machines.machine.machine`, or in lower case if it is none of a GPU.

    Example:
      >>> from jzero.machines.names import spelt
      >>> [spelt(x) for x in ("2x8xH100", "A100-80GB:8", "8 x H100 SXM", "2 x p5.48xlarge", "TPU v5p-32")]
      ['h100:16', 'a100-80:8', 'h100:8', 'h100:16', 'v5p-32']
    """
    text = re.sub(r"^(nvidia|tpu)[ -]+", "", name.lower())
    first = re.fullmatch(r"((?:\d{1,9} ?x? ?)*?)([a-z][^:]*?)(?:(?: ?[:*] ?|(?<=\d) ?x ?| x )(\d{1,9}))?", text)
    if first is None:
        return text
    counts = [int(x) for x in (*re.findall(r"\d+", first[1]), first[3]) if x]
    kind = INSTANCES.get(first[2].replace(" ", "-"), "")
    chip, _, count = kind.partition(":")
    number = math.prod(counts) * int(count or 1)
    return f"{chip or _gpu(first[2]) or first[2]}:{number}" if counts or count else text


def _gpu(text: str) -> str:
    """Returns the GPU that a name without a number of them means; an empty string if none."""
    known = {_letters(gpu): gpu for gpu in GPUS}
    return known.get(_letters(text)) or known.get(_letters(re.sub(r"[ -]?\d+ ?gb", "", text)), "")


def _letters(text: str) -> str:
    return re.sub(r"(?<=\d)gb\b|sxm\d?|geforce|[^a-z0-9]", "", text)
