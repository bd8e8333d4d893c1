"""`prompt_attention` for NVIDIA GPUs: one launch, Pallas with the Triton lowering.

A program makes some queries of one head and goes through the keys that they see, tile by tile (FlashAttention-2,
arXiv 2307.08691). Only the tiles at the ends of that range are masked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.prompt_attention.config import PromptAttentionConfig, default_config, parts_of

_LOW = -1e30  # a finite start: of a tile that nothing is visible in, powers are zeros and not exp(inf - inf)
_LOG2_E = 1.4426950408889634


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
    config: PromptAttentionConfig | None,
    interpret: bool,
) -> Float[Array, "B T N V"]:
    """See `prompt_attention.api`."""
    batch, length, heads, size = q.shape
    values = v.shape[3] if v is not None else int(value_size or 0)
    config = config or default_config(size, values, q.dtype.itemsize)
    queries = min(config.queries, max(16, pl.next_power_of_2(length)))
    return pl.pallas_call(
        partial(
            _kernel, scale=scale, window=window, queries=queries, keys=config.keys, interpret=interpret,
            has_values=v is not None, has_sinks=sinks is not None,
        ),
        out_shape=jax.ShapeDtypeStruct((batch, length, heads, values), q.dtype),
        grid=(pl.cdiv(length, queries), heads, batch),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="prompt_attention",
    )(first_query, first_key, q, k, *([] if v is None else [v]), *([] if sinks is None else [sinks]))  # fmt: skip


def _kernel(
    first_query_ref: Any, first_key_ref: Any, q_ref: Any, k_ref: Any, *refs: Any,
    scale: float, window: int | None, queries: int, keys: int, interpret: bool, has_values: bool, has_sinks: bool,
) -> None:  # fmt: skip
    out_ref = refs[-1]
    v_ref = refs[0] if has_values else None
    block, n, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, length, heads, size = q_ref.shape
    value_size = out_ref.shape[3]
    groups, capacity = k_ref.shape[1:3]
    g = lax.div(n, jnp.int32(heads // groups))
    dot = partial(_dot, interpret=interpret)
    parts = list(_ranges(size))
    rows = block * queries + jnp.arange(queries, dtype=jnp.int32)
    inside = None if length % queries == 0 else rows < length
    q = [_load(q_ref.at[b, pl.ds(block * queries, queries), n, pl.ds(*part)], inside, part[1]) for part in parts]
    # Places of keys are counted from the first key, which lies in the past of the first query.
    origin = first_query_ref[b] - first_key_ref[b]
    at = origin + rows
    first, last = origin + block * queries, origin + jnp.minimum((block + 1) * queries, length) - 1
    lowest = jnp.maximum(-first_key_ref[b], 0)
    if window is not None:
        lowest = jnp.maximum(lowest, first - (window - 1))
    begin = lax.div(lowest, jnp.int32(keys))
    end = lax.div(jnp.minimum(last, capacity - 1), jnp.int32(keys)) + 1

    def read(masked: bool, index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, out = carry
        places = index * keys + jnp.arange(keys, dtype=jnp.int32)
        seen = (places <= last) & (places >= lowest) if masked else None
        k = [_load(k_ref.at[b, g, pl.ds(index * keys, keys), pl.ds(*part)], seen, part[1]) for part in parts]
        scores = sum((dot(q_part, k_part, trans_b=True) for q_part, k_part in zip(q[1:], k[1:], strict=True)),
                     dot(q[0], k[0], trans_b=True)) * (scale * _LOG2_E)  # fmt: skip
        if masked:
            shape = scores.shape
            row, column = jnp.broadcast_to(at[:, None], shape), jnp.broadcast_to(places[None], shape)
            visible = (column <= row) & (column >= lowest)
            if window is not None:
                visible &= column > row - window
            scores = jnp.where(visible, scores, -jnp.inf)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        shrink, powers = jnp.exp2(peak - higher), jnp.exp2(scores - higher[:, None])
        if v_ref is None:
            values = k[0]
        else:
            values = _load(v_ref.at[b, g, pl.ds(index * keys, keys), pl.ds(0, value_size)], seen, value_size)
        out = out * shrink[:, None] + dot(powers.astype(values.dtype), values)
        return higher, total * shrink + jnp.sum(powers, axis=1), out

    carry = (
        jnp.full((queries,), _LOW, jnp.float32), jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, value_size), jnp.float32),
    )  # fmt: skip
    if window is None:
        # Whole tiles that all queries see, if keys begin at a position from 0; then those around the diagonal.
        whole = jnp.where(lowest > 0, begin, lax.div(jnp.minimum(first + 1, capacity), jnp.int32(keys)))
        carry = lax.fori_loop(begin, whole, partial(read, False), carry)
        begin = whole
    peak, total, out = lax.fori_loop(begin, end, partial(read, True), carry)
    if has_sinks:
        sink = refs[-2][n].astype(jnp.float32) * _LOG2_E
        higher = jnp.maximum(peak, sink)
        shrink = jnp.exp2(peak - higher)
        total, out = total * shrink + jnp.exp2(sink - higher), out * shrink[:, None]
    to = out_ref.at[b, pl.ds(block * queries, queries), n, pl.ds(0, value_size)]
    mask = None if inside is None else jnp.broadcast_to(inside[:, None], out.shape)
    plgpu.store(to, (out / total[:, None]).astype(out_ref.dtype), mask=mask)


def _ranges(size: int) -> Any:
    """(start, size) of the powers of two that make a size."""
    start = 0
    for part in parts_of(size):
        yield start, part
        start += part


def _load(ref: Any, rows: Array | None, columns: int) -> Array:
    """A tile, zeros in rows that are masked off."""
    if rows is None:
        return plgpu.load(ref)
    mask = jnp.broadcast_to(rows[:, None], (rows.shape[0], columns))
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def _dot(
    a: Float[Array, "M depth"], b: Float[Array, "..."], *, interpret: bool, trans_b: bool = False
) -> Float32[Array, "M cols"]:
    """Float32 sums of products."""
    if interpret:  # XLA's CPU backend has no products of bf16 matrices inside loops, and would put them back in
        a, b = lax.optimization_barrier((a.astype(jnp.float32), b.astype(jnp.float32)))
    # Without this float32 is multiplied in TF32, which has 10 bits of mantissa.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)
