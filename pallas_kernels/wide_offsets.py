"""Offsets of 64 bits into slots and pools, whatever their size, in Triton kernels.

JAX's Triton lowering computes the offset of an element in 64 bits only for arrays of more than 2**32 bytes. Between 2
and 4 GiB, where elements are bytes, it takes offsets from 2**31 on for negative numbers and reads from below the array.
And Triton gives the threads other elements where offsets have other bits, so sums come in another order: the same
expert would give other bits at another residency. So slots and pools are marked, and the lowering counts a marked array
as one that is large.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

VAST = np.dtype(f"V{2**31 - 1}")  # elements of which a few are larger than 4 GiB
CONTIGUITY = "tt.contiguity"
_marked: set[tuple[tuple[int, ...], np.dtype]] = set()


def address_widely(**arrays: Shaped[Array, "..."]) -> None:
    """Marks arrays, all of their shape and dtype, as such that kernels address with 64 bits. To be called before a
    kernel is made for them.

    Raises `ValueError` for one that would be misread, where this JAX cannot be taught to.
    """
    taught = _teach_the_lowering()
    for name, array in arrays.items():
        _marked.add((array.shape, np.dtype(array.dtype)))
        if not taught and array.size > 2**31 and array.size * array.dtype.itemsize <= 2**32:
            raise ValueError(
                f"{name}: {array.dtype}{list(array.shape)} is between 2 and 4 GiB, which the Triton lowering of JAX "
                f"{jax.__version__} indexes wrongly for one-byte elements: use implementation='xla'"
            )


@functools.cache
def _teach_the_lowering() -> bool:
    """Once in a process. The offsets of arrays that are not marked stay as they are."""
    try:
        from jax._src.pallas.triton import lowering

        offsets = lowering._compute_offsets_from_indices
    except (ImportError, AttributeError):
        return False

    def wide(block_info: Any, indexer: Any) -> Any:
        full = block_info.full_shape_dtype
        if (tuple(full.shape), np.dtype(full.dtype)) not in _marked:
            return offsets(block_info, indexer)
        full = SimpleNamespace(shape=full.shape, dtype=VAST)  # of the dtype, the size alone is looked at
        found = offsets(dataclasses.replace(block_info, full_shape_dtype=full), indexer)
        value: Any = found[0] if isinstance(found, tuple) else found
        for index in indexer.indices:
            # Where Triton moves the conversion to 64 bits it drops what `max_contiguous` said of the index.
            attributes = getattr(getattr(index, "owner", None), "attributes", {})
            if CONTIGUITY in attributes:
                value.owner.attributes[CONTIGUITY] = attributes[CONTIGUITY]
        return found

    lowering._compute_offsets_from_indices = wide  # type: ignore[assignment]
    return True
