"""Decode MoE for NVIDIA GPUs: two matrix-vector kernels, Pallas with the Triton lowering.

At batch 1 the layer is a read of K experts from memory, so the kernels are built around loads: a program
takes few whole rows, every thread has several 16-byte loads in flight, and nothing is shared between
programs. There are no atomics: the same expert gives the same bits in any slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe import tiles
from pallas_kernels.fused_moe.config import Config, Fp8Mode, default_config
from pallas_kernels.fused_moe.reference import combine_routes
from pallas_kernels.fused_moe.swiglu import hidden_dtype, is_fp8, sizes, swiglu
from pallas_kernels.layout import FP8_BLOCK, ExpertLayout


def _rows_dot(
    load_vector: Callable[[int], Float32[Array, " cols"]],
    rows_ref: tiles.Ref,
    bytes_ref: tiles.Ref | None,
    slot: Int[Array, ""],
    row: Int[Array, ""],
    *,
    layout: ExpertLayout,
    name: str,
    rows: int,
    cols: int,
    mode: Fp8Mode,
) -> Float32[Array, " rows"]:
    """`matrix[row : row + rows] @ vector` of the expert in `slot`; the loop over columns is unrolled."""
    height, width = layout.field(name).shape
    below = tiles.bound(row, rows, height)
    total = jnp.zeros((rows,), jnp.float32)
    for start in range(0, width, cols):
        mask = tiles.both(below, tiles.bound(start, cols, width), (rows, cols))
        where = pl.ds(row + tiles.first_row(layout, name), rows), tiles.span(start, cols, width)
        tile = tiles.load(rows_ref.at[slot, *where], mask)
        vector = load_vector(start)
        if bytes_ref is None:
            values = tiles.weight_values(tile, layout, name).astype(jnp.float32)
            total = total + jnp.sum(values * vector[None, :], axis=1)
            continue
        # Scales go onto the sums of 128 products, not onto the weights: 1/128 of the multiplications. A
        # program's rows lie in one row of blocks, because their number divides 128.
        product = tiles.fp8_values(tile, mode).astype(jnp.float32) * vector[None, :]
        sums = jnp.sum(product.reshape(rows, cols // FP8_BLOCK, FP8_BLOCK), axis=2)
        scales = tiles.load_scales(
            bytes_ref, slot, layout, name, jax.lax.div(row, FP8_BLOCK), start // FP8_BLOCK, cols // FP8_BLOCK
        )
        total = total + jnp.sum(sums * scales[None, :], axis=1)
    return total


def _kernel(
    vector_ref: tiles.Ref,
    ids_ref: tiles.Ref,
    rows_ref: tiles.Ref,
    *refs: tiles.Ref,
    names: tuple[str, ...],
    finish: Callable[..., Float[Array, " rows"]],
    per_vector: int,
    layout: ExpertLayout,
    rows: int,
    cols: int,
    mode: Fp8Mode,
) -> None:
    """`finish(*(rows of matrix @ vector for each name))` for one route and one group of rows."""
    *maybe_bytes, out_ref = refs
    bytes_ref = maybe_bytes[0] if maybe_bytes else None
    route, row = pl.program_id(1), pl.program_id(0) * rows
    height, width = layout.field(names[0]).shape
    slot = ids_ref[route]
    store_mask = tiles.bound(row, rows, height)
    source = jax.lax.div(route, jnp.int32(per_vector))

    def load_vector(start: int) -> Float32[Array, " cols"]:
        part = tiles.load(vector_ref.at[source, tiles.span(start, cols, width)], tiles.bound(start, cols, width))
        return part.astype(jnp.float32)

    @pl.when(slot >= 0)
    def _active() -> None:
        values = [
            _rows_dot(
                load_vector,
                rows_ref,
                bytes_ref,
                slot,
                row,
                layout=layout,
                name=name,
                rows=rows,
                cols=cols,
                mode=mode,
            )
            for name in names
        ]
        plgpu.store(out_ref.at[route, pl.ds(row, rows)], finish(*values).astype(out_ref.dtype), mask=store_mask)

    # An inactive route's row is left unwritten: the down kernel does not read it, `combine_routes` selects it
    # away.


def _call(
    vector: Float[Array, "V cols"],
    ids: Int[Array, " R"],
    slots: Shaped[Array, "S n"],
    *,
    names: tuple[str, ...],
    finish: Callable[..., Float[Array, " rows"]],
    out_dtype: jnp.dtype,
    layout: ExpertLayout,
    rows: int,
    cols: int,
    warps: int,
    mode: Fp8Mode,
    interpret: bool,
) -> Float[Array, "R rows"]:
    height, width = layout.field(names[0]).shape
    operands = [vector, ids, tiles.row_view(slots, layout, width)]
    if is_fp8(layout):
        operands.append(slots)
    kernel = functools.partial(
        _kernel,
        names=names,
        finish=finish,
        per_vector=ids.shape[0] // vector.shape[0],
        layout=layout,
        rows=rows,
        cols=cols,
        mode=mode,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ids.shape[0], height), out_dtype),
        grid=(pl.cdiv(height, rows), ids.shape[0]),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"fused_moe_{names[-1]}",
    )(*operands)


def fused_moe(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    *,
    layout: ExpertLayout,
    config: Config | None = None,
    interpret: bool = False,
) -> Float32[Array, "B H"]:
    tiles.check_addressable(slots)
    config = config or default_config(layout)
    config.check(layout)
    call = functools.partial(_call, layout=layout, mode=config.fp8, interpret=interpret)
    batch, per_token = slot_ids.shape
    ids = slot_ids.reshape(-1).astype(jnp.int32)
    h = call(
        x,
        ids,
        slots,
        names=("gate", "up"),
        finish=swiglu,
        out_dtype=hidden_dtype(x),
        rows=config.up_rows,
        cols=config.up_cols,
        warps=config.up_warps,
    )
    y = call(
        h,
        ids,
        slots,
        names=("down",),
        finish=lambda value: value,
        out_dtype=jnp.dtype(jnp.float32),
        rows=config.down_rows,
        cols=config.down_cols,
        warps=config.down_warps,
    )
    hidden, _ = sizes(layout)
    return combine_routes(y.reshape(batch, per_token, hidden), slot_ids, weights)
