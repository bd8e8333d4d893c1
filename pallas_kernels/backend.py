"""Which implementation of a kernel runs. Chosen once, by name, and visible in `seqmoe doctor` and the log."""

from __future__ import annotations

from typing import Literal, get_args

import jax

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


def resolve(implementation: Implementation | None) -> Implementation:
    """The named implementation, or the default of this process's backend."""
    if implementation is None:
        return default_implementation()
    if implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}: expected one of {get_args(Implementation)}")
    return implementation


def loops_are_cheap() -> bool:
    """Whether plain XLA had better go over what is in use of an array, tile by tile, than over all of it.

    On CPUs. On a GPU a loop of unknown length ends the graph that a step is launched as, and costs more than it saves.
    """
    return jax.default_backend() == "cpu"
