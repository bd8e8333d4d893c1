"""Ring buffers over positions: the last W items of a sequence, the item at position p in slot p mod W.

A causal convolution, a sliding window and a compressor keep the past in this form. The slot of an item follows from its
absolute position, so a ring needs no counter of its own, and rows of a batch may stand at different positions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from seqmoe_jax.models.layers import write_barrier


def ordered(ring: Float[Array, "B W *item"], start: Int[Array, " B"]) -> Float[Array, "B W *item"]:
    """The items at positions start - W to start - 1, oldest first. What was never written is as it was made (zeros)."""
    width = ring.shape[1]
    return _take(ring, (start[:, None] + jnp.arange(width)) % width)


def positions(width: int, last: Int[Array, " B"]) -> Int[Array, "B W"]:
    """The position in each slot after position `last` was pushed; negative where there is nothing yet."""
    return last[:, None] - (last[:, None] - jnp.arange(width)) % width


def push(
    ring: Float[Array, "B W *item"],
    items: Float[Array, "B T *item"],
    at: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Float[Array, "B W *item"]:
    """The ring after `items`. Positions `at` of a row are consecutive; invalid items, at its end, leave no trace."""
    width, items = ring.shape[1], items.astype(ring.dtype)
    if items.shape[1] == 1:
        return write_barrier(_push_one(ring, items, at[:, 0], valid[:, 0]))
    start = at[:, 0]
    latest = positions(width, start + valid.sum(axis=1) - 1)
    return _take(jnp.concatenate([ordered(ring, start), items], axis=1), latest - start[:, None] + width)


def _push_one(
    ring: Float[Array, "B W *item"],
    item: Float[Array, "B 1 *item"],
    position: Int[Array, " B"],
    valid: Bool[Array, " B"],
) -> Float[Array, "B W *item"]:
    """The ring after one item, written in place under donation."""
    slot = position % ring.shape[1]
    if ring.shape[0] > 1:
        rows, outside = jnp.arange(ring.shape[0]), ring.shape[1]
        return ring.at[rows, jnp.where(valid, slot, outside)].set(item[:, 0], mode="drop")
    old = lax.dynamic_slice_in_dim(ring, slot[0], 1, axis=1)
    return lax.dynamic_update_slice_in_dim(ring, jnp.where(valid[0], item, old), slot[0], axis=1)


def _take(items: Float[Array, "B N *item"], index: Int[Array, "B W"]) -> Float[Array, "B W *item"]:
    return jnp.take_along_axis(items, index.reshape(*index.shape, *(1,) * (items.ndim - 2)), axis=1)
