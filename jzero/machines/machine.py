"""Named machines, `h200:8` or `v5e:2x4`: how many devices of which accelerator, and what joins them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from jzero.machines.accelerators import GPUS, TPUS
from jzero.machines.names import spelt

GPUS_PER_HOST = 8
MOST_DEVICES = 2**20
"""Of a machine, all hosts together."""
LARGEST = 33
"""Above the chips along each dimension of a slice that an error suggests."""
SHARED_LANES = (
    "The model gives each GPU all of its PCIe lanes. Where GPUs share lanes behind a switch, or traffic goes through "
    "the host's memory (GeForce has no peer-to-peer), a half or a quarter of that rate is left."
)
UNKNOWN_NETWORK = (
    "The network between TPU slices has no published rate, so the model uses that of the links within slices: divide "
    "`nic_bytes` by the rate of your network instead."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A named number of devices, with their specifications.

    Attributes:
      name: The name passed to `machine`.
      kind: `gpu` or `tpu`.
      num_devices: All devices of all hosts.
      devices_per_node: Devices that the fast links join: the GPUs of one host, or all chips of a TPU slice.
      devices_per_host: Devices that share a host's memory and disk: up to 8 GPUs, or up to 2x2 chips of a TPU slice.
      hbm_bytes: Memory of one device that programs can use. On GPUs jax takes 75 % of it unless told otherwise.
      hbm_bytes_per_s: Bandwidth of that memory.
      flops: Peak operations per second of one device by HLO's name of the element type, as far as published.
        By default jax multiplies fp32 matrices as `tf32` on GPUs and as `bf16` on TPUs.
      num_links: The separate links that share `intra_link_bytes_per_s`: 1 where any peer can have all of it.
      intra_link_bytes_per_s: Bandwidth of one device within its node, in one direction, over all links.
      inter_link_bytes_per_s: Bandwidth of one device to other nodes, in one direction; `None` on TPUs, whose nodes are
        slices: nothing is published about the network between them.
      host_link_bytes_per_s: Bandwidth of one device to its host's memory, in each direction at once; `None` on TPUs:
        nothing is published.
      remark: What its rates leave out; may be empty.
    """

    name: str
    kind: Literal["gpu", "tpu"]
    num_devices: int
    devices_per_node: int
    devices_per_host: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    num_links: int
    intra_link_bytes_per_s: float
    inter_link_bytes_per_s: float | None
    host_link_bytes_per_s: float | None = None
    remark: str = ""


def machine(name: str) -> Machine:
    """Returns the specifications of a machine. Needs neither the machine nor its compiler.

    Args:
      name: A GPU and how many of them, such as `h200:8`, `8xH200` or `p5e.48xlarge`, in hosts of 8 if there are more;
        or a TPU and the shape of the slice, such as `v5e:4x4` or `v5p:2x2x2`, and for several slices their number,
        `v5e:4x4*2`. `GPUS`, `TPUS` and `names.INSTANCES` have the names.

    Returns:
      A `Machine`.

    Raises:
      ValueError: There is no such device, or no machine with so many of it.

    Example:
      >>> from jzero.machines.machine import machine
      >>> machine("h200:16").devices_per_node, machine("v5e:4x4").num_devices, machine("8xH200").kind
      (8, 16, 'gpu')
      >>> machine("h200:16").num_links, machine("v5e:4x4").num_links
      (1, 4)
    """
    chip, shape, num_slices = parse_machine(name)
    num_devices = math.prod(shape) * num_slices
    if chip in GPUS:
        gpu = GPUS[chip]
        return Machine(
            name=name,
            kind="gpu",
            num_devices=num_devices,
            devices_per_node=min(num_devices, GPUS_PER_HOST),
            devices_per_host=min(num_devices, GPUS_PER_HOST),
            hbm_bytes=gpu.hbm_bytes,
            hbm_bytes_per_s=gpu.hbm_bytes_per_s,
            flops=gpu.flops,
            num_links=1,  # NVSwitch, or PCIe
            intra_link_bytes_per_s=gpu.intra_link_bytes_per_s,
            inter_link_bytes_per_s=gpu.inter_link_bytes_per_s,
            host_link_bytes_per_s=gpu.host_link_bytes_per_s,
            remark="" if gpu.num_nvlinks else SHARED_LANES,
        )
    tpu = TPUS[chip]
    return Machine(
        name=name,
        kind="tpu",
        num_devices=num_devices,
        devices_per_node=math.prod(shape),
        devices_per_host=math.prod(chips_of_host(shape)),
        hbm_bytes=tpu.hbm_bytes,
        hbm_bytes_per_s=tpu.hbm_bytes_per_s,
        flops=tpu.flops,
        num_links=tpu.num_links,
        intra_link_bytes_per_s=tpu.num_links * tpu.link_bytes_per_s,
        inter_link_bytes_per_s=None,
        remark=UNKNOWN_NETWORK if num_slices > 1 else "",
    )


