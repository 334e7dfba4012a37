"""Devices of machines that you do not have, to compile programs for.

The compilers of both accelerators run without the hardware. The TPU compiler knows its chips by name; the GPU compiler
needs a description of its target, which `target_config` writes from the facts in `machines`.

[Note: What compile-only devices leave out]
Without a GPU the compiler measures nothing: it guesses the tiling of products, which can take more or less temporary
memory than a tuned one, and counts convolutions without cuDNN's workspace. GPU devices list no kinds of memory, so jax
drops those of a program, and buffers on the host count as device memory; TPU devices list them. The GPU compiler
compiles programs that do not fit; the TPU compiler refuses them. Nothing calls Python, so an operation of the same size
stands for the read of a parameter's row on disk.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Literal

import jax
from jax.experimental import topologies

from jzero.machines.accelerators import GPUS, KIB, TPUS, GpuFacts, TpuFacts
from jzero.machines.machine import GPUS_PER_HOST, chips_of_host, parse_machine

AcceleratorKind = Literal["gpu", "tpu"]


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a machine that you do not have, to lower and compile programs for.

    They hold no arrays: make a mesh of them and lower with `jax.ShapeDtypeStruct(..., sharding=...)`. This neither
    initializes nor changes jax's own devices, and works with `JAX_PLATFORMS=cpu`. [Note: What compile-only devices
    leave out] says what the compiler cannot know without the machine.

    Args:
      name: As for `machine`: `h200:8`, `v5e:4x4`.

    Returns:
      Its devices in order; the same objects each time.

    Raises:
      ValueError: There is no such device, or no machine with that many of them.
      ImportError: The compiler is not installed; the message says what to install.
      RuntimeError: jax refused its CUDA plugin earlier in this process.

    Example:
      >>> from jzero.machines.topologies import topology_devices
      >>> devices = topology_devices("h200:8")  # doctest: +SKIP
      >>> jzero.make_mesh(devices=devices).shape["data"]  # doctest: +SKIP
      8
    """
    parse_machine(name)  # before the cache, which needs a hash
    return list(_devices(name))


def topology_options(name: str) -> dict[str, str | bool]:
    """Returns the compiler options that programs for `topology_devices(name)` need.

    Args:
      name: As for `machine`.

    Returns:
      Options for `lowered.compile`. For several GPU hosts they disable XLA's own kernels for small all-reduces, which
      serve only GPUs of one host: the compiler of jax 0.12 does not see the hosts, and crashes from 64 GPUs on.
    """
    chip, shape, _ = parse_machine(name)
    if chip not in GPUS or shape[0] <= GPUS_PER_HOST or jax.__version_info__ < (0, 12):
        return {}
    return {"xla_gpu_experimental_use_collective_kernels": ""}


def missing_compiler(kind: AcceleratorKind) -> str | None:
    """Returns what is missing to compile for machines that you do not have; `None` if nothing is.

    Args:
      kind: `"gpu"` or `"tpu"`.

    Example:
      >>> from jzero.machines.topologies import missing_compiler
      >>> missing_compiler("tpu")  # doctest: +SKIP
      "libtpu, which is not installed: `pip install 'jzero[tpu]'`"
    """
    if kind == "tpu":
        if "TPU_LIBRARY_PATH" in os.environ or _is_installed("libtpu"):
            return None
        return "libtpu, which is not installed: `pip install 'jzero[tpu]'`"
    if not any(_is_installed(f"jax_plugins.xla_cuda{version}") for version in (13, 12)):
        return "jax's CUDA plugin, which is not installed: `pip install 'jzero[gpu]'` (it needs no GPU and no driver)"
    if not _has_ptxas():
        return (
            "NVIDIA's assembler, `ptxas`, which is not installed: `pip install nvidia-cuda-nvcc` (for CUDA 12 "
            "`nvidia-cuda-nvcc-cu12`), or the CUDA toolkit"
        )
    return None


def target_config(facts: GpuFacts) -> str:
    """Returns the text of the `stream_executor.GpuTargetConfigProto` that tells XLA about a GPU.

    Args:
      facts: One of `GPUS`, or your own facts.

    Returns:
      A protocol buffer in text form.

    Example:
      >>> from jzero.machines.accelerators import GPUS
      >>> from jzero.machines.topologies import target_config
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


@functools.cache
def _devices(name: str) -> tuple[jax.Device, ...]:
    chip, shape, num_slices = parse_machine(name)
    if chip in GPUS:
        return _gpu_devices(name, GPUS[chip], shape[0])
    return _tpu_devices(f"{chip}:{'x'.join(map(str, shape))}", TPUS[chip], shape, num_slices)


def _gpu_devices(name: str, facts: GpuFacts, count: int) -> tuple[jax.Device, ...]:
    _require_compiler(name, "gpu")
    num_hosts = max(1, count // GPUS_PER_HOST)
    # The plugin looks for the CUDA libraries of a real run, and refuses to work without them.
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


def _tpu_devices(name: str, facts: TpuFacts, shape: tuple[int, ...], num_slices: int) -> tuple[jax.Device, ...]:
    _require_compiler(name, "tpu")
    # Otherwise libtpu asks Google's metadata server for its machine, and complains at length if there is none.
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
            chips_per_host_bounds=chips_of_host(shape),
            num_slices=num_slices,
            **options,
        )
    return tuple(description.devices)


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, and removes them again."""
    added = {key: value for key, value in defaults.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _require_compiler(name: str, kind: AcceleratorKind) -> None:
    missing = missing_compiler(kind)
    if missing is not None:
        raise ImportError(f"Compiling for {name!r} needs {missing}.")


def _has_ptxas() -> bool:
    """Looks where XLA does: in the wheel's folder, which jax knows, on PATH, and in the usual place of the toolkit."""
    toolkits = [*_folders("nvidia.cu13"), *_folders("nvidia.cuda_nvcc"), "/usr/local/cuda", "/opt/cuda"]
    toolkits += filter(None, [os.environ.get("CUDA_ROOT")])
    return bool(shutil.which("ptxas")) or any(pathlib.Path(root, "bin", "ptxas").exists() for root in toolkits)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is not installed either
        return False


def _folders(package: str) -> list[str]:
    """Returns the folder of a namespace package, if it is installed."""
    if not _is_installed(package):
        return []
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return list(spec.submodule_search_locations or [])
