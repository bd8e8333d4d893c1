"""Decode MoE in plain XLA: the oracle of the kernels, and what runs on CPUs and on GPUs before Ampere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.fused_moe.swiglu import activate, hidden_dtype, unpack_weight
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


def expert(
    rows: Float[Array, "M H"], block: Shaped[Array, " n"], hidden: jnp.dtype, layout: ExpertLayout
) -> Float32[Array, "M H"]:
    """`down @ activation(gate @ x, up @ x)` for every row x, biases added, hidden values rounded to dtype `hidden`."""

    def product(name: str, rows: Float[Array, "M cols"]) -> Float32[Array, "M rows"]:
        weight = unpack_weight(block, layout, name)
        y = jnp.einsum("mc,rc->mr", rows.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
        return y + layout.unpack(block, f"{name}_bias").astype(jnp.float32) if layout.biased else y

    return product("down", activate(product("gate", rows), product("up", rows), layout.activation).astype(hidden))


def fused_moe(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    *,
    layout: ExpertLayout,
) -> Float32[Array, "B H"]:
    batch, per_token = slot_ids.shape
    safe = jnp.maximum(slot_ids, 0).reshape(-1)
    hidden = hidden_dtype(x)

    def one_by_one(x: Float[Array, "B H"], slots: Shaped[Array, "S n"], ids: Int[Array, " R"]) -> Float32[Array, "R H"]:
        def step(i: Int[Array, ""], y: Float32[Array, "R H"]) -> Float32[Array, "R H"]:
            row = jax.lax.dynamic_slice_in_dim(x, i // per_token, 1)
            value = expert(row, jax.lax.dynamic_index_in_dim(slots, ids[i], keepdims=False), hidden, layout)
            return jax.lax.dynamic_update_slice_in_dim(y, value, i, axis=0)

        return jax.lax.fori_loop(0, ids.shape[0], step, jnp.zeros((ids.shape[0], x.shape[1]), jnp.float32))

    def all_at_once(
        x: Float[Array, "B H"], slots: Shaped[Array, "S n"], ids: Int[Array, " R"]
    ) -> Float32[Array, "R H"]:
        rows = jnp.repeat(x, per_token, axis=0)[:, None]
        return jax.vmap(lambda row, slot: expert(row, slots[slot], hidden, layout))(rows, ids)[:, 0]

    # GPUs fuse the gather of experts into the products; CPUs copy, and multiply batches of matrices slowly.
    y = jax.lax.platform_dependent(x, slots, safe, cpu=one_by_one, default=all_at_once)
    return combine_routes(y.reshape(batch, per_token, -1), slot_ids, weights)
