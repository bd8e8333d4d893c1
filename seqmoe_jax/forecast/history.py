"""Retention scores from the past alone: a discounted frequency of activations.

This is what policy `seqmoe` evicts by where a model has no predictor. It stands behind the same two functions as
the learned forecast: observe a step, give a score per key.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

DECAY = 0.95  # weight of the past after one step: about 20 steps are remembered
SCORE_UNIT = 2.0**24  # slot scores are int32; retention in [0, 1] keeps 24 bits


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


def scores(retention: Float32[Array, " keys"]) -> Int32[Array, " keys"]:
    """Retention as slot scores: the lowest is evicted first."""
    return (retention * SCORE_UNIT).astype(jnp.int32)
