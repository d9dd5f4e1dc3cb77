"""The few calls of the CUDA driver that PyTorch has no name for."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from mps_trainer.errors import PlacementError

CUDA_SUCCESS = 0
CUDA_ERROR_OUT_OF_MEMORY = 2
_MEMHOSTREGISTER_PORTABLE = 1


@lru_cache(maxsize=1)
def _libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PlacementError(f"the CUDA driver is not here: {error}", "install it, or use device: cpu") from None


def has_started() -> bool:
    """Whether something in this process has initialised the driver; what it found in the environment stays then."""
    try:
        # Never loads the driver: without it in the process nobody has started it.
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == CUDA_SUCCESS)


def allocate_raw(num_bytes: int) -> int | None:
    """Device memory outside PyTorch's allocator, in the current context: its address, or None when refused."""
    address = ctypes.c_uint64()
    status = _libcuda().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
    if status == CUDA_ERROR_OUT_OF_MEMORY:
        return None
    if status != CUDA_SUCCESS:
        raise PlacementError(f"cuMemAlloc of {num_bytes} bytes failed with CUDA error {status}", "see sidecar.log")
    return address.value


def free_raw(address: int) -> None:
    """Give back what `allocate_raw` gave."""
    _libcuda().cuMemFree_v2(ctypes.c_uint64(address))


def register_host(address: int, num_bytes: int) -> int:
    """Page-lock host memory for copies by DMA, for every context of this process: the driver's status, 0 for success.

    The driver's call and not the runtime's `cudaHostRegister`, which PyTorch binds: a refusal of that one leaves an
    error behind that the next kernel launch reports as its own.
    """
    call = _libcuda().cuMemHostRegister_v2
    return int(call(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_MEMHOSTREGISTER_PORTABLE)))


def unregister_host(address: int) -> int:
    """Undo `register_host`; the driver's status."""
    return int(_libcuda().cuMemHostUnregister(ctypes.c_void_p(address)))


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current context's device.

    Under an MPS limit `free` is what is left of the limit, and `total` is still the whole GPU.
    """
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    status = _libcuda().cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    if status != CUDA_SUCCESS:
        raise PlacementError(f"cuMemGetInfo failed with CUDA error {status}", "see sidecar.log")
    return free.value, total.value
