"""`matvec` for NVIDIA GPUs: each program reads its rows of the matrix once, for all vectors.

Every program norms the vectors for itself: they come from L1, while its rows are on their way from memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.masks import both, bound, load
from pallas_kernels.matvec.config import MatvecConfig, Product, default_config
from pallas_kernels.norm import Norm


def matvec(
    x: Float[Array, "B I"],
    w: Float[Array, "O I"],
    *,
    bias: Float[Array, " O"] | None,
    norm: Norm | None,
    norm_weight: Float[Array, " I"] | None,
    residual: Float[Array, "B O"] | None,
    residual_scale: float,
    addend: Float32[Array, "B I"] | None,
    dtype: jnp.dtype,
    config: MatvecConfig | None,
    name: str,
    interpret: bool,
) -> Product:
    """See `matvec.api`; `name` is that of the launch."""
    (batch, width), outputs = x.shape, w.shape[0]
    config = config or default_config(width, w.dtype.itemsize)
    kernel = functools.partial(
        _kernel, norm=norm, biased=bias is not None, kept=residual is not None, scale=residual_scale,
        added=addend is not None, config=config,
    )  # fmt: skip
    optional = [array for array in (bias, norm_weight if norm else None, residual, addend) if array is not None]
    out_shape = [jax.ShapeDtypeStruct((batch, outputs), dtype)]
    out_shape += [jax.ShapeDtypeStruct(x.shape, x.dtype)] * ((norm is not None) + (addend is not None))
    out, *more = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(pl.cdiv(outputs, config.rows),),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(x, w, *optional)
    if addend is not None:
        x = more.pop()
    return Product(out, more.pop() if more else x, x)


def _kernel(
    x_ref: Any, w_ref: Any, *refs: Any, norm: Norm | None, biased: bool, kept: bool, scale: float, added: bool,
    config: MatvecConfig,
) -> None:  # fmt: skip
    rest = list(refs)
    bias_ref = rest.pop(0) if biased else None
    norm_ref = rest.pop(0) if norm is not None else None
    residual_ref = rest.pop(0) if kept else None
    addend_ref = rest.pop(0) if added else None
    out_ref, *more = rest

    def keep(ref: Any, b: Array, pieces: list[Array]) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            for piece, span, mask in zip(pieces, columns, inside, strict=True):
                plgpu.store(ref.at[b, span], piece, mask=mask)

    (batch, width), outputs = x_ref.shape, w_ref.shape[0]
    row = pl.program_id(0) * config.rows
    below = bound(row, config.rows, outputs)
    starts = range(0, width, config.cols)
    inside = [bound(start, config.cols, width) for start in starts]
    rows, columns = pl.ds(row, config.rows), [_span(start, config.cols, width) for start in starts]
    # First of all, so that they are under way while the vectors are normed.
    matrix = [
        load(w_ref.at[rows, span], both(below, mask, (config.rows, config.cols)))
        for span, mask in zip(columns, inside, strict=True)
    ]
    factors = []
    if norm_ref is not None:
        factors = [load(norm_ref.at[span], mask) for span, mask in zip(columns, inside, strict=True)]
    for b in map(jnp.int32, range(batch)):  # the lowering takes no literal among the indices of a load
        pieces = [load(x_ref.at[b, span], mask) for span, mask in zip(columns, inside, strict=True)]
        if addend_ref is not None:
            sums = [load(addend_ref.at[b, span], mask) for span, mask in zip(columns, inside, strict=True)]
            pieces = [_sum(piece, part.astype(piece.dtype)) for piece, part in zip(pieces, sums, strict=True)]
            keep(more[-1], b, pieces)
        if norm is not None:
            wide = [piece.astype(jnp.float32) for piece in pieces]
            mean_square = jnp.sum(_add_up([piece * piece for piece in wide])) / width
            pieces = [
                norm.scaled(piece, mean_square, factor, x_ref.dtype)
                for piece, factor in zip(wide, factors, strict=True)
            ]
            keep(more[0], b, pieces)

        products = [
            tile.astype(jnp.float32) * piece.astype(jnp.float32)[None]
            for tile, piece in zip(matrix, pieces, strict=True)
        ]
        total = jnp.sum(_add_up(products), axis=1)
        if bias_ref is not None:
            total += load(bias_ref.at[rows], below).astype(jnp.float32)
        total = total.astype(out_ref.dtype)
        if residual_ref is not None:
            scaled = total if scale == 1 else (total.astype(jnp.float32) * scale).astype(total.dtype)
            total = _sum(load(residual_ref.at[b, rows], below), scaled)
        plgpu.store(out_ref.at[b, rows], total, mask=below)


def _sum(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Of 16-bit values, rounded once."""
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(b.dtype)


def _add_up(parts: list[Float32[Array, "..."]]) -> Float32[Array, "..."]:
    return functools.reduce(jnp.add, parts)


def _span(start: int, block: int, size: int) -> Any:
    # Pallas rejects static slices beyond the array, also under a mask.
    return pl.ds(start if start + block <= size else jnp.int32(start), block)
