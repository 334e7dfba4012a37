"""Accelerator specifications, for estimates without hardware and without a compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

GIB = 2**30
MIB = 2**20
KIB = 2**10
PCIE_4, PCIE_5 = 32e9, 64e9
"""Bytes per second of 16 lanes of PCIe in one direction (PCI Express Base Specification: 16 and 32 GT/s per lane)."""


class _Sm(NamedTuple):
    """A multiprocessor: its threads, fp32 units and bytes of shared memory."""

    threads: int
    fp32_units: int
    shared_bytes: int


# CUDA C++ Programming Guide, appendix "Compute Capabilities": technical specifications and arithmetic throughput.
# By the same table, all have 65536 registers per multiprocessor and per block, 48 KiB of shared
# memory per block, or all but 1 KiB of it if the kernel asks.
_SMS: Mapping[tuple[int, int], _Sm] = {
    (8, 0): _Sm(2048, 64, 164 * KIB),
    (8, 9): _Sm(1536, 128, 100 * KIB),
    (9, 0): _Sm(2048, 128, 228 * KIB),
    (10, 0): _Sm(2048, 128, 228 * KIB),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The specifications of a GPU. Rates are the vendor's peaks, without sparsity.

    Attributes:
      name: Its name in CUDA.
      compute_capability: Major and minor.
      num_sms: Multiprocessors in use.
      clock_hz: The highest clock of the multiprocessors.
      hbm_bytes: Memory as CUDA reports it, which is less than the name suggests.
      hbm_bytes_per_s: Bandwidth of that memory.
      l2_bytes: The L2 cache.
      flops: Operations per second by HLO's name of the element type; jax multiplies fp32 as `tf32`.
      num_nvlinks: NVLink links; 0 if GPUs talk over PCIe.
      intra_link_bytes_per_s: Bandwidth to the GPUs of its host, in one direction, over all links.
      inter_link_bytes_per_s: Bandwidth to other hosts, in one direction: an assumption about the network.
      host_link_bytes_per_s: Bandwidth to its host's memory, in each direction at once: its PCIe lanes.
    """

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    clock_hz: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    l2_bytes: int
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    num_nvlinks: int
    intra_link_bytes_per_s: float
    inter_link_bytes_per_s: float
    host_link_bytes_per_s: float

    @property
    def sm(self) -> _Sm:
        """One of its multiprocessors."""
        return _SMS[self.compute_capability]


# Data sheet "NVIDIA H100", SXM column (half of the rates given "with sparsity"), to the digits of the white paper
# "NVIDIA H100 Tensor Core GPU Architecture". The H200's data sheet has the same rates.
_HOPPER = {"bf16": 989.4e12, "f16": 989.4e12, "tf32": 494.7e12, "f32": 66.9e12, "f8e4m3fn": 1978.9e12}
# White paper "NVIDIA A100 Tensor Core GPU Architecture", table "A100 Tensor Core GPU performance specs".
_AMPERE = {"bf16": 312e12, "f16": 312e12, "tf32": 156e12, "f32": 19.5e12}

