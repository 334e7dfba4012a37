"""The memory of a GPU as its driver sees it, which knows of other processes. The allocator of jax does not."""

from __future__ import annotations

import ctypes

import jax


def free_bytes(device: jax.Device) -> int | None:
    """Returns the bytes of a GPU that no process has taken; `None` if CUDA's driver does not say."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    gpu, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(gpu), device.local_hardware_id):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu):  # jax's own, which exists
        return None
    failed = cuda.cuCtxPushCurrent_v2(context)
    if not failed:
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    cuda.cuDevicePrimaryCtxRelease_v2(gpu)
    return None if failed else free.value
