"""`decode_attention` in plain XLA: the oracle of the kernels; the model's own attention has `attend` from here."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.arithmetic import einsum, softmax
from pallas_kernels.decode_attention.config import Heads


def decode_attention(
    qkv: Float[Array, "B rows"],
    k: Float[Array, "B G C D"],
    v: Float[Array, "B G C D"],
    positions: Int32[Array, " B"],
    cos: Float32[Array, "B D"],
    sin: Float32[Array, "B D"],
    *,
    heads: Heads,
    q_norm: Float[Array, " n"] | None,
    k_norm: Float[Array, " m"] | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "B ND"], Float[Array, "B G C D"], Float[Array, "B G C D"]]:
    """See `decode_attention.api`."""
    batch, groups, capacity, dim = k.shape
    q, new_k, new_v = _queries_keys_values(qkv, heads, q_norm, k_norm)
    q, new_k = (_rotated(x, cos[:, None], sin[:, None], heads) for x in (q, new_k))
    rows, place = jnp.arange(batch), positions % capacity
    # Behind the barrier, or XLA writes once for the cache and once more inside what reads it, and copies it.
    k, v = lax.optimization_barrier((k.at[rows, :, place].set(new_k), v.at[rows, :, place].set(new_v)))
    visible = jnp.arange(capacity) <= positions[:, None]
    sinks = None if sinks is None else sinks.reshape(groups, -1)
    q = q.reshape(batch, 1, groups, -1, dim)
    out = attend(q, k, v, visible[:, None, None, None], scale=heads.scale, sinks=sinks)
    return out.reshape(batch, -1), k, v


def attend(
    q: Float[Array, "B T G R D"],
    k: Float[Array, "B G C D"],
    v: Float[Array, "B G C D"],
    visible: Bool[Array, "#B 1 1 #T C"],
    *,
    scale: float,
    sinks: Float[Array, "G R"] | None,
) -> Float[Array, "B T G R D"]:
    """Softmax attention of R queries for each key/value head to the positions that each may see. Scores are float32;
    their softmax is rounded to the dtype of `q`."""
    # Keys on the left: the other way XLA:CPU transposes the cache, and for that writes it twice.
    scores = einsum("bgcd,btgrd->bgcrt", k, q).transpose(0, 1, 3, 4, 2) * scale
    weights = softmax(jnp.where(visible, scores, -jnp.inf), sinks).astype(q.dtype)
    return einsum("bgrtc,bgcd->btgrd", weights, v).astype(q.dtype)


def _queries_keys_values(
    qkv: Float[Array, "B rows"], heads: Heads, q_norm: Any, k_norm: Any
) -> tuple[Float[Array, "B N D"], Float[Array, "B G D"], Float[Array, "B G D"]]:
    """Normed and clipped, without their positions."""
    sizes = [heads.num_heads, heads.num_heads + heads.num_kv_heads, heads.num_heads + 2 * heads.num_kv_heads]
    q, k, v, _ = jnp.split(qkv, [heads.head_dim * size for size in sizes], axis=-1)
    norm, full = heads.norm, heads.norm_over == "full"
    if norm is not None and full:
        q, k = norm(q, q_norm), norm(k, k_norm)
    if heads.clip is not None:
        q, k, v = (jnp.clip(part, -heads.clip, heads.clip) for part in (q, k, v))
    q, k, v = (part.reshape(len(qkv), -1, heads.head_dim) for part in (q, k, v))
    if norm is not None and not full:
        q, k = norm(q, q_norm), norm(k, k_norm)
    return q, k, v


def _rotated(
    x: Float[Array, "B N D"], cos: Float32[Array, "B 1 D"], sin: Float32[Array, "B 1 D"], heads: Heads
) -> Float[Array, "B N D"]:
    """Rotated by the position, in float32."""
    lanes = jnp.arange(heads.head_dim)
    within, half = lanes - heads.rotary_offset, heads.rotary_dim // 2
    if heads.rotary_layout == "half":
        partner = jnp.where(within < half, lanes + half, lanes - half)
    else:
        partner = jnp.where(within % 2 == 0, lanes + 1, lanes - 1)
    partner = jnp.where((within >= 0) & (within < heads.rotary_dim), partner, lanes)
    return (x * cos + x[..., partner] * sin).astype(x.dtype)
