"""Arrays of more than 2**31 elements in Triton kernels.

JAX's Triton lowering computes the offset of an element in 64 bits only for arrays of more than 2**32 bytes. In those
between 2 and 4 GiB whose elements are bytes, it takes offsets from 2**31 on for negative numbers and reads from below
the array. Here the lowering counts such an array as one of wider elements, for which it uses 64 bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped


def check_addressable(**arrays: Shaped[Array, "_ _"]) -> None:
    """Sees to it that kernels find every element of these arrays. To be called before a kernel is made for them.

    Raises `ValueError` where this JAX cannot be taught to.
    """
    for name, array in arrays.items():
        if _misread(array.shape, array.dtype.itemsize) and not _teach_the_lowering():
            raise ValueError(
                f"{name}: {array.dtype}{list(array.shape)} is between 2 and 4 GiB, which the Triton lowering of JAX "
                f"{jax.__version__} indexes wrongly for one-byte elements: use implementation='xla'"
            )


def _misread(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether JAX's own lowering would not find every element."""
    elements = math.prod(shape)
    return elements > 2**31 and elements * itemsize <= 2**32


@functools.cache
def _teach_the_lowering() -> bool:
    """Once in a process, and only in those that need it; the offsets of all other arrays stay as they are."""
    try:
        from jax._src.pallas.triton import lowering

        offsets = lowering._compute_offsets_from_indices
    except (ImportError, AttributeError):
        return False

    def wide(block_info: Any, indexer: Any) -> Any:
        full = block_info.full_shape_dtype
        if _misread(full.shape, np.dtype(full.dtype).itemsize):
            full = jax.ShapeDtypeStruct(full.shape, np.uint64)  # of the dtype, only the size is looked at
            block_info = dataclasses.replace(block_info, full_shape_dtype=full)
        return offsets(block_info, indexer)

    lowering._compute_offsets_from_indices = wide  # type: ignore[assignment]
    return True
