"""The host's memory: how much there is, and JAX's pinned arrays as NumPy sees them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np
from jaxtyping import Array, Shaped

Progress = Callable[[int, int], None]  # is told, as work goes on: how much is done, how much there is in all (bytes)


def host_memory_bytes() -> int:
    """Bytes of physical memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_view(array: Shaped[Array, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """An array in host memory as a writable NumPy array of its shape and dtype over the same bytes, without a copy.

    The view keeps the array alive. JAX takes arrays to be constant: write before anything reads the array, or where
    its reader expects that.
    """
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    memory.owner = array  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8).view(array.dtype).reshape(array.shape)
