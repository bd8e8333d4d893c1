"""Prefill MoE in plain XLA: the oracle of the kernels, and what runs on CPUs and on GPUs before Ampere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe.reference import expert
from pallas_kernels.fused_moe.swiglu import hidden_dtype
from pallas_kernels.grouped_moe.blocks import active_first
from pallas_kernels.layout import ExpertLayout


def grouped_moe(
    out: Float32[Array, "N M H"],
    x: Float[Array, "T H"],
    slots: Shaped[Array, "S n"],
    block_slots: Int[Array, " N"],
    block_rows: Int[Array, "N M"],
    *,
    layout: ExpertLayout,
) -> Float32[Array, "N M H"]:
    order, count = active_first(block_slots)

    # A loop over the blocks in use, not a conditional per block: XLA keeps `out` in place in a loop, and
    # dense products of one expert at a time never gather the slots.
    def step(i: Int[Array, ""], out: Float32[Array, "N M H"]) -> Float32[Array, "N M H"]:
        n = order[i]
        rows = x[jnp.maximum(block_rows[n], 0)]
        block = jax.lax.dynamic_index_in_dim(slots, block_slots[n], keepdims=False)
        y = expert(rows, block, hidden_dtype(x), layout)
        y = jnp.where(block_rows[n, :, None] >= 0, y, 0.0)
        return jax.lax.dynamic_update_index_in_dim(out, y, n, axis=0)

    return jax.lax.fori_loop(0, count, step, out)
