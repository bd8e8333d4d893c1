"""Decode MoE for NVIDIA GPUs: matrix-vector kernels, Pallas with the Triton lowering.

At batch 1 the layer is a read of K experts from memory, so the kernels are built around loads: a program asks for
all of its bytes before it uses any, every thread has several 16-byte loads in flight, and a row is reduced once, at
the end. The down projection of a token is one sum over its K experts, so nothing is left to combine. Sums have a
fixed order: the same expert gives the same bits in any slot, and a token in any row of the batch.

With `Config.launches == 1` both projections are one launch. Programs of the down projection come after those of the
up projection in the grid; they ask for their weights, wait until their token's hidden values are all written, and
only then multiply. GPUs start programs in the order of the grid, so what is waited for is always under way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe import tiles
from pallas_kernels.fused_moe.config import Config, default_config
from pallas_kernels.fused_moe.swiglu import hidden_dtype, sizes, swiglu
from pallas_kernels.layout import ExpertLayout


def _sum_rows(products: list[Float32[Array, "rows ..."]]) -> Float32[Array, " rows"]:
    """Sums of equal tiles over all but their rows: element by element first, then across threads once."""
    total = functools.reduce(jnp.add, products)
    return jnp.sum(total.reshape(total.shape[0], -1), axis=1)


def _up(
    x_ref: tiles.Ref,
    ids_ref: tiles.Ref,
    slots_ref: tiles.Ref,
    h_ref: tiles.Ref,
    route: Int[Array, ""],
    row: Int[Array, ""],
    *,
    layout: ExpertLayout,
    config: Config,
) -> None:
    """Hidden values `row : row + up_rows` of one route."""
    hidden, width = sizes(layout)
    slot = ids_ref[route]
    token = jax.lax.div(route, jnp.int32(ids_ref.shape[0] // x_ref.shape[0]))

    @pl.when(slot >= 0)
    def _active() -> None:
        parts = [
            tiles.Part(layout=layout, name=name, row=row, col=start, rows=config.up_rows, cols=config.up_cols)
            for name in ("gate", "up")
            for start in range(0, hidden, config.up_cols)
        ]
        loaded = [part.load(slots_ref, slot, stream=config.stream) for part in parts]
        sums = {}
        for name in ("gate", "up"):
            sums[name] = _sum_rows(
                [
                    part.times(bits, part.vector(x_ref, token), config.fp8)
                    for part, bits in zip(parts, loaded, strict=True)
                    if part.name == name
                ]
            )
        value = swiglu(sums["gate"], sums["up"]).astype(h_ref.dtype)
        mask = tiles.bound(row, config.up_rows, width)
        plgpu.store(h_ref.at[route, pl.ds(row, config.up_rows)], value, mask=mask)

    # The hidden values of an inactive route are never written: the down projection selects them away.


def _down(
    h_ref: tiles.Ref,
    ids_ref: tiles.Ref,
    weights_ref: tiles.Ref,
    slots_ref: tiles.Ref,
    out_ref: tiles.Ref,
    token: Int[Array, ""],
    row: Int[Array, ""],
    arrived: tiles.Ref | None,
    *,
    layout: ExpertLayout,
    config: Config,
) -> None:
    """Outputs `row : row + down_rows` of one token, summed over its routes."""
    hidden, width = sizes(layout)
    per_token = ids_ref.shape[0] // out_ref.shape[0]
    parts = [
        tiles.Part(layout=layout, name="down", row=row, col=start, rows=config.down_rows, cols=config.down_cols)
        for start in range(0, width, config.down_cols)
    ]
    routes = [token * per_token + k for k in range(per_token)]
    slots = [ids_ref[route] for route in routes]
    weights = [jnp.where(slot >= 0, weights_ref[route], 0.0) for slot, route in zip(slots, routes, strict=True)]
    loaded = [[part.load(slots_ref, slot, stream=config.stream, active=slot >= 0) for part in parts] for slot in slots]
    if arrived is not None:
        _wait(arrived, token, per_token * pl.cdiv(width, config.up_rows))
    products = []
    for slot, weight, route, tiles_of_slot in zip(slots, weights, routes, loaded, strict=True):
        for part, bits in zip(parts, tiles_of_slot, strict=True):
            vector = part.vector(h_ref, route, active=slot >= 0)
            products.append(part.times(bits, vector, config.fp8, factor=weight))
    mask = tiles.bound(row, config.down_rows, hidden)
    plgpu.store(out_ref.at[token, pl.ds(row, config.down_rows)], _sum_rows(products), mask=mask)


def _wait(arrived: tiles.Ref, token: Int[Array, ""], count: int) -> None:
    """Until `count` programs of the up projection have written their hidden values of this token."""

    def look(_: Int[Array, ""]) -> Int[Array, ""]:
        return plgpu.load(arrived.at[token], volatile=True)

    seen = jax.lax.while_loop(lambda seen: seen < count, look, jnp.int32(0))
    # Acquires what they have released. It adds zero, but a loop of which nothing is used would be taken out.
    plgpu.atomic_add(arrived, (token,), jnp.minimum(seen, count) - count)


def _up_kernel(
    x_ref: tiles.Ref,
    ids_ref: tiles.Ref,
    slots_ref: tiles.Ref,
    h_ref: tiles.Ref,
    *,
    layout: ExpertLayout,
    config: Config,
) -> None:
    row, route = pl.program_id(0) * config.up_rows, pl.program_id(1)
    _up(x_ref, ids_ref, slots_ref, h_ref, route, row, layout=layout, config=config)


def _down_kernel(
    h_ref: tiles.Ref,
    ids_ref: tiles.Ref,
    weights_ref: tiles.Ref,
    slots_ref: tiles.Ref,
    out_ref: tiles.Ref,
    *,
    layout: ExpertLayout,
    config: Config,
) -> None:
    row, token = pl.program_id(0) * config.down_rows, pl.program_id(1)
    _down(h_ref, ids_ref, weights_ref, slots_ref, out_ref, token, row, None, layout=layout, config=config)


def _both_kernel(
    x_ref: tiles.Ref,
    ids_ref: tiles.Ref,
    weights_ref: tiles.Ref,
    slots_ref: tiles.Ref,
    *refs: tiles.Ref,
    layout: ExpertLayout,
    config: Config,
    interpret: bool,
) -> None:
    *maybe_aliased, h_ref, out_ref, arrived = refs if interpret else (*refs[1:], refs[0])
    del maybe_aliased
    hidden, width = sizes(layout)
    routes, tokens = ids_ref.shape[0], out_ref.shape[0]
    up_programs, down_programs = pl.cdiv(width, config.up_rows), pl.cdiv(hidden, config.down_rows)
    program = pl.program_id(0)
    first_down = routes * up_programs

    @pl.when(program < first_down)
    def _first() -> None:
        route = jax.lax.div(program, jnp.int32(up_programs))
        row = jax.lax.rem(program, jnp.int32(up_programs)) * config.up_rows
        _up(x_ref, ids_ref, slots_ref, h_ref, route, row, layout=layout, config=config)
        _order(interpret)  # every thread's stores come before the one that tells of them
        plgpu.atomic_add(arrived, (jax.lax.div(route, jnp.int32(routes // tokens)),), jnp.int32(1))

    @pl.when(program >= first_down)
    def _second() -> None:
        token = jax.lax.div(program - first_down, jnp.int32(down_programs))
        row = jax.lax.rem(program - first_down, jnp.int32(down_programs)) * config.down_rows
        _down(h_ref, ids_ref, weights_ref, slots_ref, out_ref, token, row, arrived, layout=layout, config=config)
        _order(interpret)  # all have waited before this program counts as done
        done = plgpu.atomic_add(arrived, (tokens + token,), jnp.int32(1))

        @pl.when(done == down_programs - 1)
        def _last() -> None:
            arrived[token] = jnp.int32(0)
            arrived[tokens + token] = jnp.int32(0)


def _order(interpret: bool) -> None:
    if not interpret:
        plgpu.debug_barrier()


def project_up(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    ids: Int[Array, " R"],
    *,
    layout: ExpertLayout,
    config: Config,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """Hidden values of every route; rows of inactive routes (id -1) are left as they are."""
    width = sizes(layout)[1]
    return pl.pallas_call(
        functools.partial(_up_kernel, layout=layout, config=config),
        out_shape=jax.ShapeDtypeStruct((ids.shape[0], width), hidden_dtype(x)),
        grid=(pl.cdiv(width, config.up_rows), ids.shape[0]),
        compiler_params=plgpu.CompilerParams(num_warps=config.up_warps, num_stages=1),
        interpret=interpret,
        name="fused_moe_up",
    )(x, ids, slots)


def project_down(
    h: Float[Array, "R F"],
    slots: Shaped[Array, "S n"],
    ids: Int[Array, " R"],
    weights: Float32[Array, " R"],
    batch: int,
    *,
    layout: ExpertLayout,
    config: Config,
    interpret: bool = False,
) -> Float32[Array, "B H"]:
    """Sums of every token's active routes."""
    hidden = sizes(layout)[0]
    return pl.pallas_call(
        functools.partial(_down_kernel, layout=layout, config=config),
        out_shape=jax.ShapeDtypeStruct((batch, hidden), jnp.float32),
        grid=(pl.cdiv(hidden, config.down_rows), batch),
        compiler_params=plgpu.CompilerParams(num_warps=config.down_warps, num_stages=1),
        interpret=interpret,
        name="fused_moe_down",
    )(h, ids, weights, slots)


