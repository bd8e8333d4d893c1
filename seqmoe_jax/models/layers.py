"""The arithmetic of a decoder layer: linear maps, RMS norm, rotary positions, attention, router, dense MLP.

Pure functions of arrays. Shapes: B sequences, T positions of each, H hidden, N query heads, G key/value heads,
D head size, C positions of KV capacity, E experts, K active. Sums are float32; results have the activations' dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from seqmoe_jax.models.spec import AttentionSpec, MoESpec
from seqmoe_jax.models.weights import AttentionWeights, DenseWeights

QUERY_BLOCK = 256  # queries scored at once in prefill: bounds the score matrix to [B, N, 256, C]


class KV(NamedTuple):
    """Keys and values of one layer."""

    k: Float[Array, "B G C D"]
    v: Float[Array, "B G C D"]


def _precision(x: Array) -> lax.Precision:
    # Without this a GPU multiplies float32 in TF32, which has 10 bits of mantissa.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def einsum(formula: str, *operands: Array) -> Float32[Array, "..."]:
    """Products of activations' dtype, summed in float32."""
    return jnp.einsum(formula, *operands, precision=_precision(operands[0]), preferred_element_type=jnp.float32)


def linear(x: Float[Array, "*batch i"], w: Float[Array, "o i"]) -> Float[Array, "*batch o"]:
    """x W^T, the orientation of checkpoints."""
    return einsum("...i,oi->...o", x, w).astype(x.dtype)


def rms_norm(x: Float[Array, "*batch d"], w: Float[Array, " d"], eps: float) -> Float[Array, "*batch d"]:
    """RMS norm that rounds to the activations' dtype before multiplying by the weight, as Llama and Qwen do."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return w.astype(x.dtype) * normed.astype(x.dtype)


def rope(x: Float[Array, "B T N D"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T N D"]:
    """Rotary positions, half layout: pairs (i, i + D/2), angle position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attend(
    q: Float[Array, "B T G R D"], kv: KV, positions: Int[Array, "B T"], scale: float
) -> Float[Array, "B T G R D"]:
    """Causal softmax attention of T queries over the whole KV capacity; later positions are masked out."""
    # Keys on the left: the other way XLA:CPU transposes the cache, and for that writes it twice.
    scores = einsum("bgcd,btgrd->bgcrt", kv.k, q).transpose(0, 1, 3, 4, 2) * scale
    visible = jnp.arange(kv.k.shape[2]) <= positions[:, None, None, :, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return einsum("bgrtc,bgcd->btgrd", weights, kv.v).astype(q.dtype)


def attention(
    x: Float[Array, "B T H"],
    kv: KV,
    positions: Int[Array, "B T"],
    weights: AttentionWeights,
    spec: AttentionSpec,
    eps: float,
) -> tuple[Float[Array, "B T H"], KV]:
    """Grouped-query attention; writes the new keys and values at `positions`, which must lie inside the capacity.

    T is 1 in decoding. Rows may be padded at the end in prefill: what padding writes lies behind every valid
    position, so it is masked until a later token overwrites it.
    """
    batch, length, _ = x.shape
    n, g, d = spec.heads, spec.kv_heads, spec.head_dim
    q, k, v = jnp.split(linear(x, weights.qkv), [n * d, (n + g) * d], axis=-1)
    q, k, v = q.reshape(batch, length, n, d), k.reshape(batch, length, g, d), v.reshape(batch, length, g, d)
    if spec.qk_norm:
        q, k = rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps)
    q, k = rope(q, positions, spec.rope_theta), rope(k, positions, spec.rope_theta)
    # Behind the barrier, or XLA writes once for the cache and once more inside what reads it, and copies the cache.
    kv = lax.optimization_barrier(_write(kv, k, v, positions))
    q = q.reshape(batch, length, g, n // g, d)
    scale = d**-0.5
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        out = _attend(q, kv, positions, scale)
    else:
        blocks = length // QUERY_BLOCK
        split = q.reshape(batch, blocks, QUERY_BLOCK, g, n // g, d).swapaxes(0, 1)
        where = positions.reshape(batch, blocks, QUERY_BLOCK).swapaxes(0, 1)
        out = lax.map(lambda block: _attend(block[0], kv, block[1], scale), (split, where)).swapaxes(0, 1)
    return linear(out.reshape(batch, length, n * d), weights.o), kv


def _write(kv: KV, k: Float[Array, "B T G D"], v: Float[Array, "B T G D"], positions: Int[Array, "B T"]) -> KV:
    """New keys and values into the cache, in place under donation. Positions of a row are consecutive."""
    if k.shape[0] == 1:
        start = (0, 0, positions[0, 0], 0)
        return KV(
            lax.dynamic_update_slice(kv.k, k.swapaxes(1, 2).astype(kv.k.dtype), start),
            lax.dynamic_update_slice(kv.v, v.swapaxes(1, 2).astype(kv.v.dtype), start),
        )
    rows = jnp.arange(k.shape[0])[:, None]
    return KV(
        kv.k.at[rows, :, positions].set(k.astype(kv.k.dtype)), kv.v.at[rows, :, positions].set(v.astype(kv.v.dtype))
    )


def route(
    x: Float[Array, "T H"], router: Float[Array, "E H"], spec: MoESpec
) -> tuple[Int[Array, "T K"], Float32[Array, "T K"]]:
    """Softmax over all experts in float32, the best K (lowest index on a tie), optionally normalised to sum 1.

    Weights are rounded through the activations' dtype, as the reference implementation does.
    """
    probabilities = jax.nn.softmax(einsum("th,eh->te", x, router), axis=-1)
    weights, ids = lax.top_k(probabilities, spec.top_k)
    if spec.normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights.astype(x.dtype).astype(jnp.float32)


def dense_mlp(x: Float[Array, "*batch H"], weights: DenseWeights) -> Float[Array, "*batch H"]:
    """down(silu(gate x) * up x)."""
    gate, up = jnp.split(linear(x, weights.gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up, weights.down)


def mask_inactive(ids: Int[Array, "T K"], active: Bool[Array, " T"]) -> Int[Array, "T K"]:
    """-1 for tokens that are padding or whose sequence has ended: they route nowhere and load nothing."""
    return jnp.where(active[:, None], ids, -1)