def rate_of(machine: Machine, dtype: str, highest: bool) -> float:
    """Returns operations per second. By default jax multiplies fp32 as `tf32` on GPUs and as `bf16` on TPUs."""
    flops = machine.flops
    if dtype == "f32" and not highest:
        return flops.get("tf32", flops["bf16"])
    if dtype == "f32":  # six products of bf16 on TPUs
        return flops.get("f32", flops["bf16"] / 6)
    return flops.get(dtype, flops["bf16"])


def chips_of_host(shape: Sequence[int]) -> list[int]:
    """Returns how many chips of a TPU slice each host has, by dimension."""
    return [min(2, shape[0]), min(2, shape[1]), 1]


def parse_machine(name: str) -> tuple[str, tuple[int, ...], int]:
    """Returns the chip that `name` names, the shape of the machine, `(count,)` for GPUs, and the number of slices."""
    lowercase = spelt(name) if isinstance(name, str) else ""
    chip, _, text = lowercase.partition(":")
    match = re.fullmatch(r"([0-9]+(?:x[0-9]+)*)(?:\*([1-9][0-9]*))?", text)
    if match is None or chip not in (*GPUS, *TPUS):
        meant = " or ".join(map(repr, _meant(lowercase if match is None else f"{chip}:{text}")))
        raise ValueError(
            "`topology` must be a GPU and how many, such as 'h200:8', or a TPU and the shape of the slice, such as "
            f"'v5e:2x4': got {name!r}{f', which may mean {meant}' if meant else ''}. GPUs: {', '.join(GPUS)}. TPUs: "
            f"{', '.join(TPUS)}."
        )
    sizes = [*match.group(1).split("x"), match.group(2) or "1"]
    if max(map(len, sizes)) > 9 or math.prod(map(int, sizes)) > MOST_DEVICES:
        raise ValueError(f"`topology` must have at most {MOST_DEVICES:,} devices: got {name!r:.200}.")
    *dims, num_slices = map(int, sizes)
    shape = tuple(dims)
    if chip in GPUS:
        count = shape[0]
        is_host = 1 <= count <= GPUS_PER_HOST or (count > 0 and count % GPUS_PER_HOST == 0)
        if len(shape) > 1 or num_slices > 1 or not is_host:
            raise ValueError(
                f"No machine has {name!r}: ask for 1 to {GPUS_PER_HOST} GPUs, which are one host, or for a multiple of "
                f"{GPUS_PER_HOST}, such as '{chip}:{2 * GPUS_PER_HOST}', which are hosts of {GPUS_PER_HOST}."
            )
        return chip, shape, 1
    num_dims = TPUS[chip].num_dims
    # libtpu aborts the process at a size of 0, so sizes are checked here.
    if len(shape) != num_dims or min(shape) < 1 or any(size > 1 and size % 2 for size in shape[:2]):
        raise ValueError(
            f"No slice has the shape of {name!r}: a {chip} slice has {num_dims} dimensions, the first two of them 1 or "
            f"even, as hosts hold 2x2 chips. Ask for {_slice_of(chip, math.prod(shape))!r}, for example."
        )
    return chip, shape, num_slices


def _meant(name: str) -> list[str]:
    """Returns the machines that a name may mean: `v5e-8` and `v5litepod-8`, as Google Cloud writes it, or `a100:8`."""
    match = re.fullmatch(r"(\w+?)[:-]([1-9][0-9]{0,8})", name)
    if match is None:
        return [f"{name}:{GPUS_PER_HOST}"] if name in GPUS else []
    chip, count = match[1], int(match[2])
    slices = [
        _slice_of(tpu, max(1, count // facts.cores_per_chip))
        for tpu, facts in TPUS.items()
        if chip in (tpu, facts.accelerator)
    ]
    return slices + [f"{gpu}:{count}" for gpu in GPUS if chip in (gpu, gpu.partition("-")[0])]


def _slice_of(chip: str, count: int) -> str:
    """Returns the most compact slice of so many chips; a small one if there is none."""
    first, second, last = (1, *range(2, LARGEST, 2)), (1, *range(2, LARGEST, 2)), range(1, LARGEST)
    num_dims = TPUS[chip].num_dims
    shapes = [
        x for x in itertools.product(first, second, last[: 1 if num_dims == 2 else None]) if math.prod(x) == count
    ]
    shape = min(shapes, key=lambda x: (sum(x), x[0] > x[1], -x[0], x), default=(2, 2, 4))
    return f"{chip}:{'x'.join(map(str, shape[:num_dims]))}"