def _in_one_launch(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    ids: Int[Array, " R"],
    weights: Float32[Array, " R"],
    *,
    layout: ExpertLayout,
    config: Config,
    interpret: bool,
) -> Float32[Array, "B H"]:
    hidden, width = sizes(layout)
    batch, routes = x.shape[0], ids.shape[0]
    # Programs that have arrived and that are done, of every token. A launch leaves zeros as it found them, so it
    # needs no array of its own: XLA is not told that it is written, and all layers share one.
    counters = jnp.zeros((2 * batch,), jnp.int32)
    out_shape = [
        jax.ShapeDtypeStruct((routes, width), hidden_dtype(x)),
        jax.ShapeDtypeStruct((batch, hidden), jnp.float32),
    ]
    if interpret:  # there the writes of operands are lost
        out_shape.append(jax.ShapeDtypeStruct(counters.shape, counters.dtype))
    return pl.pallas_call(
        functools.partial(_both_kernel, layout=layout, config=config, interpret=interpret),
        out_shape=out_shape,
        grid=(routes * pl.cdiv(width, config.up_rows) + batch * pl.cdiv(hidden, config.down_rows),),
        input_output_aliases={4: 2} if interpret else {},
        compiler_params=plgpu.CompilerParams(num_warps=config.up_warps, num_stages=1),
        interpret=interpret,
        name="fused_moe",
    )(x, ids, weights, slots, counters)[1]


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
    how = {"layout": layout, "config": config, "interpret": interpret}
    ids, weights = slot_ids.reshape(-1).astype(jnp.int32), weights.reshape(-1).astype(jnp.float32)
    if config.launches == 1:
        return _in_one_launch(x, slots, ids, weights, **how)
    h = project_up(x, slots, ids, **how)
    return project_down(h, slots, ids, weights, x.shape[0], **how)
