"""Decode MoE for NVIDIA GPUs: two matrix-vector kernels, Pallas with the Triton lowering.

At batch 1 the layer is a read of K experts from memory, so the kernels are built around loads: a program asks for
all of its bytes before it uses any, every thread has several loads of 8 or 16 bytes in flight, and a row is reduced
once, at the end. The down projection of a token is one sum over its K experts, so nothing is left to combine. Sums
have a fixed order, and there are no atomics: the same expert gives the same bits in any slot, and a token in any row
of the batch. Neighbours in the grid are the same rows of different routes: where tokens share an expert, the L2 cache
reads it once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe.config import FusedMoEConfig, default_config
from pallas_kernels.fused_moe.swiglu import activate, hidden_dtype
from pallas_kernels.fused_moe.tiles import Part, load_by_row
from pallas_kernels.layout import ExpertLayout
from pallas_kernels.masks import Ref, bound, load
from pallas_kernels.wide_offsets import address_widely


def _sum_rows(
    products: list[Float32[Array, "rows N ..."]], scales: Float32[Array, "rows N"] | None
) -> Float32[Array, " rows"]:
    """Sums of equal tiles over all but their rows: element by element first, then across threads once. `scales` are
    those by channel."""
    total = functools.reduce(jnp.add, products)
    if scales is not None:
        total = total * scales.reshape(*scales.shape, *[1] * (total.ndim - 2))
    return jnp.sum(total.reshape(total.shape[0], -1), axis=1)


def _operand(first: Int[Array, ""] | None) -> list[Int[Array, " 1"]]:
    """The first slot as an operand of a kernel, if it is one."""
    return [] if first is None else [jnp.asarray(first, jnp.int32).reshape(1)]


def _first(refs: list[Ref]) -> Int[Array, ""] | int:
    """What a kernel reads of `_operand`."""
    return refs[0][0] if refs else 0


def up_rows(
    x_ref: Ref,
    slots_ref: Ref,
    h_ref: Ref,
    route: Int[Array, ""],
    slot: Int[Array, ""],
    row: Int[Array, ""],
    *,
    layout: ExpertLayout,
    config: FusedMoEConfig,
    inline: bool,
) -> None:
    """`config.up_rows` hidden values of one route, from `row` on: the same bits in whichever launch.

    `inline` is for GPUs alone: numbers of a byte or half of one are taken apart by PTX of our own.
    """
    token = jax.lax.div(route, jnp.int32(h_ref.shape[0] // x_ref.shape[0]))
    parts = [
        Part(layout=layout, name=name, row=row, col=start, rows=config.up_rows, cols=config.up_cols)
        for name in ("gate", "up")
        for start in range(0, layout.hidden, config.up_cols)
    ]
    loaded = [part.load(slots_ref, slot[None], None) for part in parts]
    vectors = {part.col: part.vector(x_ref, token[None], None) for part in parts if part.name == "gate"}
    by_row = functools.partial(load_by_row, slots_ref, slot[None], None, row, layout=layout, rows=config.up_rows)
    sums = {
        name: _sum_rows(
            [
                part.times(bits, vectors[part.col], None, mode=config.fp8, inline=inline)
                for part, bits in zip(parts, loaded, strict=True)
                if part.name == name
            ],
            by_row(name=f"{name}_scale") if layout.scales == "channel" else None,
        )
        for name in ("gate", "up")
    }
    if layout.biased:
        sums = {name: total + jnp.sum(by_row(name=f"{name}_bias"), axis=1) for name, total in sums.items()}
    value = activate(sums["gate"], sums["up"], layout.activation).astype(h_ref.dtype)
    mask = bound(row, config.up_rows, layout.width)
    plgpu.store(h_ref.at[route, pl.ds(row, config.up_rows)], value, mask=mask)


def _up_kernel(
    x_ref: Ref,
    ids_ref: Ref,
    slots_ref: Ref,
    *refs: Ref,
    layout: ExpertLayout,
    config: FusedMoEConfig,
    inline: bool,
) -> None:
    *first_ref, h_ref = refs
    route, row = pl.program_id(0), pl.program_id(1) * config.up_rows
    slot, first = ids_ref[route], _first(first_ref)

    @pl.when(slot >= 0)
    def _active() -> None:
        up_rows(x_ref, slots_ref, h_ref, route, first + slot, row, layout=layout, config=config, inline=inline)

    # The hidden values of an inactive route are never written: the down projection does not read them.


def _down_kernel(
    h_ref: Ref,
    ids_ref: Ref,
    weights_ref: Ref,
    slots_ref: Ref,
    *refs: Ref,
    layout: ExpertLayout,
    config: FusedMoEConfig,
    inline: bool,
) -> None:
    """`down_rows` outputs of one token, summed over its routes, which are one dimension of a tile."""
    *first_ref, out_ref = refs
    hidden, width, first = layout.hidden, layout.width, _first(first_ref)
    token, row = pl.program_id(0), pl.program_id(1) * config.down_rows
    per_token = ids_ref.shape[0] // out_ref.shape[0]
    nth = jnp.arange(pl.next_power_of_2(per_token), dtype=jnp.int32)
    routes = token * per_token + nth
    exists = bound(0, nth.shape[0], per_token)
    slots = load(ids_ref.at[routes], exists)
    active = slots >= 0 if exists is None else (slots >= 0) & exists
    # What is not loaded is zero: also the weight, which may be anything for inactive routes.
    weights = load(weights_ref.at[routes], active)
    parts = [
        Part(layout=layout, name="down", row=row, col=start, rows=config.down_rows, cols=config.down_cols)
        for start in range(0, width, config.down_cols)
    ]
    slots += first
    loaded = [part.load(slots_ref, slots, active) for part in parts]
    products = [
        part.times(bits, part.vector(h_ref, routes, active), weights, mode=config.fp8, inline=inline)
        for part, bits in zip(parts, loaded, strict=True)
    ]
    by_row = functools.partial(load_by_row, slots_ref, slots, active, row, layout=layout, rows=config.down_rows)
    value = _sum_rows(products, by_row(name="down_scale") if layout.scales == "channel" else None)
    if layout.biased:
        value += jnp.sum(by_row(name="down_bias") * weights[None, :], axis=1)
    mask = bound(row, config.down_rows, hidden)
    plgpu.store(out_ref.at[token, pl.ds(row, config.down_rows)], value, mask=mask)


def project_up(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    ids: Int[Array, " R"],
    *,
    layout: ExpertLayout,
    first: Int[Array, ""] | None = None,
    config: FusedMoEConfig,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """Hidden values of every route; rows of inactive routes (id -1) are left as they are. Ids count from `first`."""
    width = layout.width
    return pl.pallas_call(
        functools.partial(_up_kernel, layout=layout, config=config, inline=not interpret),
        out_shape=jax.ShapeDtypeStruct((ids.shape[0], width), hidden_dtype(x)),
        grid=(ids.shape[0], pl.cdiv(width, config.up_rows)),
        compiler_params=plgpu.CompilerParams(num_warps=config.up_warps, num_stages=1),
        interpret=interpret,
        name="fused_moe_up",
    )(x, ids, slots, *_operand(first))


def project_down(
    h: Float[Array, "R F"],
    slots: Shaped[Array, "S n"],
    ids: Int[Array, " R"],
    weights: Float32[Array, " R"],
    batch: int,
    *,
    layout: ExpertLayout,
    first: Int[Array, ""] | None = None,
    config: FusedMoEConfig,
    interpret: bool = False,
) -> Float32[Array, "B H"]:
    """Sums of every token's active routes."""
    hidden = layout.hidden
    return pl.pallas_call(
        functools.partial(_down_kernel, layout=layout, config=config, inline=not interpret),
        out_shape=jax.ShapeDtypeStruct((batch, hidden), jnp.float32),
        grid=(batch, pl.cdiv(hidden, config.down_rows)),
        compiler_params=plgpu.CompilerParams(num_warps=config.down_warps, num_stages=1),
        interpret=interpret,
        name="fused_moe_down",
    )(h, ids, weights, slots, *_operand(first))


def fused_moe(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    *,
    layout: ExpertLayout,
    first_slot: Int[Array, ""] | None = None,
    config: FusedMoEConfig | None = None,
    interpret: bool = False,
) -> Float32[Array, "B H"]:
    address_widely(slots=slots)
    config = config or default_config(layout, slot_ids.shape[1])
    config.check(layout)
    ids, weights = slot_ids.reshape(-1).astype(jnp.int32), weights.reshape(-1).astype(jnp.float32)
    how: dict[str, Any] = {"layout": layout, "first": first_slot, "config": config, "interpret": interpret}
    h = project_up(x, slots, ids, **how)
    return project_down(h, slots, ids, weights, x.shape[0], **how)
