"""Decode MoE in plain XLA: the oracle of the kernels, and what runs on CPUs and on GPUs before Ampere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe.swiglu import hidden_dtype, swiglu, unpack_weight
from pallas_kernels.layout import ExpertLayout


def combine_routes(
    y: Float32[Array, "B K H"], slot_ids: Int[Array, "B K"], weights: Float[Array, "B K"]
) -> Float32[Array, "B H"]:
    """Sum of `weights * y` over active routes, in ascending k; what inactive routes hold is never used."""
    out = jnp.zeros((y.shape[0], y.shape[2]), jnp.float32)
    for k in range(y.shape[1]):
        term = weights[:, k, None].astype(jnp.float32) * y[:, k]
        out = out + jnp.where(slot_ids[:, k, None] >= 0, term, 0.0)
    return out


def fused_moe(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    *,
    layout: ExpertLayout,
) -> Float32[Array, "B H"]:
    def route(x: Float[Array, " H"], slot: Int[Array, ""]) -> Float32[Array, " H"]:
        block = slots[jnp.maximum(slot, 0)]
        matvec = lambda name, v: jnp.einsum(  # noqa: E731
            "rc,c->r", unpack_weight(block, layout, name), v, precision=jax.lax.Precision.HIGHEST
        )
        wide = x.astype(jnp.float32)
        h = swiglu(matvec("gate", wide), matvec("up", wide)).astype(hidden_dtype(x))
        return matvec("down", h.astype(jnp.float32))

    y = jax.vmap(jax.vmap(route, in_axes=(None, 0)))(x, slot_ids)
    return combine_routes(y, slot_ids, weights)
