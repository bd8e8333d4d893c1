"""Which implementation of a kernel runs. Chosen once, by name, and visible in `seqmoe doctor` and the log."""

from __future__ import annotations

from typing import Literal, get_args

import jax
from jaxtyping import Array, Shaped

from pallas_kernels.layout import ExpertLayout

Implementation = Literal["xla", "gpu", "tpu"]


def compute_capability() -> float:
    """Of this process's GPU, 9.0 for an H100; 0 where there is none, or none that says."""
    if jax.default_backend() != "gpu":
        return 0.0
    return float(getattr(jax.devices()[0], "compute_capability", None) or 0)


def default_implementation() -> Implementation:
    """`gpu` on NVIDIA GPUs of compute capability 8.0 or newer, else `xla`, the reference.

    TPU kernels are lowered and interpreted in the tests but were never timed on a TPU: they run only when named.
    """
    return "gpu" if compute_capability() >= 8.0 else "xla"


def _addressable(rows: int, row_elems: int, itemsize: int) -> bool:
    """Whether JAX's Triton lowering finds every element of such an array.

    It computes element offsets as signed 32-bit numbers for arrays of up to 2**32 bytes, which is too short for arrays
    of bytes between 2 and 4 GiB: their upper half would be read from below the array.
    """
    elements = rows * row_elems
    return elements <= 2**31 or elements * itemsize > 2**32


def check_addressable(**arrays: Shaped[Array, "_ _"]) -> None:
    """Raises `ValueError` for arrays that Triton kernels would address wrongly."""
    for name, array in arrays.items():
        rows, row_elems = array.shape
        if not _addressable(rows, row_elems, array.dtype.itemsize):
            raise ValueError(
                f"{name}: {array.dtype}{list(array.shape)} is between 2 and 4 GiB, which Triton kernels index wrongly "
                f"for one-byte elements: use at most {2**31 // row_elems} or at least {2**32 // row_elems + 1} rows, "
                "or implementation='xla'"
            )


def rows_to_allocate(slots: int, layout: ExpertLayout, implementation: Implementation) -> int:
    """Rows of the slot array, so that kernels can address all `slots` of them; usually just as many. An array that
    they could not gets rows that nobody uses, to be larger."""
    if implementation == "gpu" and not _addressable(slots, layout.block_elems, layout.storage.itemsize):
        return 2**32 // (layout.block_elems * layout.storage.itemsize) + 1
    return slots


def resolve(implementation: Implementation | None) -> Implementation:
    """The named implementation, or the default of this process's backend."""
    if implementation is None:
        return default_implementation()
    if implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}: expected one of {get_args(Implementation)}")
    return implementation
