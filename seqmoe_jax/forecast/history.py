"""Retention scores from the past alone: a discounted frequency of activations.

Policy `seqmoe` evicts by it where a model has no predictor: it stands in for the learned retention score.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

DECAY = 0.95  # weight of the past after one step: about 20 steps are remembered


def observe(retention: Float32[Array, " keys"], ids: Int[Array, "L B K"], experts: int) -> Float32[Array, " keys"]:
    """Retention after a decode step that routed to `ids` (-1: inactive)."""
    layer_start = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None, None] * experts
    # Inactive routes go past the end and are dropped.
    keys = jnp.where(ids >= 0, layer_start + ids, retention.shape[0])
    active = jnp.zeros_like(retention).at[keys.reshape(-1)].set(1.0, mode="drop")
    return DECAY * retention + (1 - DECAY) * active


def observe_prompt(retention: Float32[Array, " keys"], share: Float[Array, " keys"]) -> Float32[Array, " keys"]:
    """Retention after a prompt, of whose tokens a `share` in [0, 1] activated each expert."""
    return 0.5 * retention + 0.5 * share
