"""Small things that every part of a layer uses."""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

Tree = TypeVar("Tree")  # a pytree of arrays


def write_barrier(state: Tree) -> Tree:
    """A cache or ring that was just written to, before anything reads it.

    Without the barrier XLA writes once for the state and once more inside what reads it, and copies the state for that.
    """
    written: Tree = lax.optimization_barrier(state)
    return written


def mask_inactive(ids: Int[Array, "T K"], active: Bool[Array, " T"]) -> Int[Array, "T K"]:
    """-1 for tokens that are padding or whose sequence has ended: they route nowhere and load nothing."""
    return jnp.where(active[:, None], ids, -1)
