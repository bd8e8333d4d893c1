"""The decode MoE's two projections with Pallas's Mosaic GPU lowering, for bf16 experts; not used by the model.

See `pallas_kernels.mosaic` for what they cover and why they are here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32, UInt16

from pallas_kernels import mosaic
from pallas_kernels.fused_moe.swiglu import activate
from pallas_kernels.fused_moe.tiles import first_row, row_view
from pallas_kernels.layout import ExpertLayout


def project_up(
    x: BFloat16[Array, "B H"],
    slots: UInt16[Array, "S n"],
    ids: Int32[Array, " R"],
    *,
    layout: ExpertLayout,
    rows: int = 8,
    interpret: Any = None,
) -> BFloat16[Array, "R F"]:
    """Hidden values of every route, `rows` of them a program; those of inactive routes (id -1) are left as they are."""
    _check(layout, rows, layout.width)
    return plgpu.kernel(
        functools.partial(_up_kernel, layout=layout),
        out_type=jax.ShapeDtypeStruct((ids.shape[0], layout.width), x.dtype),
        grid=(ids.shape[0], layout.width // rows),
        grid_names=("route", "program"),
        scratch_types=[plgpu.SMEM((2, rows, layout.hidden), slots.dtype), plgpu.Barrier(num_arrivals=2)],
        compiler_params=mosaic.PARAMS,
        interpret=interpret,
        kernel_name="fused_moe_up_mosaic",
    )(x, ids, row_view(slots, layout, layout.hidden))


def _up_kernel(
    x_ref: Any, ids_ref: Any, slots_ref: Any, h_ref: Any, rows_ref: Any, barrier: Any, *, layout: ExpertLayout
) -> None:
    rows = rows_ref.shape[1]
    route, start = jax.lax.axis_index("route"), jax.lax.axis_index("program") * rows
    slot = ids_ref[route]

    @pl.when(slot >= 0)
    def _active() -> None:
        for half, name in enumerate(("gate", "up")):
            there = pl.ds(first_row(layout, name) + start, rows)
            mosaic.copy_rows(slots_ref.at[slot, there], rows_ref.at[half], barrier)
        vector = mosaic.load_vector(x_ref.at[jax.lax.div(route, jnp.int32(ids_ref.shape[0] // x_ref.shape[0]))])
        plgpu.barrier_wait(barrier)
        gate, up = (mosaic.products(mosaic.load_rows(rows_ref.at[half]), vector) for half in range(2))
        value = activate(gate, up, layout.activation).astype(h_ref.dtype)
        mosaic.store(h_ref.at[route, pl.ds(start, rows)], value)


def project_down(
    h: BFloat16[Array, "R F"],
    slots: UInt16[Array, "S n"],
    ids: Int32[Array, " R"],
    weights: Float32[Array, " R"],
    batch: int,
    *,
    layout: ExpertLayout,
    rows: int = 8,
    interpret: Any = None,
) -> Float32[Array, "B H"]:
    """Sums of every token's active routes, `rows` outputs a program."""
    _check(layout, rows, layout.hidden)
    per_token = ids.shape[0] // batch
    return plgpu.kernel(
        functools.partial(_down_kernel, layout=layout),
        out_type=jax.ShapeDtypeStruct((batch, layout.hidden), jnp.float32),
        grid=(batch, layout.hidden // rows),
        grid_names=("token", "program"),
        scratch_types=[
            plgpu.SMEM((per_token, rows, layout.width), slots.dtype),
            plgpu.Barrier(num_barriers=per_token),
        ],
        compiler_params=mosaic.PARAMS,
        interpret=interpret,
        kernel_name="fused_moe_down_mosaic",
    )(h, ids, weights, row_view(slots, layout, layout.width))


def _down_kernel(
    h_ref: Any, ids_ref: Any, weights_ref: Any, slots_ref: Any, out_ref: Any, rows_ref: Any, barriers: Any, *,
    layout: ExpertLayout,
) -> None:  # fmt: skip
    per_token, rows, _ = rows_ref.shape
    token, start = jax.lax.axis_index("token"), jax.lax.axis_index("program") * rows
    routes = [token * per_token + nth for nth in range(per_token)]
    slots = [ids_ref[route] for route in routes]
    there = pl.ds(first_row(layout, "down") + start, rows)
    for nth, slot in enumerate(slots):

        @pl.when(slot >= 0)
        def _(nth: int = nth, slot: Any = slot) -> None:
            mosaic.copy_rows(slots_ref.at[slot, there], rows_ref.at[nth], barriers.at[nth])

    vectors = [mosaic.load_vector(h_ref.at[route]) for route in routes]
    total = jnp.zeros((rows,), jnp.float32)
    for nth, (route, slot) in enumerate(zip(routes, slots, strict=True)):
        pl.when(slot >= 0)(functools.partial(plgpu.barrier_wait, barriers.at[nth]))
        # Of an inactive route anything may be there; it is computed and left out.
        value = mosaic.products(mosaic.load_rows(rows_ref.at[nth]), vectors[nth]) * weights_ref[route]
        total = jnp.where(slot >= 0, total + value, total)
    mosaic.store(out_ref.at[token, pl.ds(start, rows)], total)


def _check(layout: ExpertLayout, rows: int, height: int) -> None:
    if layout.dtype != jnp.bfloat16 or layout.biased:
        raise ValueError(f"fused_moe: the Mosaic kernels take bf16 experts without biases, got {layout.dtype}")
    if layout.hidden % mosaic.SPAN or layout.width % mosaic.SPAN or rows % mosaic.WARPS or height % rows:
        raise ValueError(
            f"fused_moe: expected H and F that are multiples of {mosaic.SPAN}, and {rows} rows a program that divide "
            f"{height} and are a multiple of {mosaic.WARPS}, got H={layout.hidden}, F={layout.width}"
        )
