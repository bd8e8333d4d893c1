"""Sorting a prefill's routes into blocks of rows that share an expert, and summing the results back."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32


def num_blocks(tokens: int, per_token: int, *, num_experts: int, rows: int) -> int:
    """Most blocks that T * K routes can need: the full ones, and one started block per expert with any."""
    routes = tokens * per_token
    return math.ceil(routes / rows) + min(num_experts, routes)


def assign_blocks(
    ids: Int[Array, "T K"], *, num_experts: int, rows: int
) -> tuple[Int32[Array, " N"], Int32[Array, "N M"], Int32[Array, "T K"]]:
    """Blocks of M = `rows` routes of one expert each: in ascending order of experts, and of tokens within.

    Args:
      ids: experts of each token; -1 where there is none (a padding token).

    Returns:
      block_expert: expert of each block; -1 for the blocks at the end that are not needed. N is `num_blocks`.
      block_rows: token of each row; -1 for rows that pad a block.
      place: where a route went, flat in [N * M]; -1 where `ids` is.
    """
    tokens, per_token = ids.shape
    total = num_blocks(tokens, per_token, num_experts=num_experts, rows=rows)
    flat = ids.reshape(-1).astype(jnp.int32)
    # Absent routes sort behind all experts. The sort is stable, so that tokens stay in ascending order.
    key = jnp.where(flat >= 0, flat, num_experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    expert = key[order]
    counts = jnp.zeros((num_experts + 1,), jnp.int32).at[key].add(1)[:num_experts]
    ends = jnp.cumsum((counts + rows - 1) // rows)
    first_block = ends - (counts + rows - 1) // rows
    first_route = jnp.cumsum(counts) - counts
    # Clamped for the absent routes, whose result is not used.
    known = jnp.minimum(expert, num_experts - 1)
    rank = jnp.arange(flat.shape[0], dtype=jnp.int32) - first_route[known]
    sorted_place = jnp.where(expert < num_experts, first_block[known] * rows + rank, -1)
    place = jnp.zeros_like(flat).at[order].set(sorted_place)
    # Negative indices would wrap around: send absent routes beyond the end, where they are dropped.
    target = jnp.where(sorted_place >= 0, sorted_place, total * rows)
    block_rows = jnp.full((total * rows,), -1, jnp.int32).at[target].set(order // per_token, mode="drop")
    index = jnp.arange(total, dtype=jnp.int32)
    block_expert = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    block_expert = jnp.where(index < ends[-1], block_expert, -1)
    return block_expert, block_rows.reshape(total, rows), place.reshape(tokens, per_token)


def combine(
    out: Float32[Array, "N M H"], place: Int[Array, "T K"], weights: Float[Array, "T K"]
) -> Float32[Array, "T H"]:
    """Sum over a token's routes of weight times expert output, in ascending k; absent routes add nothing."""
    flat = out.reshape(-1, out.shape[-1])
    total = jnp.zeros((place.shape[0], out.shape[-1]), jnp.float32)
    for k in range(place.shape[1]):
        term = weights[:, k, None].astype(jnp.float32) * flat[jnp.maximum(place[:, k], 0)]
        total = total + jnp.where(place[:, k, None] >= 0, term, 0.0)
    return total


def active_first(block_slots: Int[Array, " N"]) -> tuple[Int32[Array, " N"], Int32[Array, ""]]:
    """Indices of the blocks to process, first and in ascending order, and how many they are."""
    active = block_slots >= 0
    return jnp.argsort(~active, stable=True).astype(jnp.int32), jnp.sum(active, dtype=jnp.int32)
