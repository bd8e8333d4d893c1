"""Host memory of our own that a device reads in place.

JAX's allocator of pinned memory doubles its regions: 147 GB in 43 arrays took more than 250 GB. So the pages come from
the system, exactly as many as are needed, are filled as any memory is, and are pinned and handed to JAX afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Shaped, UInt8

from seqmoe_jax.cuda import Driver
from seqmoe_jax.errors import ConfigError

DLPACK_CUDA_HOST = 3  # `kDLCUDAHost`
PORTABLE = 1  # `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every device


def fresh_pages(nbytes: int) -> UInt8[np.ndarray, " nbytes"]:
    """Zeros that take no memory before they are written, aligned to pages, large ones where the system has them."""
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Filling large pages is several times faster. A child process must not get a copy of what is pinned.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    return np.frombuffer(pages, np.uint8)


def pinned_array(memory: Shaped[np.ndarray, "*shape"], device: jax.Device) -> Shaped[Array, "*shape"]:
    """An array over `memory`, made of `fresh_pages` and in C order, in `pinned_host` memory of `device`.

    On a CPU and a CUDA device these are the same bytes, kept for as long as the array lives; elsewhere a copy.
    Raises `ConfigError` where the driver does not pin them.
    """
    if device.platform not in ("gpu", "cuda"):
        # A CPU adopts arrays that are aligned to 64 bytes as they are.
        array = jax.device_put(memory, SingleDeviceSharding(device, memory_kind="pinned_host"))
        return array.block_until_ready()
    _pages_of(memory).pin(device)
    return jax.dlpack.from_dlpack(_Pinned(memory, device), device=device, copy=False)


def bytes_of(array: Shaped[Array, "*shape"]) -> UInt8[np.ndarray, " nbytes"]:
    """The bytes of an array in pinned host memory, to be written while no program reads them. The caller holds the
    array meanwhile. Raises `ConfigError` where host memory of the device is none of this process's."""
    device = next(iter(array.devices()))
    if device.platform not in ("cpu", "gpu", "cuda"):
        raise ConfigError(f"new weights cannot be written into the host memory of a {device.platform}; load anew")
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory)


class _Pages(mmap.mmap):
    """A run of pages. Unpinned when nothing refers to them any more."""

    _driver: Driver | None = None
    _address = 0

    def pin(self, device: jax.Device) -> None:
        driver = Driver(
            device, purpose="the pool of experts in host memory", remedy="free memory, or use a smaller model"
        )
        driver.enter()
        address = np.frombuffer(self, np.uint8).ctypes.data
        driver.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(len(self)), PORTABLE)
        self._driver, self._address = driver, address

    def __del__(self) -> None:
        if self._driver is None:
            return
        try:
            self._driver.enter()
            self._driver.call("cuMemHostUnregister", ctypes.c_void_p(self._address))
            self._driver.close()
        except ConfigError:
            pass  # the process is ending, and its device with it


def _pages_of(memory: np.ndarray) -> _Pages:
    owner: Any = memory
    while not isinstance(owner, _Pages):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return owner


class _Pinned:
    """NumPy's array for JAX to take over, with the word that a device can read it. NumPy itself only knows of CPUs."""

    def __init__(self, memory: np.ndarray, device: jax.Device):
        self._memory, self._device = memory, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA_HOST, getattr(self._device, "local_hardware_id", None) or 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._memory.__dlpack__()
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        tensor = get_pointer(capsule, b"dltensor")  # begins with the data's address, then the device: kind and number
        kind_and_number = (ctypes.c_int32 * 2).from_address(tensor + ctypes.sizeof(ctypes.c_void_p))
        kind_and_number[:] = list(self.__dlpack_device__())
        return capsule
