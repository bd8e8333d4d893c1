"""The slot cache on the device: expert blocks, the tables that say what lies where, and how a layer uses them.

Slots are shared by all layers (paper 8.1): a key = MoE layer * E + expert sits in any slot, and a lookup table maps
it there, so fused kernels see one array at one address. Everything here is traceable and in place under donation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from pallas_kernels.backend import Implementation
from pallas_kernels.fused_moe import fused_moe, moe_on_demand
from pallas_kernels.layout import ExpertLayout
from pallas_kernels.miss_load import miss_load
from pallas_kernels.plan_tasks.reference import rescored
from pallas_kernels.slot_update import Rule, SlotTables, slot_update
from seqmoe_jax.experts.slots import empty_tables, settle

PINNED = 2**30  # the score of a key that its policy keeps whatever happens; below every int32 clock's end
ROUTED, HITS, MISSES = range(3)  # fields of the counts: distinct experts of a layer, found resident, loaded


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What the compiled programs know of the cache. Hashable: a static argument."""

    layout: ExpertLayout
    layers: int  # L: MoE layers
    experts: int  # E: experts of each
    slots: int  # S
    rule: Rule
    managed: bool  # False: every expert has its own slot (slot = key) and the tables are never touched
    implementation: Implementation
    tasks: int = 0  # N: most prefetch tasks that may be open


class Landings(NamedTuple):
    """What a transfer engine tells the step: see `slot_update`."""

    landed: Int32[Array, " S"]
    progress: Int32[Array, " P"] | None  # None: the engine does not follow the running step


class SlotCache(NamedTuple):
    """Device state of the cache; donated to every program that changes it."""

    blocks: Shaped[Array, "S n"]
    tables: SlotTables
    key_score: Int32[Array, "2 keys"]  # under rule `scored`: of a key before and after its layer has run in this step
    clock: Int32[Array, ""]  # layers executed so far: the time of rule `lru`
    open_slots: Int32[Array, " N"]  # of tasks that were open when last planned, then -1: all that are FETCH or COMPUTE


def empty_cache(config: CacheConfig) -> SlotCache:
    """No expert resident; or, for an unmanaged cache, tables that say slot = key (blocks still to be filled)."""
    keys = config.layers * config.experts
    tables = empty_tables(keys, config.slots)
    return SlotCache(
        blocks=jnp.zeros((config.slots, config.layout.block_elems), config.layout.storage),
        tables=tables,
        key_score=jnp.zeros((2, keys), jnp.int32),
        clock=jnp.zeros((), jnp.int32),
        open_slots=jnp.full(config.tasks, -1, jnp.int32),
    )


class Misses(NamedTuple):
    """What is to be loaded: valid entries first, then -1."""

    experts: Int32[Array, " M"]
    slots: Int32[Array, " M"]


def find_slots(
    cache: SlotCache,
    ids: Int[Array, " M"],
    layer: Int[Array, ""],
    config: CacheConfig,
    transfers: Landings | None = None,
    elapsed: Int[Array, ""] | int = 0,
) -> tuple[SlotCache, Int[Array, " M"], Misses | None, Int32[Array, " 3"]]:
    """Gives every one of the experts `ids` of a MoE layer a slot (-1: none): steps 1 and 2 of Figure 5.

    The time is the cache's clock, which this leaves as it is, plus `elapsed` layers.
    Returns the cache, the slot of every id, which experts are to be loaded into theirs (None: the cache is not
    managed, all are there), and the counts (routed, hits, misses) of distinct experts.
    """
    first_key = jnp.asarray(layer, jnp.int32) * config.experts
    if not config.managed:
        routed = _count_distinct(ids, config.experts)
        slots = jnp.where(ids >= 0, first_key + ids, -1)
        return cache, slots, None, jnp.stack([routed, routed, jnp.zeros_like(routed)])
    with jax.named_scope("slot_update"):
        tables, slots, miss_expert, miss_slot, counts = slot_update(
            cache.tables,
            ids,
            first_key=first_key,
            num_experts=config.experts,
            rule=config.rule,
            clock=cache.clock,
            elapsed=elapsed,
            key_score=cache.key_score if config.rule == "scored" else None,
            landed=None if transfers is None else transfers.landed,
            open_slots=None if transfers is None else cache.open_slots,
            progress=None if transfers is None else transfers.progress,
            implementation=config.implementation,
        )
    return cache._replace(tables=tables), slots, Misses(miss_expert, miss_slot), counts


