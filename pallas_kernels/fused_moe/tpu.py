"""Decode MoE for TPUs: one Pallas kernel. Lowered and interpreted in the tests; never timed on a TPU.

The slot of every route is prefetched as a scalar, so the pipeline fetches weight tiles straight from the
slot. A grid step takes 128 of the F hidden values of one route through all three matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe.reference import combine_routes
from pallas_kernels.fused_moe.swiglu import activate, hidden_dtype
from pallas_kernels.layout import FP4, FP8, FP8_BLOCK, ExpertLayout
from pallas_kernels.masks import Ref

TILE = 128  # hidden values per grid step: one lane tile, and one row of FP8 scale blocks
SUBLANES = 8  # rows of a float32 tile; a single token is spread over them


def check_shapes(layout: ExpertLayout, *, interpret: bool) -> None:
    """Raises `ValueError` for what these kernels do not compute, and for shapes off the lane tiling; the interpreter
    takes any H, and F below 128."""
    hidden, width = layout.hidden, layout.width
    if layout.dtype == FP4 or layout.biased:
        raise ValueError("TPU kernels take no FP4 experts and no biases: choose implementation 'xla'")
    if (width % TILE and not (interpret and width < TILE)) or (hidden % TILE and not interpret):
        raise ValueError(f"TPU kernels need H and F to be multiples of {TILE}, got H={hidden}, F={width}")


def tile_width(width: int) -> int:
    """128, or all of a smaller F (interpreter only)."""
    return width if width % TILE else TILE


def gather_scales(
    slots: Shaped[Array, "S n"], ids: Int[Array, " R"], layout: ExpertLayout, name: str
) -> Float32[Array, "R rows cols"]:
    """ScaleKind of the experts in slots `ids`, by channel as one row; reads those bytes only, not the blocks."""
    field = layout.field(f"{name}_scale")
    start, size = layout.start(field.name), field.nbytes // layout.storage.itemsize
    part = jax.vmap(lambda slot: jax.lax.dynamic_slice(slots, (slot, start), (1, size))[0])(ids)
    scales = layout.typed(part, field.name)
    return scales[:, None] if layout.scales == "channel" else scales


def matmul_t(x: Float[Array, "M cols"], weight: Float[Array, "rows cols"]) -> Float32[Array, "M rows"]:
    """`x @ weight.T` in float32; operands of one 16-bit dtype go to the MXU as they are."""
    if x.dtype != weight.dtype or x.dtype == jnp.float32:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def scaled_matmul_t(
    x: Float[Array, "M cols"],
    tile: Shaped[Array, "rows cols"],
    scales: Ref | None,
    index: tuple[Any, ...],
    *,
    layout: ExpertLayout,
    per_column: bool,
) -> Float32[Array, "M rows"]:
    """`matmul_t` with stored weights. ScaleKind by block are one per 128 columns (`per_column`), or per 128 rows."""
    weight = pltpu.bitcast(tile, jnp.dtype(layout.dtype))
    if layout.dtype == FP8:
        weight = weight.astype(x.dtype)  # e4m3 is exact in bf16
    if scales is None:
        return matmul_t(x, weight)
    if layout.scales == "channel":
        return matmul_t(x, weight) * scales[0]
    rows, cols = weight.shape
    total = jnp.zeros((x.shape[0], rows), jnp.float32)
    if per_column:
        for block, start in enumerate(range(0, cols, FP8_BLOCK)):
            part = matmul_t(x[:, start : start + FP8_BLOCK], weight[:, start : start + FP8_BLOCK])
            total = total + part * scales[(*index, block)]
        return total
    parts = [
        matmul_t(x, weight[start : start + FP8_BLOCK]) * scales[(index[0], block, index[1])]
        for block, start in enumerate(range(0, rows, FP8_BLOCK))
    ]
    return jnp.concatenate(parts, axis=1)


def expert_tile(
    x: Float[Array, "M H"],
    gate: Shaped[Array, "tile H"],
    up: Shaped[Array, "tile H"],
    down: Shaped[Array, "H tile"],
    scales: tuple[Ref, ...],
    step: Int[Array, ""],
    layout: ExpertLayout,
) -> Float32[Array, "M H"]:
    """What one tile of hidden values adds to the expert's output. Tiles are as stored."""
    gate_scales, up_scales, down_scales = scales or (None, None, None)
    g = scaled_matmul_t(x, gate, gate_scales, (0, step), layout=layout, per_column=True)
    u = scaled_matmul_t(x, up, up_scales, (0, step), layout=layout, per_column=True)
    h = activate(g, u, layout.activation).astype(hidden_dtype(x))
    return scaled_matmul_t(h, down, down_scales, (0, step), layout=layout, per_column=False)


