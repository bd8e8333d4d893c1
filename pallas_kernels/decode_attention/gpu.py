"""`decode_attention` for NVIDIA GPUs, in two launches: positions are split over programs, their partials are combined.

Which program does which positions, and the order of all sums, follow from a sequence's position alone: its result
depends neither on the batch nor on the capacity. Programs that lie behind the position end at once. The new key and
value are never read from the cache in the launch that writes them: every program makes them for itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.decode_attention.config import DecodeAttentionConfig, Heads, default_config


def decode_attention(
    qkv: Float[Array, "B rows"],
    k: Float[Array, "B G C D"],
    v: Float[Array, "B G C D"],
    positions: Int[Array, " B"],
    cos: Float32[Array, "B D"],
    sin: Float32[Array, "B D"],
    *,
    heads: Heads,
    q_norm: Float[Array, " n"] | None,
    k_norm: Float[Array, " m"] | None,
    sinks: Float[Array, " N"] | None,
    config: DecodeAttentionConfig | None,
    interpret: bool,
) -> tuple[Float[Array, "B ND"], Float[Array, "B G C D"], Float[Array, "B G C D"]]:
    """See `decode_attention.api`."""
    config = config or default_config(heads.head_dim, qkv.dtype.itemsize)
    batch, capacity = k.shape[0], k.shape[2]
    dim, splits = heads.head_dim, config.splits
    norms = [] if heads.norm is None else [q_norm, k_norm]
    partials = jax.ShapeDtypeStruct((batch, heads.num_heads, splits, dim), jnp.float32)
    scalars = jax.ShapeDtypeStruct((batch, heads.num_heads, splits), jnp.float32)
    k, v, partials, peaks, sums = pl.pallas_call(
        partial(_split_kernel, heads=heads, config=config, interpret=interpret),
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)), partials, scalars, scalars],
        grid=(min(splits, pl.cdiv(capacity, config.tile)), heads.num_kv_heads, batch),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(k, v, positions, qkv, cos, sin, *norms)
    out = pl.pallas_call(
        partial(_combine_kernel, capacity=capacity, config=config),
        out_shape=jax.ShapeDtypeStruct((batch, heads.num_heads * dim), qkv.dtype),
        grid=(heads.num_heads, batch),
        compiler_params=plgpu.CompilerParams(num_warps=config.combine_warps, num_stages=1),
        interpret=interpret,
        name="decode_attention_combine",
    )(positions, partials, peaks, sums, *([] if sinks is None else [sinks]))
    return out, k, v


def _division(position: Int[Array, ""], capacity: int, config: DecodeAttentionConfig) -> tuple[Array, Array, Array]:
    """The last place that is attended to, how many tiles that makes, and tiles per program."""
    last = jnp.minimum(position, capacity - 1)
    tiles = lax.div(last, jnp.int32(config.tile)) + 1
    return last, tiles, lax.div(tiles + (config.splits - 1), jnp.int32(config.splits))


def _split_kernel(
    k_ref: Any, v_ref: Any, positions_ref: Any, qkv_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any,
    heads: Heads, config: DecodeAttentionConfig, interpret: bool,
) -> None:  # fmt: skip
    """One program's positions of one sequence, for the queries that share a key/value head."""
    q_norm_ref, k_norm_ref = refs[:2] if heads.norm is not None else (None, None)
    new_k_ref, new_v_ref, partials_ref, peaks_ref, sums_ref = refs[-5:]
    split, g, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    capacity, dim, tile = k_ref.shape[2], heads.head_dim, config.tile
    group = heads.num_heads // heads.num_kv_heads
    position = positions_ref[b]
    last, tiles, per_program = _division(position, capacity, config)
    place = lax.rem(position, jnp.int32(capacity))
    first = split * per_program
    end = jnp.minimum(first + per_program, tiles)

    @pl.when(first < end)
    def _() -> None:
        dtype = qkv_ref.dtype
        dot = partial(_dot, interpret=interpret)
        lanes = jnp.arange(dim, dtype=jnp.int32)
        cos, sin = cos_ref[b, :][None], sin_ref[b, :][None]
        rows = jnp.arange(max(16, pl.next_power_of_2(group)), dtype=jnp.int32)  # 16: the least of a matrix product
        queries = g * group + jnp.minimum(rows, group - 1)
        read = partial(_vectors, qkv_ref, b, heads=heads)
        q = _rotated(partial(read, queries, 0, heads.num_heads, q_norm_ref), cos, sin, heads, dtype)
        one = jnp.zeros((1,), jnp.int32) + g
        new_k = _rotated(partial(read, one, heads.num_heads, heads.num_kv_heads, k_norm_ref), cos, sin, heads, dtype)
        new_v = _clipped(
            _raw(qkv_ref, b, (heads.num_heads + heads.num_kv_heads + one)[:, None] * dim + lanes[None]), heads
        )
        new_v = new_v.astype(dtype)

        def attend(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, out = carry
            places = index * tile + jnp.arange(tile, dtype=jnp.int32)
            past = jnp.broadcast_to(((places <= last) & (places != place))[:, None], (tile, dim))
            new = jnp.broadcast_to((places == place)[:, None], (tile, dim))
            where = pl.ds(index * tile, tile)
            keys, values = (
                plgpu.load(ref.at[b, g, where, :], mask=past, other=jnp.zeros((), ref.dtype)) for ref in (k_ref, v_ref)
            )
            keys = jnp.where(new, jnp.broadcast_to(new_k, keys.shape), keys)
            values = jnp.where(new, jnp.broadcast_to(new_v, values.shape), values)
            scores = dot(q, keys, trans_b=True) * heads.scale
            scores = jnp.where(jnp.broadcast_to((places <= last)[None], scores.shape), scores, -jnp.inf)
            higher = jnp.maximum(peak, jnp.max(scores, axis=1))
            shrink, powers = jnp.exp(peak - higher), jnp.exp(scores - higher[:, None])
            out = out * shrink[:, None] + dot(powers.astype(dtype), values)
            return higher, total * shrink + jnp.sum(powers, axis=1), out

        empty = jnp.full(rows.shape, -jnp.inf, jnp.float32), jnp.zeros(rows.shape, jnp.float32)
        start = (*empty, jnp.zeros((rows.shape[0], dim), jnp.float32))
        peak, total, out = lax.fori_loop(first, end, attend, start)
        real = rows < group
        to = jnp.where(real, queries, heads.num_heads)  # masked lanes point outside: interpreted, they are written back
        plgpu.store(peaks_ref.at[b, to, split], peak, mask=real)
        plgpu.store(sums_ref.at[b, to, split], total, mask=real)
        row, column = jnp.broadcast_to(to[:, None], out.shape), jnp.broadcast_to(lanes[None], out.shape)
        plgpu.store(partials_ref.at[b, row, split, column], out, mask=jnp.broadcast_to(real[:, None], out.shape))

        own = lax.div(place, jnp.int32(tile))

        @pl.when((first <= own) & (own < end))
        def _() -> None:
            new_k_ref[b, g, pl.ds(place, 1), :] = new_k
            new_v_ref[b, g, pl.ds(place, 1), :] = new_v


def _combine_kernel(positions_ref: Any, partials_ref: Any, peaks_ref: Any, sums_ref: Any, *refs: Any,
                    capacity: int, config: DecodeAttentionConfig) -> None:  # fmt: skip
    """One head of one sequence, of all programs' partials."""
    *maybe_sinks, out_ref = refs
    n, b = pl.program_id(0), pl.program_id(1)
    dim = partials_ref.shape[3]
    _, tiles, per_program = _division(positions_ref[b], capacity, config)
    index = jnp.arange(config.splits, dtype=jnp.int32)
    real = index * per_program < tiles
    peaks = plgpu.load(peaks_ref.at[b, n, :], mask=real, other=-jnp.inf)
    sums = plgpu.load(sums_ref.at[b, n, :], mask=real, other=0.0)
    partials = plgpu.load(
        partials_ref.at[b, n, :, :], mask=jnp.broadcast_to(real[:, None], (config.splits, dim)), other=0.0
    )
    peak = jnp.max(peaks)
    if maybe_sinks:
        sink = maybe_sinks[0][n].astype(jnp.float32)
        peak = jnp.maximum(peak, sink)
    factors = jnp.exp(peaks - peak)
    total = jnp.sum(factors * sums)
    if maybe_sinks:
        total += jnp.exp(sink - peak)
    out_ref[b, pl.ds(n * dim, dim)] = (jnp.sum(factors[:, None] * partials, axis=0) / total).astype(out_ref.dtype)


def _raw(qkv_ref: Any, b: Array, index: Int[Array, "M D"]) -> Float32[Array, "M D"]:
    return plgpu.load(qkv_ref.at[b, index]).astype(jnp.float32)


def _clipped(x: Float32[Array, "M D"], heads: Heads) -> Float32[Array, "M D"]:
    return x if heads.clip is None else jnp.minimum(jnp.maximum(x, -heads.clip), heads.clip)


def _vectors(
    qkv_ref: Any, b: Array, which: Int[Array, " M"], first: int, count: int, norm_ref: Any, lanes: Int[Array, " D"],
    *, heads: Heads,
) -> Float32[Array, "M D"]:  # fmt: skip
    """Dimensions `lanes`, a permutation, of the heads `which` of the `count` from head `first` on; normed, clipped."""
    columns = which[:, None] * heads.head_dim + lanes[None]
    x = _raw(qkv_ref, b, first * heads.head_dim + columns)
    if heads.norm is None:
        return _clipped(x, heads)
    if heads.norm_over == "full":
        width = count * heads.head_dim
        every = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        inside = every < width
        whole = plgpu.load(qkv_ref.at[b, first * heads.head_dim + jnp.where(inside, every, 0)], mask=inside, other=0)
        mean_square = jnp.sum(whole.astype(jnp.float32) * whole.astype(jnp.float32)) / width
        weight = plgpu.load(norm_ref.at[columns])
        return _clipped(heads.norm.scaled(x, mean_square, weight, qkv_ref.dtype).astype(jnp.float32), heads)
    x = _clipped(x, heads)
    mean_square = (jnp.sum(x * x, axis=1) / heads.head_dim)[:, None]
    weight = plgpu.load(norm_ref.at[lanes])[None]
    return heads.norm.scaled(x, mean_square, weight, qkv_ref.dtype).astype(jnp.float32)


def _rotated(
    vectors: Any, cos: Float32[Array, "1 D"], sin: Float32[Array, "1 D"], heads: Heads, dtype: jnp.dtype
) -> Float[Array, "M D"]:
    """Rotated by the position. A register tile cannot be permuted, so the partners are read once more."""
    lanes = jnp.arange(heads.head_dim, dtype=jnp.int32)
    x = vectors(lanes)
    if not heads.rotary_dim:
        return x.astype(dtype)
    within, half = lanes - heads.rotary_offset, heads.rotary_dim // 2
    if heads.rotary_layout == "half":
        partner = jnp.where(within < half, lanes + half, lanes - half)
    else:
        partner = jnp.where(lax.rem(within, jnp.int32(2)) == 0, lanes + 1, lanes - 1)
    partner = jnp.where((within >= 0) & (within < heads.rotary_dim), partner, lanes)
    return (x * cos + vectors(partner) * sin).astype(dtype)


def _dot(a: Array, b: Array, *, interpret: bool, trans_b: bool = False) -> Float32[Array, "M cols"]:
    """Float32 sums of products."""
    if interpret:  # XLA's CPU backend has no products of bf16 matrices inside loops, and would put them back in
        a, b = lax.optimization_barrier((a.astype(jnp.float32), b.astype(jnp.float32)))
    # Without this float32 is multiplied in TF32, which has 10 bits of mantissa.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)