def bring_in(
    cache: SlotCache,
    pool: Shaped[Array, "E n"],
    ids: Int[Array, " M"],
    layer: Int[Array, ""],
    config: CacheConfig,
) -> tuple[SlotCache, Int[Array, " M"], Int32[Array, " 3"]]:
    """`find_slots`, and step 3: the experts that are missing are loaded."""
    cache, slots, misses, counts = find_slots(cache, ids, layer, config)
    if misses is not None:
        with jax.named_scope("miss_load"):
            blocks = miss_load(cache.blocks, pool, *misses, implementation=config.implementation)
        cache = cache._replace(blocks=blocks)
    return cache, slots, counts


def _count_distinct(ids: Int[Array, " M"], experts: int) -> Int32[Array, ""]:
    present = jnp.zeros(experts, bool).at[jnp.where(ids >= 0, ids, experts)].set(True, mode="drop")
    return present.sum(dtype=jnp.int32)


def all_hits(ids: Int[Array, "L B K"], config: CacheConfig) -> Int32[Array, " 3"]:
    """The counts of a step of an unmanaged cache: what `find_slots` says, for all layers together."""
    experts = jnp.arange(config.experts, dtype=jnp.int32)
    routed = (ids.reshape(ids.shape[0], -1, 1) == experts).any(axis=1).sum(dtype=jnp.int32)
    return jnp.stack([routed, routed, jnp.zeros_like(routed)])


def moe_decode(
    x: Float[Array, "B H"],
    ids: Int[Array, "B K"],
    weights: Float32[Array, "B K"],
    cache: SlotCache,
    pool: Shaped[Array, "E n"],
    layer: Int[Array, ""],
    config: CacheConfig,
    transfers: Landings | None = None,
) -> tuple[Float32[Array, "B H"], SlotCache, Int32[Array, " 3"]]:
    """One MoE layer of a decode step, in which the clock stands still: a step sets it forward at its end."""
    cache, slots, misses, counts = find_slots(cache, ids.reshape(-1), layer, config, transfers, elapsed=layer)
    slots, blocks = slots.reshape(ids.shape), cache.blocks
    if misses is None:  # an expert's slot is its key
        y = fused_moe(
            x, blocks, ids, weights, layout=config.layout, first_slot=layer * config.experts,
            implementation=config.implementation,
        )  # fmt: skip
    else:
        blocks, y = moe_on_demand(
            x, blocks, slots, weights, pool, *misses, layout=config.layout, implementation=config.implementation
        )
        cache = cache._replace(blocks=blocks)
    return y, cache, counts


@jax.named_scope("rescore")
def rescore(cache: SlotCache, key_score: Int32[Array, "2 keys"], first_key: int = 0) -> SlotCache:
    """New scores for every key from `first_key` on, resident or not, whose layers are still to come (rule `scored`)."""
    return cache._replace(tables=rescored(cache.tables, key_score[0], first_key), key_score=key_score)


def settled(cache: SlotCache) -> SlotCache:
    """The cache with all tasks closed (`slots.settle`)."""
    return cache._replace(tables=settle(cache.tables), open_slots=jnp.full_like(cache.open_slots, -1))


def keep(
    cache: SlotCache,
    pool: Shaped[Array, "E n"],
    wanted: Bool[Array, " E"],
    layer: Int[Array, ""],
    config: CacheConfig,
) -> SlotCache:
    """Makes the `wanted` experts of a MoE layer resident. The caller has pinned them by `rescore` first."""
    ids = jnp.where(wanted, jnp.arange(config.experts, dtype=jnp.int32), -1)
    if config.managed:
        return bring_in(cache, pool, ids, layer, config)[0]
    slots = jnp.where(wanted, layer * config.experts + ids, -1)
    return cache._replace(blocks=miss_load(cache.blocks, pool, ids, slots, implementation=config.implementation))
