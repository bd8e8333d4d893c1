"""`plan_tasks` in plain XLA: the definition, and what runs where there is no kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.plan_tasks.config import CONFIDENCE_UNIT, LAST_TAG, PlanConfig, Planned
from pallas_kernels.slot_update.tables import SlotState, SlotTables


def plan_tasks_reference(
    tables: SlotTables,
    open_slots: Int[Array, " N"],
    chance: Float32[Array, " keys"],
    key_score: Int32[Array, "2 keys"],
    base: Int32[Array, ""],
    next_tag: Int32[Array, ""],
    transfer_cost: Float32[Array, ""],
    *,
    first_layer: int,
    config: PlanConfig,
) -> Planned:
    """See `plan_tasks`."""
    keys = config.layers * config.experts
    tables = rescored(tables, key_score[0], first_layer * config.experts)
    there, waits, key, tag = _open_tasks(tables, open_slots)
    was_resident = (tables.slot_of_key[jnp.maximum(key, 0)] >= 0) & there

    layer = jnp.arange(keys, dtype=jnp.int32) // config.experts
    saving = saved(chance, layer, transfer_cost, first_layer)
    wanted = (tables.slot_of_key < 0) & (layer >= first_layer) & (chance >= config.threshold)
    wanted = wanted.at[jnp.where(there, key, keys)].set(False, mode="drop")
    count = min(config.tasks, keys)
    best, candidate = lax.top_k(jnp.where(wanted, saving, 0.0), count)
    room = config.tasks - (there | waits).sum(dtype=jnp.int32)
    candidate = jnp.where((best > 0) & (jnp.arange(count) < room), candidate, -1)
    tags = (next_tag + jnp.arange(count, dtype=jnp.int32)) % LAST_TAG + 1
    tables, slot = reserve(tables, candidate, tags, key_score[0][jnp.maximum(candidate, 0)], keep=config.keep)

    # The new tasks take the free places of the list, in order.
    open_ = jnp.where(there | waits, open_slots, -1).astype(jnp.int32)
    (free,) = jnp.nonzero(open_ < 0, size=config.tasks, fill_value=config.tasks)
    nth = jnp.cumsum(slot >= 0, dtype=jnp.int32) - 1
    place = jnp.where(slot >= 0, free[jnp.maximum(nth, 0)], config.tasks)
    open_ = open_.at[place].set(slot, mode="drop")
    key = key.at[place].set(candidate, mode="drop")
    tag = tag.at[place].set(tags, mode="drop")
    there = there.at[place].set(True, mode="drop")

    at = jnp.maximum(key, 0)
    told = jnp.where(there, chance[at], 0.0)
    confidence = jnp.where(was_resident, 0, (told * CONFIDENCE_UNIT).astype(jnp.int32))
    passed = (layer[at] < first_layer).astype(jnp.int32)  # its layer comes again in the step after
    deadline = base + layer[at] + passed * config.layers
    return Planned(tables, (next_tag + count) % LAST_TAG, jnp.stack([key, confidence, deadline, open_, tag]))


def saved(
    chance: Float32[Array, " N"], layer: Int[Array, " N"], transfer_cost: Float32[Array, ""], first_layer: int
) -> Float32[Array, " N"]:
    """What a transfer of each expert would save, as a share of one: its chance, times the share of the transfer that
    fits before its layer runs."""
    return chance * jnp.minimum(1.0, (layer - first_layer + 1).astype(jnp.float32) / transfer_cost)


def _open_tasks(tables: SlotTables, open_slots: Int[Array, " N"]) -> tuple[Array, Array, Array, Array]:
    """Which tasks are under way, which have landed and wait, the keys of the former (-1), and their tags (0)."""
    at = jnp.maximum(open_slots, 0)
    there = (open_slots >= 0) & (tables.state[at] == SlotState.FETCH)
    waits = (open_slots >= 0) & (tables.state[at] == SlotState.COMPUTE)
    return there, waits, jnp.where(there, tables.key_of_slot[at], -1), jnp.where(there, tables.tag[at], 0)


def rescored(tables: SlotTables, score: Int32[Array, " keys"], first_key: int = 0) -> SlotTables:
    """Tables in which every resident expert from `first_key` on has a new score."""
    key = tables.key_of_slot
    resident = (tables.state == SlotState.USED) | (tables.state == SlotState.COMPUTE)
    new = jnp.where(resident & (key >= first_key), score[jnp.maximum(key, 0)], tables.score)
    return tables._replace(score=new)


def reserve(
    tables: SlotTables,
    keys: Int[Array, " N"],
    tags: Int[Array, " N"],
    newcomer_score: Int[Array, " N"] | None,
    *,
    keep: int,
) -> tuple[SlotTables, Int[Array, " N"]]:
    """Reserve slots for new prefetch tasks: EMPTY ones, then USED ones by (score, index), become FETCH.

    Args:
        tables: as between two layers.
        keys: what to fetch, most wanted first; -1 for no task. Keys that are resident, in FETCH already, or seen
            earlier in the list get nothing.
        tags: > 0, and different from any tag that a transfer into the same slot may still report.
        newcomer_score: if given, a resident expert is evicted only for a strictly higher score. The j-th task that
            wants a slot is weighed against the j-th in line of eviction (for scores in descending order, this is
            the same as deciding one after another).
        keep: at least so many slots stay neither FETCH nor COMPUTE, for misses. One layer's misses take up to
            min(E, K*B) slots and its hits protect others, so keep no fewer than that.

    Returns:
        Tables, and the slot of each task, -1 where it got none.
    """
    slot_of_key, key_of_slot, state, tag, score = tables
    num_keys, num_slots = slot_of_key.shape[0], state.shape[0]
    total = keys.shape[0]

    key = jnp.where((keys >= 0) & (keys < num_keys), keys, num_keys)  # num_keys: dropped by every scatter
    position = jnp.arange(total, dtype=jnp.int32)
    earliest = jnp.full(num_keys, total, jnp.int32).at[key].min(position, mode="drop")
    fetched = jnp.where(state == SlotState.FETCH, key_of_slot, num_keys)
    blocked = (slot_of_key >= 0).at[fetched].set(True, mode="drop")
    wanted = (earliest.at[key].get(mode="fill", fill_value=-1) == position) & ~blocked.at[key].get(
        mode="fill", fill_value=True
    )

    free = (state == SlotState.EMPTY) | (state == SlotState.USED)
    order = jnp.where(free, state, SlotState.COMPUTE)  # EMPTY < USED < the rest
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    _, _, line = jax.lax.sort((order, score, slots), num_keys=2, is_stable=True)
    nth = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    victim = line.at[nth].get(mode="clip")
    taken = wanted & (nth < free.sum(dtype=jnp.int32) - keep)
    if newcomer_score is not None:
        taken &= (state[victim] == SlotState.EMPTY) | (score[victim] < newcomer_score)

    old = jnp.where(taken, key_of_slot[victim], -1)
    slot = jnp.where(taken, victim, num_slots)
    tables = SlotTables(
        slot_of_key=slot_of_key.at[jnp.where(old >= 0, old, num_keys)].set(-1, mode="drop"),
        key_of_slot=key_of_slot.at[slot].set(keys, mode="drop"),
        state=state.at[slot].set(SlotState.FETCH, mode="drop"),
        tag=tag.at[slot].set(tags, mode="drop"),
        score=score.at[slot].set(0, mode="drop"),
    )
    return tables, jnp.where(taken, victim, -1)
