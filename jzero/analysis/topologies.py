"""Machines you don't have: their devices, to compile for, and their speeds and sizes, to reckon with.

The compilers of both accelerators run without one. The TPU compiler knows its chips by name; the GPU compiler has to be
told what it compiles for, in a text that `target_config` writes from the table of facts below.

[Note: What compile-only devices leave out]
Without a GPU nothing is measured: products get the tiling that the compiler guesses, which can take more or less
temporary memory than a tuned one, and convolutions count without the workspace that cuDNN will ask for. GPU devices
list no kinds of memory, so jax drops those of a program, and buffers on the host count as device memory; TPU devices
have them. The GPU compiler compiles programs that do not fit, the TPU compiler refuses them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib.util
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import jax
from jax.experimental import topologies

__all__ = ["GPUS", "TPUS", "GpuFacts", "Machine", "TpuFacts", "machine", "target_config", "topology_devices"]

GIB = 2**30
MIB = 2**20
KIB = 2**10
GPUS_PER_HOST = 8


class _Sm(NamedTuple):
    """One multiprocessor: threads that it holds, fp32 units, bytes of shared memory."""

    threads: int
    fp32_units: int
    shared_bytes: int


# CUDA C++ Programming Guide, appendix "Compute Capabilities": technical specifications and arithmetic throughput.
# The same table has what these have in common: 65536 registers per multiprocessor and per block, 48 KiB of shared
# memory per block, or all but 1 KiB of it if the kernel asks.
_SMS: Mapping[tuple[int, int], _Sm] = {
    (8, 0): _Sm(2048, 64, 164 * KIB),
    (8, 9): _Sm(1536, 128, 100 * KIB),
    (9, 0): _Sm(2048, 128, 228 * KIB),
    (10, 0): _Sm(2048, 128, 228 * KIB),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What one kind of GPU is and does. Rates are the vendor's peaks, without sparsity.

    Attributes:
      name: Its name in CUDA.
      compute_capability: Major and minor.
      num_sms: Multiprocessors in use.
      clock_hz: The highest clock of the multiprocessors.
      hbm_bytes: Memory as CUDA reports it, which is less than the name says.
      hbm_bytes_per_s: Bandwidth of that memory.
      l2_bytes: The L2 cache.
      flops: Operations per second by HLO's name of the element type; `tf32` is what jax multiplies fp32 with.
      num_nvlinks: NVLink links; 0 if GPUs talk over PCIe.
      intra_link_bytes_per_s: What it can send to GPUs of its host, in one direction, over all links together.
      inter_link_bytes_per_s: What it can send to other hosts, in one direction: an assumption about the network.
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
GPUS: Mapping[str, GpuFacts] = {
    "h200": GpuFacts(
        name="NVIDIA H200",
        compute_capability=(9, 0),
        num_sms=132,
        clock_hz=1.98e9,
        hbm_bytes=int(139.8 * GIB),  # sold as 141 GB
        hbm_bytes_per_s=4.8e12,  # data sheet "NVIDIA H200", SXM column
        l2_bytes=60 * MIB,
        flops=_HOPPER,
        num_nvlinks=18,
        intra_link_bytes_per_s=450e9,
        inter_link_bytes_per_s=50e9,  # data sheet "DGX H200": a ConnectX-7 port of 400 Gb/s per GPU
    ),
    "h100": GpuFacts(
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
        inter_link_bytes_per_s=50e9,  # data sheet "DGX H100": a ConnectX-7 port of 400 Gb/s per GPU
    ),
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
    ),
    "a100-80": GpuFacts(
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
    ),
    "a100-40": GpuFacts(
        name="NVIDIA A100-SXM4-40GB",
        compute_capability=(8, 0),
        num_sms=108,
        clock_hz=1.41e9,
        hbm_bytes=int(39.3 * GIB),
        hbm_bytes_per_s=1.555e12,  # white paper of the A100: 40 GB
        l2_bytes=40 * MIB,
        flops=_AMPERE,
        num_nvlinks=12,
        intra_link_bytes_per_s=300e9,
        inter_link_bytes_per_s=25e9,
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
        intra_link_bytes_per_s=32e9,  # PCIe Gen4 x16
        inter_link_bytes_per_s=25e9,  # no system of the vendor's own: 200 Gb/s per GPU is usual
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuFacts:
    """What one kind of TPU chip is and does. Rates are the vendor's peaks.

    Attributes:
      accelerator: The accelerator type that Google Cloud calls it by.
      cores_per_chip: The cores per chip by which that type is counted.
      hbm_bytes: What the compiler lets one program use; it keeps a part of the chip's memory for itself.
      hbm_bytes_per_s: Bandwidth of that memory.
      flops: Operations per second by HLO's name of the element type.
      num_links: Links to its neighbours: two for each dimension of the torus.
      link_bytes_per_s: What it can send over one of them.
      chip_config: How libtpu is to see its cores, where that is not its default.
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
# "TPU v5p" and "TPU v6e". Memory: what libtpu 0.0.42 and 0.0.50 name as available when a program does not fit.
TPUS: Mapping[str, TpuFacts] = {
    "v4": TpuFacts(
        accelerator="v4",
        cores_per_chip=2,
        hbm_bytes=int(30.75 * GIB),
        hbm_bytes_per_s=1.2e12,
        flops={"bf16": 275e12},
        num_links=6,
        link_bytes_per_s=50e9,
        chip_config="megacore",  # both cores as one device, as on real machines
    ),
    "v5e": TpuFacts(
        accelerator="v5litepod",
        cores_per_chip=1,
        hbm_bytes=int(15.75 * GIB),
        hbm_bytes_per_s=819e9,
        flops={"bf16": 197e12, "s8": 393e12},
        num_links=4,
        link_bytes_per_s=50e9,
    ),
    "v5p": TpuFacts(
        accelerator="v5p",
        cores_per_chip=2,
        hbm_bytes=int(95.73 * GIB),
        hbm_bytes_per_s=2.765e12,
        flops={"bf16": 459e12, "s8": 918e12},
        num_links=6,
        link_bytes_per_s=100e9,
    ),
    "v6e": TpuFacts(
        accelerator="v6e",
        cores_per_chip=1,
        hbm_bytes=int(31.24 * GIB),
        hbm_bytes_per_s=1.638e12,
        flops={"bf16": 918e12, "s8": 1836e12},
        num_links=4,
        link_bytes_per_s=100e9,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A named number of devices, with what analysis needs to know about them.

    Attributes:
      name: The name that it was asked for by.
      kind: `gpu` or `tpu`.
      num_devices: All devices of all hosts.
      devices_per_node: Devices that the fast links join: the GPUs of one host, or all chips of a TPU slice.
      hbm_bytes: Memory of one device that programs can use. On GPUs jax takes 75 % of it unless told otherwise.
      hbm_bytes_per_s: Bandwidth of that memory.
      flops: Peak operations per second of one device by HLO's name of the element type, as far as published.
        By default jax multiplies fp32 matrices as `tf32` on GPUs and as `bf16` on TPUs.
      num_links: The separate links that share `intra_link_bytes_per_s`: 1 where any peer can have all of it.
      intra_link_bytes_per_s: What one device can send within its node, in one direction, over all links together.
      inter_link_bytes_per_s: What one device can send to another node, in one direction; `None` on a TPU slice, which
        is one node.
    """

    name: str
    kind: Literal["gpu", "tpu"]
    num_devices: int
    devices_per_node: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    num_links: int
    intra_link_bytes_per_s: float
    inter_link_bytes_per_s: float | None


def machine(name: str) -> Machine:
    """Returns what is known about a machine. Needs neither the machine nor its compiler.

    Args:
      name: A GPU and how many of them, such as `h200:8`, in hosts of 8 if there are more; or a TPU and the shape of the
        slice, such as `v5e:4x4` or `v5p:2x2x2`. `GPUS` and `TPUS` have the names.

    Returns:
      A `Machine`.

    Raises:
      ValueError: There is no such device, or no machine with so many of it.

    Example:
      >>> from jzero.analysis.topologies import machine
      >>> machine("h200:16").devices_per_node, machine("v5e:4x4").num_devices
      (8, 16)
    """
    chip, shape = _parse(name)
    num_devices = math.prod(shape)
    if chip in GPUS:
        gpu = GPUS[chip]
        return Machine(
            name=name,
            kind="gpu",
            num_devices=num_devices,
            devices_per_node=min(num_devices, GPUS_PER_HOST),
            hbm_bytes=gpu.hbm_bytes,
            hbm_bytes_per_s=gpu.hbm_bytes_per_s,
            flops=gpu.flops,
            num_links=1,  # NVSwitch, or PCIe
            intra_link_bytes_per_s=gpu.intra_link_bytes_per_s,
            inter_link_bytes_per_s=gpu.inter_link_bytes_per_s,
        )
    tpu = TPUS[chip]
    return Machine(
        name=name,
        kind="tpu",
        num_devices=num_devices,
        devices_per_node=num_devices,
        hbm_bytes=tpu.hbm_bytes,
        hbm_bytes_per_s=tpu.hbm_bytes_per_s,
        flops=tpu.flops,
        num_links=tpu.num_links,
        intra_link_bytes_per_s=tpu.num_links * tpu.link_bytes_per_s,
        inter_link_bytes_per_s=None,
    )


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a machine that is not there, to lower and compile programs for.

    They hold no arrays: make a mesh of them and lower with `jax.ShapeDtypeStruct(..., sharding=...)`. jax's own
    devices are neither initialised nor changed; `JAX_PLATFORMS=cpu` goes well with it. What the compiler cannot know
    without the machine is in [Note: What compile-only devices leave out].

    Args:
      name: As for `machine`: `h200:8`, `v5e:4x4`.

    Returns:
      Its devices in order; the same ones each time.

    Raises:
      ValueError: There is no such device, or no machine with so many of it.
      ImportError: The compiler is not installed; the message says what to install.
      RuntimeError: jax has refused its CUDA plugin earlier in this process.

    Example:
      >>> from jzero.analysis.topologies import topology_devices
      >>> devices = topology_devices("h200:8")  # doctest: +SKIP
      >>> jzero.make_mesh(devices=devices).shape["data"]  # doctest: +SKIP
      8
    """
    return list(_devices(name))


def target_config(facts: GpuFacts) -> str:
    """Returns the text of the `stream_executor.GpuTargetConfigProto` that tells XLA about a GPU.

    Args:
      facts: One of `GPUS`, or facts of your own.

    Returns:
      A protocol buffer in text form.

    Example:
      >>> from jzero.analysis.topologies import GPUS, target_config
      >>> "core_count: 132" in target_config(GPUS["h200"])
      True
    """
    sm = facts.sm
    major, minor = facts.compute_capability
    # Instructions that only this generation has (`sm_90a`, `sm_100a`), as XLA uses them on the real GPU.
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {facts.num_sms}
  clock_rate_ghz: {facts.clock_hz / 1e9}
  fpus_per_core: {sm.fp32_units}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {sm.threads}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  shared_memory_per_core: {sm.shared_bytes}
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_block_optin: {sm.shared_bytes - KIB}
  l2_cache_size: {facts.l2_bytes}
  device_memory_size: {facts.hbm_bytes}
  memory_bandwidth: {int(facts.hbm_bytes_per_s)}
  device_interconnect_info {{ active_links: {facts.num_nvlinks} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{facts.name}"
"""


def _parse(name: str) -> tuple[str, tuple[int, ...]]:
    """Returns the chip that `name` names, and the shape of the machine: `(count,)` for GPUs."""
    chip, _, text = name.partition(":")
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text) or chip not in (*GPUS, *TPUS):
        raise ValueError(
            "`name` must be a GPU and how many, such as 'h200:8', or a TPU and the shape of the slice, such as "
            f"'v5e:2x4': got {name!r}. GPUs: {', '.join(GPUS)}. TPUs: {', '.join(TPUS)}."
        )
    shape = tuple(int(size) for size in text.split("x"))
    if chip in GPUS:
        count = shape[0]
        if len(shape) > 1 or count < 1 or (count > GPUS_PER_HOST and count % GPUS_PER_HOST):
            raise ValueError(
                f"No machine has {name!r}: ask for 1 to {GPUS_PER_HOST} GPUs, which are one host, or for a multiple of "
                f"{GPUS_PER_HOST}, such as '{chip}:{2 * GPUS_PER_HOST}', which are hosts of {GPUS_PER_HOST}."
            )
        return chip, shape
    num_dims = TPUS[chip].num_dims
    # libtpu ends the process at a size of 0, so nothing that it might not know how to refuse goes there.
    if len(shape) != num_dims or min(shape) < 1 or any(size > 1 and size % 2 for size in shape[:2]):
        raise ValueError(
            f"No slice has the shape of {name!r}: a {chip} slice has {num_dims} dimensions, the first two of them 1 or "
            f"even, as hosts hold 2x2 chips. Ask for '{chip}:{'x'.join('224'[:num_dims])}', for example."
        )
    return chip, shape


@functools.cache
def _devices(name: str) -> tuple[jax.Device, ...]:
    chip, shape = _parse(name)
    return _gpu_devices(name, GPUS[chip], shape[0]) if chip in GPUS else _tpu_devices(name, TPUS[chip], shape)


def _gpu_devices(name: str, facts: GpuFacts, count: int) -> tuple[jax.Device, ...]:
    _require_gpu_compiler(name)
    num_hosts = max(1, count // GPUS_PER_HOST)
    # The plugin looks for the CUDA libraries that a program would run with, and refuses to serve without them.
    defaults = {} if glob.glob("/dev/nvidia[0-9]*") else {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    try:
        with _environment(defaults):
            description = topologies.get_topology_desc(
                facts.name,
                platform="cuda",
                topology=f"1x{num_hosts}x{count // num_hosts}",
                target_config=target_config(facts),
            )
    except NotImplementedError as error:
        raise RuntimeError(
            f"jax refused its CUDA plugin when it first looked for devices in this process (its log says why), so "
            f"nothing can be compiled for {name!r}. Start Python with `JAX_PLATFORMS=cpu` in the environment, or call "
            "`topology_devices` before anything asks jax for devices."
        ) from error
    return tuple(description.devices)


def _tpu_devices(name: str, facts: TpuFacts, shape: tuple[int, ...]) -> tuple[jax.Device, ...]:
    _require_tpu_compiler(name)
    # Else libtpu asks Google's metadata server which machine it is on, and complains at length that there is none.
    defaults = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{facts.accelerator}-{math.prod(shape) * facts.cores_per_chip}",
    }
    options = {} if facts.chip_config is None else {"chip_config_name": facts.chip_config}
    with _environment({} if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") else defaults):
        description = topologies.get_topology_desc(
            name,
            platform="tpu",
            chips_per_host_bounds=[min(2, shape[0]), min(2, shape[1]), 1],
            **options,
        )
    return tuple(description.devices)


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, and takes them away again."""
    added = {key: value for key, value in defaults.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _require_tpu_compiler(name: str) -> None:
    if "TPU_LIBRARY_PATH" not in os.environ and not _is_installed("libtpu"):
        raise ImportError(f"Compiling for {name!r} needs libtpu, which is not installed: `pip install 'jzero[tpu]'`.")


def _require_gpu_compiler(name: str) -> None:
    if not any(_is_installed(f"jax_plugins.xla_cuda{version}") for version in (13, 12)):
        raise ImportError(
            f"Compiling for {name!r} needs jax's CUDA plugin, which is not installed: `pip install 'jzero[gpu]'`. It "
            "needs no GPU and no driver."
        )
    if not _has_ptxas():
        raise ImportError(
            f"Compiling for {name!r} needs NVIDIA's assembler, `ptxas`, which is not installed: "
            "`pip install nvidia-cuda-nvcc` (for CUDA 12 `nvidia-cuda-nvcc-cu12`), or the CUDA toolkit."
        )


def _has_ptxas() -> bool:
    """Looks where XLA does: in the wheel, whose folder jax tells it, on PATH, and where the toolkit usually is."""
    toolkits = [*_folders("nvidia.cu13"), *_folders("nvidia.cuda_nvcc"), "/usr/local/cuda", "/opt/cuda"]
    toolkits += filter(None, [os.environ.get("CUDA_ROOT")])
    return bool(shutil.which("ptxas")) or any(pathlib.Path(root, "bin", "ptxas").exists() for root in toolkits)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # nor is the package that it is part of
        return False


def _folders(package: str) -> list[str]:
    """Returns where a namespace package is, if it is installed."""
    if not _is_installed(package):
        return []
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return list(spec.submodule_search_locations or [])
