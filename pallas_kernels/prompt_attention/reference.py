"""`prompt_attention` in plain XLA: the oracle of the kernel, and what runs on CPUs, TPUs and GPUs before Ampere."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.arithmetic import einsum

QUERIES = 256  # scored at once
KEYS = 512


def prompt_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B G C D"],
    v: Float[Array, "B G C V"] | None,
    first_query: Int32[Array, " B"],
    first_key: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None,
    value_size: int | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B T N V"]:
    """See `prompt_attention.api`."""
    batch, length, heads, _ = q.shape
    groups, capacity = k.shape[1:3]
    tile = min(KEYS, capacity)
    if capacity % tile:  # a window's keys, which are few
        padding = [(0, 0), (0, 0), (0, -capacity % tile), (0, 0)]
        k, v = jnp.pad(k, padding), None if v is None else jnp.pad(v, padding)
    q = q.reshape(batch, length, groups, heads // groups, -1)
    sinks = None if sinks is None else sinks.reshape(groups, -1).astype(jnp.float32)[..., None]

    def block(q: Float[Array, "B t G R D"], start: Int32[Array, ""]) -> Float[Array, "B t G R V"]:
        at = first_query[:, None] + start + jnp.arange(q.shape[1])
        first, last = at[:, 0] - first_key, at[:, -1] - first_key  # as indices of keys
        begin = 0 if window is None else jnp.maximum(jnp.min(first) - (window - 1), 0) // tile
        end = jnp.minimum(jnp.max(last) // tile, (k.shape[2] - 1) // tile) + 1

        def read(index: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, out = carry
            keys = lax.dynamic_slice_in_dim(k, index * tile, tile, 2)
            values = keys[..., :value_size] if v is None else lax.dynamic_slice_in_dim(v, index * tile, tile, 2)
            where = first_key[:, None] + index * tile + jnp.arange(tile)
            visible = (where[:, None] <= at[..., None]) & (where[:, None] >= 0)
            if window is not None:
                visible &= where[:, None] > at[..., None] - window
            visible = visible[:, None, None]
            # Keys on the left: the other way XLA:CPU transposes the cache, and for that writes it twice.
            scores = einsum("bgcd,btgrd->bgcrt", keys, q).transpose(0, 1, 3, 4, 2) * scale
            higher = jnp.maximum(peak, jnp.where(visible, scores, -jnp.inf).max(-1))
            powers = jnp.where(visible, jnp.exp(scores - higher[..., None]), 0.0)
            shrink = jnp.exp(peak - higher)
            # What is not written yet must not be multiplied: it may be no number.
            written = (where >= 0) & (where <= at[:, -1:])
            values = jnp.where(written[:, None, :, None], values, 0)
            out = out * shrink[..., None] + einsum("bgrtc,bgcd->bgrtd", powers.astype(q.dtype), values)
            return higher, total * shrink + powers.sum(-1), out

        shape = batch, groups, heads // groups, q.shape[1]
        # A finite start: of a tile that nothing is visible in, powers are zeros and not exp(inf - inf).
        start_at = jnp.full(shape, LOW), jnp.zeros(shape), jnp.zeros((*shape, _size(v, value_size)))
        peak, total, out = lax.fori_loop(begin, end, read, start_at)
        if sinks is not None:
            higher = jnp.maximum(peak, sinks)
            shrink = jnp.exp(peak - higher)
            total, out = total * shrink + jnp.exp(sinks - higher), out * shrink[..., None]
        return (out / total[..., None]).transpose(0, 3, 1, 2, 4).astype(q.dtype)

    if length <= QUERIES or length % QUERIES:
        out = block(q, jnp.int32(0))
    else:
        blocks = q.reshape(batch, -1, QUERIES, *q.shape[2:]).swapaxes(0, 1)
        starts = jnp.arange(blocks.shape[0], dtype=jnp.int32) * QUERIES
        out = lax.map(lambda each: block(*each), (blocks, starts)).swapaxes(0, 1)
    return out.reshape(batch, length, heads, -1)


def attention_bytes(batch: int, length: int, heads: int) -> int:
    """Upper estimate of the temporaries: scores of a tile, their powers and what is made of them."""
    return 3 * 4 * batch * heads * min(length, QUERIES) * KEYS


LOW = -1e30


def _size(v: Float[Array, "B G C V"] | None, value_size: int | None) -> int:
    return v.shape[3] if v is not None else int(value_size or 0)