# Multiprocessors, clock, L2 and memory are what the CUDA driver reports (XLA ships such reports of the A100, H100 and
# B200 as `target_config/specs`), memory rounded down, as drivers differ a little. Links: 25 GB/s per direction and
# NVLink link of the 3rd and 4th generation, 50 GB/s of the 5th. Network: one port of the vendor's 8-GPU system per GPU.
_H100 = GpuFacts(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_sms=132,
    clock_hz=1.98e9,
    hbm_bytes=int(79.1 * GIB),
    hbm_bytes_per_s=3.35e12,  # data sheet "NVIDIA H100", SXM column
    l2_bytes=50 * MIB,
    flops=_HOPPER,
    num_nvlinks=18,
    intra_link_bytes_per_s=450e9,
    inter_link_bytes_per_s=50e9,  # data sheets "DGX H100", "DGX H200": a ConnectX-7 port of 400 Gb/s per GPU
    host_link_bytes_per_s=PCIE_5,
)
_A100 = GpuFacts(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    num_sms=108,
    clock_hz=1.41e9,
    hbm_bytes=int(79.2 * GIB),
    hbm_bytes_per_s=2.039e12,  # data sheet "NVIDIA A100", 80GB SXM column
    l2_bytes=40 * MIB,
    flops=_AMPERE,
    num_nvlinks=12,
    intra_link_bytes_per_s=300e9,
    inter_link_bytes_per_s=25e9,  # data sheet "DGX A100": a ConnectX-6 port of 200 Gb/s per GPU
    host_link_bytes_per_s=PCIE_4,
)
GPUS: Mapping[str, GpuFacts] = {
    "h200": dataclasses.replace(
        _H100,
        name="NVIDIA H200",
        hbm_bytes=int(139.8 * GIB),  # sold as 141 GB
        hbm_bytes_per_s=4.8e12,  # data sheet "NVIDIA H200", SXM column
        l2_bytes=60 * MIB,
    ),
    "h100": _H100,
    "b200": GpuFacts(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        num_sms=148,
        clock_hz=1.965e9,
        hbm_bytes=int(178.3 * GIB),  # sold as 180 GB
        hbm_bytes_per_s=7.7e12,  # specifications of "HGX B200": 62 TB/s for 8 GPUs
        l2_bytes=int(126.5 * MIB),
        # Specifications of "HGX B200", an eighth of 36, 36, 18 and 72 Pflop/s, half of that as they count sparsity; and
        # of 600 Tflop/s of fp32.
        flops={"bf16": 2250e12, "f16": 2250e12, "tf32": 1125e12, "f32": 75e12, "f8e4m3fn": 4500e12},
        num_nvlinks=18,
        intra_link_bytes_per_s=900e9,
        inter_link_bytes_per_s=50e9,  # data sheet "DGX B200": a ConnectX-7 port of 400 Gb/s per GPU
        host_link_bytes_per_s=PCIE_5,
    ),
    "a100-80": _A100,
    "a100-40": dataclasses.replace(
        _A100,
        name="NVIDIA A100-SXM4-40GB",
        hbm_bytes=int(39.3 * GIB),
        hbm_bytes_per_s=1.555e12,  # white paper of the A100: 40 GB
    ),
    "a100-pcie": dataclasses.replace(
        _A100,
        name="NVIDIA A100 80GB PCIe",
        hbm_bytes_per_s=1.935e12,  # data sheet "NVIDIA A100", 80GB PCIe column
        num_nvlinks=0,  # bridges join pairs only
        intra_link_bytes_per_s=PCIE_4,
        inter_link_bytes_per_s=25e9,  # 200 Gb/s per GPU is usual
    ),
    "rtx4090": GpuFacts(
        name="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        num_sms=128,
        clock_hz=2.52e9,
        hbm_bytes=int(23.5 * GIB),  # sold as 24 GB
        hbm_bytes_per_s=1008e9,  # white paper "NVIDIA Ada GPU Architecture", and so the rates below
        l2_bytes=72 * MIB,
        # With fp32 accumulation: half the rate of fp16 accumulation.
        flops={"bf16": 165.2e12, "f16": 165.2e12, "tf32": 82.6e12, "f32": 82.6e12, "f8e4m3fn": 330.3e12},
        num_nvlinks=0,
        intra_link_bytes_per_s=PCIE_4,
        inter_link_bytes_per_s=3.125e9,  # 25 Gb/s: an assumption
        host_link_bytes_per_s=PCIE_4,
    ),
    "l40s": GpuFacts(
        name="NVIDIA L40S",
        compute_capability=(8, 9),
        num_sms=142,
        clock_hz=2.52e9,
        hbm_bytes=int(44.4 * GIB),  # sold as 48 GB
        hbm_bytes_per_s=864e9,  # data sheet "NVIDIA L40S", and so the rates below
        l2_bytes=96 * MIB,  # white paper "NVIDIA Ada GPU Architecture"
        flops={"bf16": 362.05e12, "f16": 362.05e12, "tf32": 183e12, "f32": 91.6e12, "f8e4m3fn": 733e12},
        num_nvlinks=0,
        intra_link_bytes_per_s=PCIE_4,
        inter_link_bytes_per_s=25e9,  # no system of the vendor's own: 200 Gb/s per GPU is usual
        host_link_bytes_per_s=PCIE_4,
    ),
}


@dataclasses.dataclass(frozen=True)
class TpuFacts:
    """The specifications of a TPU chip. Rates are the vendor's peaks.

    Attributes:
      accelerator: Its accelerator type on Google Cloud.
      cores_per_chip: The cores per chip; that type counts cores.
      hbm_bytes: The memory that the compiler lets a program use; it reserves the rest.
      hbm_bytes_per_s: Bandwidth of that memory.
      flops: Operations per second by HLO's name of the element type.
      num_links: Links to its neighbours: two for each dimension of the torus.
      link_bytes_per_s: Bandwidth of one link, in one direction.
      chip_config: libtpu's chip configuration, if not the default.
    """

    accelerator: str
    cores_per_chip: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    num_links: int
    link_bytes_per_s: float
    chip_config: str | None = None

    @property
    def num_dims(self) -> int:
        """Dimensions of its torus."""
        return self.num_links // 2


# Rates, bandwidths and the bandwidth of all links together: Google Cloud's documentation, pages "TPU v4", "TPU v5e",
# "TPU v5p" and "TPU v6e". Memory: what libtpu 0.0.42 and 0.0.50 name as available when a program does not fit. The v4
# has both cores as one device, as on real machines.
TPUS: Mapping[str, TpuFacts] = {
    "v4": TpuFacts("v4", 2, int(30.75 * GIB), 1.2e12, {"bf16": 275e12}, 6, 50e9, "megacore"),
    "v5e": TpuFacts("v5litepod", 1, int(15.75 * GIB), 819e9, {"bf16": 197e12, "s8": 393e12}, 4, 50e9),
    "v5p": TpuFacts("v5p", 2, int(95.73 * GIB), 2.765e12, {"bf16": 459e12, "s8": 918e12}, 6, 100e9),
    "v6e": TpuFacts("v6e", 1, int(31.24 * GIB), 1.638e12, {"bf16": 918e12, "s8": 1836e12}, 4, 100e9),
}
