"""Which implementation of a kernel runs. Chosen once, by name, and visible in `seqmoe doctor` and the log."""

from __future__ import annotations

from typing import Literal, get_args

import jax

from pallas_kernels.layout import ExpertLayout

Implementation = Literal["xla", "gpu", "tpu"]


def default_implementation() -> Implementation:
    """`gpu` on NVIDIA GPUs of compute capability 8.0 or newer, else `xla`, the reference.

    TPU kernels are lowered and interpreted in the tests but were never timed on a TPU: they run only when named.
    """
    if jax.default_backend() != "gpu":
        return "xla"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return "gpu" if capability is not None and float(capability) >= 8.0 else "xla"


def rows_to_allocate(slots: int, layout: ExpertLayout, implementation: Implementation) -> int:
    """Rows of the slot array, so that kernels can address all `slots` of them; usually just as many.

    JAX's Triton lowering computes element offsets as signed 32-bit numbers for arrays of up to 2**32 bytes, which is
    too short for arrays of bytes between 2 and 4 GiB. Such an array gets rows that nobody uses, to be larger.
    """
    elements = slots * layout.block_elems
    if implementation == "gpu" and elements > 2**31 and elements * layout.storage.itemsize <= 2**32:
        return 2**32 // (layout.block_elems * layout.storage.itemsize) + 1
    return slots


def resolve(implementation: Implementation | None) -> Implementation:
    """The named implementation, or the default of this process's backend."""
    if implementation is None:
        return default_implementation()
    if implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}: expected one of {get_args(Implementation)}")
    return implementation
