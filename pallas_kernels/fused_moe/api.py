"""The public functions of the decode kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.fused_moe import reference
from pallas_kernels.fused_moe.config import FusedMoEConfig
from pallas_kernels.layout import ExpertLayout
from pallas_kernels.miss_load import miss_load


def fused_moe(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    *,
    layout: ExpertLayout,
    first_slot: Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: FusedMoEConfig | None = None,
) -> Float32[Array, "B H"]:
    """MoE layer of a decode step: `out[b] = sum_k weights[b, k] * down @ (silu(gate @ x[b]) * (up @ x[b]))`.

    That is of plain experts: the layout may give each product a bias, and another activation.

    Args:
      x: bf16 or f32.
      slots: the slot cache, one expert block of `layout` per row.
      slot_ids: slot of each route's expert; -1 for an inactive route, which contributes nothing.
      weights: router weights, used as they come (no normalisation), in float32.
      layout: where gate, up and down, their scales and biases lie in a block; bf16, f16, f32, FP8 e4m3 with a scale
        per 128 x 128 block, or MXFP4; and the activation between them.
      first_slot: the slot that 0 stands for among `slot_ids`; None: slot 0.
      implementation: `xla`, `gpu` or `tpu`; by default the best of this process's backend.
      interpret: run a Pallas implementation in the interpreter, on any backend.
      config: block shapes of the GPU kernels; by default chosen from the expert's shape.

    Sums are float32. With bf16 `x` the value `silu(g) * u` is rounded to bf16 before the down projection, as
    in Hugging Face's models; with float32 nothing is rounded. Sums are taken in an order
    that is fixed, though each implementation has its own. The result does not depend on which slots the experts
    sit in, to the bit.
    """
    _check(x, slots, layout)
    if resolve(implementation) == "gpu":
        from pallas_kernels.fused_moe import gpu

        return gpu.fused_moe(
            x, slots, slot_ids, weights, layout=layout, first_slot=first_slot, config=config, interpret=interpret
        )
    if first_slot is not None:
        slot_ids = jnp.where(slot_ids >= 0, first_slot + slot_ids, -1)
    if resolve(implementation) == "tpu":
        from pallas_kernels.fused_moe import tpu

        return tpu.fused_moe(x, slots, slot_ids, weights, layout=layout, interpret=interpret)
    return reference.fused_moe(x, slots, slot_ids, weights, layout=layout)


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
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: FusedMoEConfig | None = None,
) -> tuple[Shaped[Array, "S n"], Float32[Array, "B H"]]:
    """`miss_load` of the experts that are missing, then `fused_moe`: the slots, and the same output to the bit.

    On GPUs experts that were in slots already compute while the missing ones arrive.

    Args:
      x, weights, layout, implementation, interpret, config: as of `fused_moe`.
      slots: donated by the caller's jit and written in place.
      slot_ids: slot of each route's expert; a route whose slot is in `dst` waits for its expert.
      pool, experts, dst: as of `miss_load`.
    """
    _check(x, slots, layout)
    if (pool.dtype, pool.shape[1]) != (slots.dtype, slots.shape[1]):
        raise ValueError(
            f"moe_on_demand: expected a pool of rows like the slots, {slots.dtype}[E, {slots.shape[1]}], "
            f"got {pool.dtype}{list(pool.shape)}"
        )
    experts, dst = experts.astype(jnp.int32), dst.astype(jnp.int32)
    implementation = resolve(implementation)
    if implementation == "gpu":
        from pallas_kernels.fused_moe import on_demand

        return on_demand.moe_on_demand(
            x, slots, slot_ids, weights, pool, experts, dst, layout=layout, config=config, interpret=interpret
        )
    with jax.named_scope("miss_load"):
        slots = miss_load(slots, pool, experts, dst, implementation=implementation, interpret=interpret)
    out = fused_moe(x, slots, slot_ids, weights, layout=layout, implementation=implementation, interpret=interpret)
    return slots, out


def _check(x: Float[Array, "B H"], slots: Shaped[Array, "S n"], layout: ExpertLayout) -> None:
    hidden = layout.hidden
    if x.shape[1] != hidden or slots.shape[1] != layout.block_elems or slots.dtype != layout.storage:
        raise ValueError(
            f"fused_moe: layout expects x[B, {hidden}] and slots {layout.storage}[S, {layout.block_elems}], "
            f"got x{list(x.shape)} and slots {slots.dtype}{list(slots.shape)}"
        )
