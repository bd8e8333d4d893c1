"""A MoE layer over a prompt: missing experts are loaded into slots, and all are computed where they lie (paper 8.4).

Rows are sorted by expert into blocks, and experts are taken in groups that fit the slots. Which rows are multiplied
together depends on the routing alone, never on what was resident or how experts were grouped, so the result is the
same at every residency.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from pallas_kernels.grouped_moe import assign_blocks, grouped_moe
from seqmoe_jax.experts.cache import CacheConfig, SlotCache, bring_in
from seqmoe_jax.experts.policy import PromptRule
from seqmoe_jax.experts.slots import SlotState
from seqmoe_jax.forecast import forecaster, history
from seqmoe_jax.forecast.forecaster import Forecast


class ExpertCounts(NamedTuple):
    """How the prompts that are being read have used experts so far."""

    totals: Int32[Array, " 3"]  # distinct experts routed, found resident, loaded; summed over layers and passes
    tokens_per_expert: Int32[Array, "L E"]


# Rows of a block of tokens that share an expert: enough to feed matrix units, few enough to waste little. The same for
# all prompts, since a product of other rows may round otherwise: a token must not depend on how a prompt is cut.
ROWS_PER_BLOCK = 64


def count_tokens(ids: Int[Array, "T K"], experts: int) -> Int32[Array, " E"]:
    """Counts the tokens that are routed to each expert. Padding has ids of -1."""
    return jnp.zeros(experts, jnp.int32).at[jnp.where(ids >= 0, ids, experts)].add(1, mode="drop")


def moe_prefill(
    x: Float[Array, "T H"],
    ids: Int[Array, "T K"],
    cache: SlotCache,
    pool: Shaped[Array, "E n"],
    moe_index: Int[Array, ""],
    config: CacheConfig,
) -> tuple[Float32[Array, "N M H"], Int32[Array, "T K"], SlotCache, Int32[Array, " 3"]]:
    """Runs the experts of one layer over all tokens of a pass.

    Returns the experts' outputs in blocks of rows, the row of every route in them (flat; -1 for padding), the cache,
    and the counts of distinct experts (routed, hits, misses).
    """
    block_expert, block_rows, place = assign_blocks(ids, num_experts=config.experts, rows=ROWS_PER_BLOCK)
    used = count_tokens(ids, config.experts) > 0
    group = min(config.experts, config.slots)

    def run_group(index: Int[Array, ""] | int, carry: tuple[SlotCache, Array, Array]) -> tuple[SlotCache, Array, Array]:
        cache, out, counts = carry
        members = index * group + jnp.arange(group, dtype=jnp.int32)
        wanted = (members < config.experts) & used[jnp.minimum(members, config.experts - 1)]
        cache, slots, new = bring_in(cache, pool, jnp.where(wanted, members, -1), moe_index, config)
        cache = cache._replace(clock=cache.clock + 1)
        offset = block_expert - index * group
        in_group = (block_expert >= 0) & (offset >= 0) & (offset < group)
        block_slots = jnp.where(in_group, slots[jnp.clip(offset, 0, group - 1)], -1)
        out = grouped_moe(
            out, x, cache.blocks, block_slots, block_rows, layout=config.layout, implementation=config.implementation
        )
        return cache, out, counts + new

    groups = -(-config.experts // group)
    carry = cache, jnp.zeros((*block_rows.shape, x.shape[-1]), jnp.float32), jnp.zeros(3, jnp.int32)
    # With one group there is no loop for XLA to carry the cache through.
    cache, out, counts = run_group(0, carry) if groups == 1 else lax.fori_loop(0, groups, run_group, carry)
    return out, place, cache, counts


def observe_prompt(
    cache: SlotCache,
    forecast: Forecast,
    tokens_per_expert: Int[Array, " E"],
    tokens: Int[Array, ""],
    moe_index: Int[Array, ""],
    config: CacheConfig,
    rule: PromptRule,
) -> tuple[SlotCache, Forecast]:
    """Lets a prompt's use of a layer's experts enter their scores, before any of them is moved.

    `tokens_per_expert`: how many of the `tokens` read so far used each expert.
    """
    first_key = moe_index * config.experts
    if rule == "none" or not config.managed:
        return cache, forecast
    if rule == "share":
        share = tokens_per_expert.astype(jnp.float32) / jnp.maximum(tokens, 1).astype(jnp.float32)
        retention = lax.dynamic_slice_in_dim(forecast.retention, first_key, config.experts)
        new = forecaster.from_history(history.observe_prompt(retention, share))
        forecast = jax.tree.map(
            lambda old, part: lax.dynamic_update_slice_in_dim(old, part, first_key, 0), forecast, new
        )
        score = forecaster.worth(new)
    else:
        score = jnp.stack([tokens_per_expert, tokens_per_expert])
    key_score = lax.dynamic_update_slice_in_dim(cache.key_score, score, first_key, 1)
    key, state = cache.tables.key_of_slot, cache.tables.state
    of_layer = (state == SlotState.USED) & (key >= first_key) & (key < first_key + config.experts)
    slot_score = jnp.where(of_layer, key_score[1, jnp.maximum(key, 0)], cache.tables.score)
    return cache._replace(tables=cache.tables._replace(score=slot_score), key_score=key_score), forecast
