"""Prefill MoE for TPUs: one kernel over the blocks in use. Lowered and interpreted in tests; never timed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe.tpu import check_shapes, expert_tile, gather_scales, tile_width, weight_specs
from pallas_kernels.grouped_moe.blocks import active_first
from pallas_kernels.layout import ExpertLayout
from pallas_kernels.masks import Ref


def _kernel(
    order_ref: Ref,
    slots_ref: Ref,
    x_ref: Ref,
    gate_ref: Ref,
    up_ref: Ref,
    down_ref: Ref,
    *refs: Ref,
    layout: ExpertLayout,
) -> None:
    *scales, _, out_ref = refs
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _first() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    out_ref[0] += expert_tile(x_ref[0], gate_ref[0], up_ref[0], down_ref[0], tuple(scales), step, layout)


def grouped_moe(
    out: Float32[Array, "N M H"],
    x: Float[Array, "T H"],
    slots: Shaped[Array, "S n"],
    block_slots: Int[Array, " N"],
    block_rows: Int[Array, "N M"],
    *,
    layout: ExpertLayout,
    interpret: bool = False,
) -> Float32[Array, "N M H"]:
    check_shapes(layout, interpret=interpret)
    hidden, width = layout.hidden, layout.width
    rows = out.shape[1]
    order, count = active_first(block_slots)
    slot = jnp.maximum(block_slots, 0).astype(jnp.int32)[order]
    # Rows that pad a block are computed from zeros, which gives zeros.
    gathered = jnp.where(block_rows[..., None] >= 0, x[jnp.maximum(block_rows, 0)], jnp.zeros((), x.dtype))
    specs, scale_specs = weight_specs(layout, lambda i, order, slot: slot[i])
    scales = [gather_scales(slots, slot, layout, n) for n in ("gate", "up", "down") if scale_specs]
    by_hidden, by_width = layout.row_view(slots, hidden), layout.row_view(slots, width)
    one_block = pl.BlockSpec((1, rows, hidden), lambda i, f, order, slot: (order[i], 0, 0))
    operands = [order, slot, gathered, by_hidden, by_hidden, by_width, *scales, out]
    return pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # Only the blocks in use are visited: the others keep what the aliased array holds.
            grid=(count, width // tile_width(width)),
            in_specs=[one_block, *specs, *scale_specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=one_block,
        ),
        input_output_aliases={len(operands) - 1: 0},
        interpret=interpret,
        name="grouped_moe",
    )(*operands)
