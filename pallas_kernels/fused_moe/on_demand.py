"""Decode MoE for NVIDIA GPUs where experts may be missing: those that are there compute while the others arrive.

Launches of one program never overlap on a GPU, programs of one launch do. So the first programs of the first launch
copy missing experts over the link, as `miss_load` does, and the others make the hidden values of the routes whose
experts are resident; a second launch makes those of the experts that came, and the down projection follows as ever.
Where nothing is missing the first launch is the up projection, and the second has nothing to do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe.config import FusedMoEConfig, default_config
from pallas_kernels.fused_moe.gpu import project_down, up_rows
from pallas_kernels.fused_moe.swiglu import hidden_dtype
from pallas_kernels.layout import ExpertLayout
from pallas_kernels.masks import Ref, count, gather
from pallas_kernels.miss_load.gpu import Division
from pallas_kernels.wide_offsets import address_widely

ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)  # slots on the device, the pool in host memory


@dataclass(frozen=True, kw_only=True)
class OnDemandConfig:
    """How many share the work that there is only where experts are missing; whoever has none of it ends at once.

    All loading programs copy one missing expert after the other, so their number does not depend on how many may be
    missing, and neither does what is in flight: by default 256 KiB, enough for a PCIe 5 x16 link.
    """

    loading_warps: int = 64  # of the first launch
    bytes_per_warp: int = 4096  # in flight; a power of two
    late_programs: int = 256  # of the second launch

    def division(self, slots: Shaped[Array, "S n"], config: FusedMoEConfig) -> Division:
        programs = max(1, self.loading_warps // config.up_warps)
        return Division.of(slots, programs=programs, piece_bytes=self.bytes_per_warp * config.up_warps)


def _missing(dst_ref: Ref) -> Int[Array, " M2"]:
    """The slots of missing experts, then -1."""
    lanes = jnp.arange(pl.next_power_of_2(dst_ref.shape[0]), dtype=jnp.int32)
    return gather(dst_ref, lanes, lanes < dst_ref.shape[0])


def _among(slot: Int[Array, ""], missing: Int[Array, " M2"]) -> Bool[Array, ""]:
    return count(missing == slot) > 0


def _load_and_up_kernel(
    x_ref: Ref,
    ids_ref: Ref,
    experts_ref: Ref,
    dst_ref: Ref,
    pool_ref: Ref,
    _slots_ref: Ref,
    slots_ref: Ref,
    h_ref: Ref,
    *,
    division: Division,
    layout: ExpertLayout,
    config: FusedMoEConfig,
    inline: bool,
) -> None:
    """A part of every missing expert, or `up_rows` hidden values of a route whose expert is not missing."""
    program, missing = pl.program_id(0), _missing(dst_ref)

    @pl.when(program < division.programs)
    def _load() -> None:
        def load(i: Array, carry: None) -> None:
            division.copy(pool_ref, slots_ref, experts_ref[i], dst_ref[i], program)

        jax.lax.fori_loop(0, count(missing >= 0), load, None)

    @pl.when(program >= division.programs)
    def _project() -> None:
        nth, routes = program - division.programs, jnp.int32(ids_ref.shape[0])
        route, row = jax.lax.rem(nth, routes), jax.lax.div(nth, routes) * config.up_rows
        slot = ids_ref[route]

        @pl.when((slot >= 0) & ~_among(slot, missing))
        def _hit() -> None:
            up_rows(x_ref, slots_ref, h_ref, route, slot, row, layout=layout, config=config, inline=inline)


def _up_late_kernel(
    x_ref: Ref,
    ids_ref: Ref,
    dst_ref: Ref,
    slots_ref: Ref,
    _h_ref: Ref,
    h_ref: Ref,
    *,
    programs: int,
    layout: ExpertLayout,
    config: FusedMoEConfig,
    inline: bool,
) -> None:
    """A part of the hidden values of every route whose expert was missing."""
    program = pl.program_id(0)

    @pl.when(dst_ref[0] >= 0)
    def _some() -> None:
        missing = _missing(dst_ref)
        mine = jax.lax.div(pl.cdiv(layout.width, config.up_rows) - 1 - program, jnp.int32(programs)) + 1

        def project(route: Array, carry: None) -> None:
            slot = ids_ref[route]

            @pl.when((slot >= 0) & _among(slot, missing))
            def _late() -> None:
                def rows(i: Array, carry: None) -> None:
                    row = (i * programs + program) * config.up_rows
                    up_rows(x_ref, slots_ref, h_ref, route, slot, row, layout=layout, config=config, inline=inline)

                jax.lax.fori_loop(0, mine, rows, None)

        jax.lax.fori_loop(0, ids_ref.shape[0], project, None)


def load_and_project_up(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    ids: Int[Array, " R"],
    pool: Shaped[Array, "E n"],
    experts: Int[Array, " M"],
    dst: Int[Array, " M"],
    *,
    layout: ExpertLayout,
    config: FusedMoEConfig,
    sharing: OnDemandConfig,
    interpret: bool = False,
) -> tuple[Shaped[Array, "S n"], Float[Array, "R F"]]:
    """The slots with the missing experts, and hidden values of the routes whose experts were there; others' rows are
    left as they are."""
    routes, division = ids.shape[0], sharing.division(slots, config)
    return pl.pallas_call(
        functools.partial(_load_and_up_kernel, division=division, layout=layout, config=config, inline=not interpret),
        out_shape=(
            jax.ShapeDtypeStruct(slots.shape, slots.dtype),
            jax.ShapeDtypeStruct((routes, layout.width), hidden_dtype(x)),
        ),
        grid=(division.programs + routes * pl.cdiv(layout.width, config.up_rows),),
        in_specs=[ANYWHERE] * 6,
        out_specs=(ANYWHERE, ANYWHERE),
        input_output_aliases={5: 0},
        compiler_params=plgpu.CompilerParams(num_warps=config.up_warps, num_stages=1),
        interpret=interpret,
        name="fused_moe_load_and_up",
    )(x, ids, experts, dst, pool, slots)


def project_up_late(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    ids: Int[Array, " R"],
    dst: Int[Array, " M"],
    h: Float[Array, "R F"],
    *,
    layout: ExpertLayout,
    config: FusedMoEConfig,
    sharing: OnDemandConfig,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """Hidden values `h` with those of the routes whose experts have been loaded."""
    programs = min(sharing.late_programs, pl.cdiv(layout.width, config.up_rows))
    return pl.pallas_call(
        functools.partial(_up_late_kernel, programs=programs, layout=layout, config=config, inline=not interpret),
        out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype),
        grid=(programs,),
        in_specs=[ANYWHERE] * 5,
        out_specs=ANYWHERE,
        input_output_aliases={4: 0},
        compiler_params=plgpu.CompilerParams(num_warps=config.up_warps, num_stages=1),
        interpret=interpret,
        name="fused_moe_up_late",
    )(x, ids, dst, slots, h)


def moe_on_demand(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    pool: Shaped[Array, "E n"],
    experts: Int[Array, " M"],
    dst: Int[Array, " M"],
    *,
    layout: ExpertLayout,
    config: FusedMoEConfig | None = None,
    sharing: OnDemandConfig | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "S n"], Float32[Array, "B H"]]:
    address_widely(slots=slots, pool=pool)
    config, sharing = config or default_config(layout, slot_ids.shape[1]), sharing or OnDemandConfig()
    config.check(layout)
    ids, weights = slot_ids.reshape(-1).astype(jnp.int32), weights.reshape(-1).astype(jnp.float32)
    how: dict[str, Any] = {"layout": layout, "config": config, "interpret": interpret}
    slots, h = load_and_project_up(x, slots, ids, pool, experts, dst, sharing=sharing, **how)
    h = project_up_late(x, slots, ids, dst, h, sharing=sharing, **how)
    return slots, project_down(h, slots, ids, weights, x.shape[0], **how)
