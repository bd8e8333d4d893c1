"""Prefill MoE for NVIDIA GPUs: two tensor-core kernels, Pallas with the Triton lowering.

A program makes one tile of one block's rows. Programs of skipped blocks end at once. Every row is contracted
in the same steps whatever block it is in, so a layer may be split into several calls without changing a bit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped, UInt8

from pallas_kernels.fused_moe.dequantize import fp8_unit, fp8_units, weight_values
from pallas_kernels.fused_moe.swiglu import activate, fp4_values, hidden_dtype, powers_of_two
from pallas_kernels.fused_moe.tiles import load_by_row, load_scale
from pallas_kernels.grouped_moe.config import GroupedMoEConfig, default_config
from pallas_kernels.layout import FP4, FP4_BLOCK, FP8, FP8_BLOCK, ExpertLayout
from pallas_kernels.masks import Ref, both, bound, load
from pallas_kernels.wide_offsets import address_widely


def _dot_t(a: Float[Array, "M depth"], b: Float[Array, "cols depth"]) -> Float32[Array, "M cols"]:
    """`a @ b.T`, float32 sums: tensor cores for equal 16-bit dtypes, else full float32 (no tf32)."""
    if a.dtype != b.dtype or a.dtype == jnp.float32:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # Not for 16-bit operands: there it means nothing, and lowerings differ in what they make of it.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=True, precision=precision)


def both_indices(rows: Int[Array, " M"], cols: Int[Array, " C"]) -> tuple[Int[Array, "M C"], Int[Array, "M C"]]:
    """Indices of a tile of gathered rows."""
    shape = rows.shape[0], cols.shape[0]
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(cols[None, :], shape)


def _products(
    rows_ref: Ref,
    flat_ref: Ref | None,
    weights_ref: Ref,
    slot: Int[Array, ""],
    source: Int[Array, " M"] | Int[Array, ""],
    valid: Bool[Array, " M"] | None,
    col: Int[Array, ""],
    *,
    names: tuple[str, ...],
    layout: ExpertLayout,
    cols: int,
    config: GroupedMoEConfig,
) -> tuple[Float32[Array, "M cols"], ...]:
    """`rows @ matrix[col : col + cols].T`, plus the bias, for each name.

    `rows_ref` is [T, contracted] with `source` the M rows to gather, or [N, M, contracted] with `source` a
    block. `flat_ref` is the slots as they are, for scales and biases; None where there are none.
    """
    height, width = layout.field(names[0]).shape  # as stored: a column of FP4 is a byte, with two numbers
    packed = 2 if layout.dtype == FP4 else 1
    depth = config.depth // packed
    below = bound(col, cols, height)
    count = valid.shape[0] if valid is not None else rows_ref.shape[1]

    def load_rows(start: Int[Array, ""], parity: int) -> Float[Array, "M depth"]:
        inside = both(valid, bound(start, depth, width), (count, depth))
        if valid is None and packed == 1:
            return load(rows_ref.at[source, :, pl.ds(start, depth)], inside)
        # Index arrays for both dimensions: the interpreter does not mix them with slices under a mask.
        columns = packed * (start + jnp.arange(depth, dtype=jnp.int32)) + parity
        if valid is None:
            return load(rows_ref.at[source, *both_indices(jnp.arange(count, dtype=jnp.int32), columns)], inside)
        return load(rows_ref.at[both_indices(source, columns)], inside)

    def step(i: Int[Array, ""], totals: tuple[Float32[Array, "M cols"], ...]) -> tuple[Float32[Array, "M cols"], ...]:
        start = i * depth
        mask = both(below, bound(start, depth, width), (cols, depth))
        rows = [load_rows(start, parity) for parity in range(packed)]
        new = []
        for name, total in zip(names, totals, strict=True):
            row = pl.ds(col + layout.first_row(name), cols)
            b = load(weights_ref.at[slot, row, pl.ds(start, depth)], mask)
            if layout.scales is not None:
                fp8 = layout.dtype == FP8
                values = (
                    fp8_units(b, config.fp8, inline=False).astype(rows[0].dtype)
                    if fp8
                    else weight_values(b, layout, name)
                )
                unit = jnp.float32(fp8_unit(config.fp8) if fp8 else 1)
                if layout.scales == "block":
                    # A step is one column of blocks, the tile lies in one row of blocks: one scale for all.
                    unit *= load_scale(flat_ref, slot, layout, name, jax.lax.div(col, jnp.int32(FP8_BLOCK)), i)
                total += _dot_t(rows[0], values) * unit
            elif layout.dtype == FP4:
                # Times a power of two a value of one bit of mantissa stays exact in the rows' dtype.
                scale = powers_of_two(_load_fp4_scales(flat_ref, slot, layout, name, col, cols, start, depth, mask))
                for half, part in enumerate(rows):
                    total += _dot_t(part, (fp4_values(b >> (4 * half)) * scale).astype(part.dtype))
            else:
                total += _dot_t(rows[0], weight_values(b, layout, name))
            new.append(total)
        return tuple(new)

    zeros = tuple(jnp.zeros((count, cols), jnp.float32) for _ in names)
    totals = jax.lax.fori_loop(0, pl.cdiv(width, depth), step, zeros)

    def by_row(name: str) -> Float32[Array, "1 cols"]:
        return jnp.sum(load_by_row(flat_ref, slot[None], None, col, layout=layout, name=name, rows=cols), axis=1)[None]

    if layout.scales == "channel":
        totals = tuple(total * by_row(f"{name}_scale") for name, total in zip(names, totals, strict=True))
    if layout.biased:
        totals = tuple(total + by_row(f"{name}_bias") for name, total in zip(names, totals, strict=True))
    return totals


def _load_fp4_scales(
    flat_ref: Ref,
    slot: Int[Array, ""],
    layout: ExpertLayout,
    name: str,
    row: Int[Array, ""],
    rows: int,
    start: Int[Array, ""],
    depth: int,
    mask: Bool[Array, "rows depth"] | None,
) -> UInt8[Array, "rows depth"]:
    """The scale of every byte of a tile: the same for 16 of them, which the cache knows."""
    field = layout.field(f"{name}_scale")
    row_index, byte = both_indices(row + jnp.arange(rows, dtype=jnp.int32), start + jnp.arange(depth, dtype=jnp.int32))
    block = jax.lax.div(byte, jnp.int32(FP4_BLOCK // 2))
    return load(flat_ref.at[slot, field.offset + row_index * field.shape[1] + block], mask)


def _up_kernel(
    x_ref: Ref,
    slots_ref: Ref,
    tokens_ref: Ref,
    weights_ref: Ref,
    *refs: Ref,
    layout: ExpertLayout,
    config: GroupedMoEConfig,
) -> None:
    *maybe_flat, h_ref = refs
    block, col = pl.program_id(1), pl.program_id(0) * config.up_cols
    slot = slots_ref[block]

    @pl.when(slot >= 0)
    def _used() -> None:
        tokens = tokens_ref[block, :]
        gate, up = _products(
            x_ref,
            maybe_flat[0] if maybe_flat else None,
            weights_ref,
            slot,
            jnp.maximum(tokens, 0),
            tokens >= 0,
            col,
            names=("gate", "up"),
            layout=layout,
            cols=config.up_cols,
            config=config,
        )
        _store(h_ref, block, col, activate(gate, up, layout.activation))


def _down_kernel(
    h_ref: Ref,
    slots_ref: Ref,
    tokens_ref: Ref,
    weights_ref: Ref,
    *refs: Ref,
    layout: ExpertLayout,
    config: GroupedMoEConfig,
) -> None:
    # The array that `out_ref` is aliased with is an operand too; nothing is read from it.
    *maybe_flat, _, out_ref = refs
    block, col = pl.program_id(1), pl.program_id(0) * config.down_cols
    slot = slots_ref[block]

    @pl.when(slot >= 0)
    def _used() -> None:
        (y,) = _products(
            h_ref,
            maybe_flat[0] if maybe_flat else None,
            weights_ref,
            slot,
            block,
            None,
            col,
            names=("down",),
            layout=layout,
            cols=config.down_cols,
            config=config,
        )
        if layout.biased:  # without, rows of zeros give zeros
            y = jnp.where(tokens_ref[block, :][:, None] >= 0, y, 0.0)
        _store(out_ref, block, col, y)


def _store(ref: Ref, block: Int[Array, ""], col: Int[Array, ""], value: Float32[Array, "M cols"]) -> None:
    rows, cols = value.shape
    mask = both(None, bound(col, cols, ref.shape[2]), (rows, cols))
    plgpu.store(ref.at[block, :, pl.ds(col, cols)], value.astype(ref.dtype), mask=mask)


def grouped_moe(
    out: Float32[Array, "N M H"],
    x: Float[Array, "T H"],
    slots: Shaped[Array, "S n"],
    block_slots: Int[Array, " N"],
    block_rows: Int[Array, "N M"],
    *,
    layout: ExpertLayout,
    config: GroupedMoEConfig | None = None,
    interpret: bool = False,
) -> Float32[Array, "N M H"]:
    config = config or default_config(layout)
    config.check(layout)
    blocks, rows, hidden = out.shape
    width = layout.width
    flat = [slots] if layout.scales or layout.dtype == FP4 or layout.biased else []
    for_up, for_down = (layout.row_view(slots, layout.field(name).shape[1]) for name in ("gate", "down"))
    address_widely(slots=slots, for_up=for_up, for_down=for_down)
    block_slots, block_rows = block_slots.astype(jnp.int32), block_rows.astype(jnp.int32)
    params = plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages)
    h = pl.pallas_call(
        functools.partial(_up_kernel, layout=layout, config=config),
        out_shape=jax.ShapeDtypeStruct((blocks, rows, width), hidden_dtype(x)),
        grid=(pl.cdiv(width, config.up_cols), blocks),
        compiler_params=params,
        interpret=interpret,
        name="grouped_moe_up",
    )(x, block_slots, block_rows, for_up, *flat)
    operands = [h, block_slots, block_rows, for_down, *flat, out]
    return pl.pallas_call(
        functools.partial(_down_kernel, layout=layout, config=config),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(pl.cdiv(hidden, config.down_cols), blocks),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=params,
        interpret=interpret,
        name="grouped_moe_down",
    )(*operands)
