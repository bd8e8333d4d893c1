"""A MoE layer over a prompt: experts in slots are used in place, streamed ones from where they arrive (paper 8.4).

Rows are sorted by expert into blocks, and every block is computed by whoever holds its expert. Which rows are
multiplied together depends on the routing alone, never on what was resident or how experts were grouped, so the result
is the same at every residency.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from pallas_kernels.grouped_moe import assign_blocks, grouped_moe
from pallas_kernels.miss_load import miss_load
from seqmoe_jax.experts.cache import CacheConfig, SlotCache, bring_in
from seqmoe_jax.experts.policy import PromptRule
from seqmoe_jax.experts.slots import SlotState, admit
from seqmoe_jax.forecast import forecaster, history
from seqmoe_jax.forecast.forecaster import Forecast


class Blocks(NamedTuple):
    """Where the routes of a layer's tokens went: see `assign_blocks`."""

    expert: Int32[Array, " N"]
    rows: Int32[Array, "N M"]
    place: Int32[Array, "T K"]


class Tally(NamedTuple):
    """What a prompt has routed so far."""

    counts: Int32[Array, " 3"]  # routed, hits, misses
    tokens_of: Int32[Array, "L E"]


def resident_experts(
    x: Float[Array, "T H"],
    ids: Int[Array, "T K"],
    sent: Bool[Array, " E"],
    cache: SlotCache,
    pool: Shaped[Array, "E n"],
    layer: Int[Array, ""],
    config: CacheConfig,
    rows: int,
) -> tuple[Float32[Array, "N M H"], Blocks, SlotCache, Int32[Array, " 3"]]:
    """The blocks of all experts but those `sent`: in slots, or loaded there on demand, in groups that fit the slots.

    Returns the outputs so far, the blocks, the cache, and the counts of all the layer's distinct experts. One that was
    sent is neither a hit nor a miss.
    """
    blocks = Blocks(*assign_blocks(ids, num_experts=config.experts, rows=rows))
    used = tokens_of_experts(ids, config.experts) > 0
    group = min(config.experts, config.slots)

    def run_group(index, carry):
        cache, out, counts = carry
        members = index * group + jnp.arange(group, dtype=jnp.int32)
        at = jnp.minimum(members, config.experts - 1)
        wanted = (members < config.experts) & used[at] & ~sent[at]
        cache, slots, new = bring_in(cache, pool, jnp.where(wanted, members, -1), layer, config)
        cache = cache._replace(clock=cache.clock + 1)
        offset = blocks.expert - index * group
        mine = (blocks.expert >= 0) & (offset >= 0) & (offset < group)
        block_slots = jnp.where(mine, slots[jnp.clip(offset, 0, group - 1)], -1)
        out = grouped_moe(
            out, x, cache.blocks, block_slots, blocks.rows, layout=config.layout, implementation=config.implementation
        )
        return cache, out, counts + new

    out = jnp.zeros((*blocks.rows.shape, x.shape[-1]), jnp.float32)
    counts = jnp.zeros(3, jnp.int32).at[0].set((used & sent).sum(dtype=jnp.int32))
    groups = -(-config.experts // group)
    # With one group there is no loop for XLA to carry the cache through.
    carry = (cache, out, counts)
    cache, out, counts = run_group(0, carry) if groups == 1 else lax.fori_loop(0, groups, run_group, carry)
    return out, blocks, cache, counts


def staged_experts(
    out: Float32[Array, "N M H"],
    x: Float[Array, "T H"],
    blocks: Blocks,
    staged: Shaped[Array, "G n"],
    experts: Int[Array, " G"],
    cache: SlotCache,
    tokens_of: Int[Array, " E"],
    layer: Int[Array, ""],
    config: CacheConfig,
) -> tuple[Float32[Array, "N M H"], SlotCache, Int32[Array, ""]]:
    """The blocks of `experts` (-1: none), which have arrived in `staged`; what is worth a slot is copied into one.

    A newcomer takes an EMPTY slot, else the one of least score among layers up to this one, if its own is higher: at
    the end of a prompt the slots hold what scored highest of all that came by, and the layers still to come find what
    they had. Also returns how many were taken in.
    """
    group = experts.shape[0]
    index = jnp.arange(group, dtype=jnp.int32)
    known = jnp.where(experts >= 0, experts, config.experts)
    where = jnp.full(config.experts, -1, jnp.int32).at[known].set(index, mode="drop")
    block_slots = jnp.where(blocks.expert >= 0, where[jnp.maximum(blocks.expert, 0)], -1)
    out = grouped_moe(
        out, x, staged, block_slots, blocks.rows, layout=config.layout, implementation=config.implementation
    )
    first_key = layer * config.experts
    used = (experts >= 0) & (tokens_of[jnp.maximum(experts, 0)] > 0)
    key = jnp.where(used, first_key + experts, -1)
    if config.rule == "scored":
        score = cache.key_score[1, jnp.maximum(key, 0)]
    else:  # as if it had just been loaded; the clock has gone on since
        score = jnp.full(group, 1, jnp.int32) if config.rule == "lfu" else jnp.broadcast_to(cache.clock - 1, (group,))
    _, _, order = lax.sort((~used, -score, index), num_keys=2, is_stable=True)
    passed = cache.tables.key_of_slot < first_key + config.experts
    tables, slot = admit(cache.tables, key[order], score[order], passed)
    nth = jnp.where(slot >= 0, jnp.cumsum(slot >= 0, dtype=jnp.int32) - 1, group)  # `miss_load` wants valid ones first
    source = jnp.full(group, -1, jnp.int32).at[nth].set(order, mode="drop")
    target = jnp.full(group, -1, jnp.int32).at[nth].set(slot, mode="drop")
    slots = miss_load(cache.blocks, staged, source, target, implementation=config.implementation)
    return out, cache._replace(blocks=slots, tables=tables), (slot >= 0).sum(dtype=jnp.int32)


def learn(
    cache: SlotCache,
    forecast: Forecast,
    tokens_of: Int[Array, " E"],
    tokens: Int[Array, ""],
    layer: Int[Array, ""],
    config: CacheConfig,
    rule: PromptRule,
) -> tuple[SlotCache, Forecast]:
    """What the policy's scores of a layer's experts make of a prompt of `tokens` tokens, before experts are moved."""
    start = layer * config.experts
    if rule == "none" or not config.managed:
        return cache, forecast
    if rule == "share":
        share = tokens_of.astype(jnp.float32) / jnp.maximum(tokens, 1).astype(jnp.float32)
        retention = lax.dynamic_slice_in_dim(forecast.retention, start, config.experts)
        new = forecaster.from_history(history.observe_prompt(retention, share))
        forecast = jax.tree.map(lambda old, part: lax.dynamic_update_slice_in_dim(old, part, start, 0), forecast, new)
        score = forecaster.worth(new)
    else:
        score = jnp.stack([tokens_of, tokens_of])
    key_score = lax.dynamic_update_slice_in_dim(cache.key_score, score, start, 1)
    key, state = cache.tables.key_of_slot, cache.tables.state
    mine = (state == SlotState.USED) & (key >= start) & (key < start + config.experts)
    slot_score = jnp.where(mine, key_score[1, jnp.maximum(key, 0)], cache.tables.score)
    return cache._replace(tables=cache.tables._replace(score=slot_score), key_score=key_score), forecast


def tokens_of_experts(ids: Int[Array, "T K"], experts: int) -> Int32[Array, " E"]:
    """How many tokens are routed to each expert."""
    return jnp.zeros(experts, jnp.int32).at[jnp.where(ids >= 0, ids, experts)].add(1, mode="drop")