def weight_specs(
    layout: ExpertLayout, slot_of: Callable[..., Int[Array, ""]]
) -> tuple[list[pl.BlockSpec], list[pl.BlockSpec]]:
    """Block specs of gate, up, down (in the two row views) and of their scales; `slot_of(i, *prefetched)`."""
    hidden, width = layout.hidden, layout.width
    tile = tile_width(width)
    first = {name: layout.first_row(name) for name in ("gate", "up", "down")}

    def rows(name: str) -> pl.BlockSpec:
        start = first[name] // tile
        return pl.BlockSpec((1, tile, hidden), lambda i, f, *p: (slot_of(i, *p), start + f, 0))

    down = first["down"] // hidden
    specs = [
        rows("gate"),
        rows("up"),
        pl.BlockSpec((1, hidden, tile), lambda i, f, *p: (slot_of(i, *p), down, f)),
    ]
    scales = []
    if layout.scales == "block":
        for name in ("gate", "up", "down"):
            shape = layout.field(f"{name}_scale").shape
            scales.append(pl.BlockSpec((1, *shape), lambda i, f, *p: (i, 0, 0), memory_space=pltpu.SMEM))
    if layout.scales == "channel":
        of_tile = pl.BlockSpec((1, 1, tile), lambda i, f, *p: (i, 0, f))
        scales += [of_tile, of_tile, pl.BlockSpec((1, 1, hidden), lambda i, f, *p: (i, 0, 0))]
    return specs, scales


def _kernel(
    ids_ref: Ref, x_ref: Ref, gate_ref: Ref, up_ref: Ref, down_ref: Ref, *refs: Ref, layout: ExpertLayout
) -> None:
    *scales, out_ref = refs
    route, step = pl.program_id(0), pl.program_id(1)

    @pl.when(step == 0)
    def _first() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(ids_ref[route] >= 0)
    def _active() -> None:
        part = expert_tile(x_ref[0], gate_ref[0], up_ref[0], down_ref[0], tuple(scales), step, layout)
        out_ref[0] += part


def fused_moe(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    *,
    layout: ExpertLayout,
    interpret: bool = False,
) -> Float32[Array, "B H"]:
    check_shapes(layout, interpret=interpret)
    hidden, width = layout.hidden, layout.width
    batch, per_token = slot_ids.shape
    ids = slot_ids.reshape(-1).astype(jnp.int32)
    routes = batch * per_token
    sublanes = SUBLANES * 4 // x.dtype.itemsize
    spread = jnp.broadcast_to(x[:, None], (batch, sublanes, hidden))
    specs, scale_specs = weight_specs(layout, lambda i, ids: jnp.maximum(ids[i], 0))
    scales = [gather_scales(slots, jnp.maximum(ids, 0), layout, n) for n in ("gate", "up", "down") if scale_specs]
    by_hidden, by_width = layout.row_view(slots, hidden), layout.row_view(slots, width)
    y = pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        out_shape=jax.ShapeDtypeStruct((routes, sublanes, hidden), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(routes, width // tile_width(width)),
            in_specs=[
                pl.BlockSpec((1, sublanes, hidden), lambda i, f, ids: (jax.lax.div(i, per_token), 0, 0)),
                *specs,
                *scale_specs,
            ],
            out_specs=pl.BlockSpec((1, sublanes, hidden), lambda i, f, ids: (i, 0, 0)),
        ),
        interpret=interpret,
        name="fused_moe",
    )(ids, spread, by_hidden, by_hidden, by_width, *scales)
    return combine_routes(y[:, 0].reshape(batch, per_token, hidden), slot_ids, weights)
