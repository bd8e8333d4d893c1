"""What becomes of the routes of tokens that are not there."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def mask_inactive(ids: Int[Array, "T K"], active: Bool[Array, " T"]) -> Int[Array, "T K"]:
    """-1 for tokens that are padding or whose sequence has ended: they route nowhere and load nothing."""
    return jnp.where(active[:, None], ids, -1)
