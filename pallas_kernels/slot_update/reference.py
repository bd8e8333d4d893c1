"""`slot_update` in plain XLA: the oracle of the kernels, and what runs on CPU and older GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.slot_update.tables import Rule, SlotState, SlotTables, SlotUpdate

INT32_MAX = jnp.iinfo(jnp.int32).max


def slot_update_reference(
    tables: SlotTables,
    ids: Int[Array, " M"],
    first_key: Int[Array, ""],
    clock: Int[Array, ""],
    key_score: Int[Array, "2 keys"] | None,
    landed: Int[Array, " S"] | None,
    *,
    num_experts: int,
    rule: Rule,
) -> SlotUpdate:
    """See `slot_update`. Built so that XLA writes donated tables in place, without a copy of any."""
    num_slots = tables.state.shape[0]
    protected = jnp.zeros(num_slots, bool)
    if landed is not None:
        landed = jax.device_put(landed, jax.memory.Space.Device)  # it may lie in host memory
        tables = _land(tables, landed, clock, key_score, rule)
        # Released right here, before the misses, but protected from them: nobody sees the order.
        key, state = tables.key_of_slot, tables.state
        protected = (state == SlotState.COMPUTE) & (key >= first_key) & (key < first_key + num_experts)
        tables = tables._replace(state=jnp.where(protected, SlotState.USED, state))

    active = (ids >= 0) & (ids < num_experts)
    expert = jnp.where(active, ids, 0)
    key = first_key + expert
    slot = jax.lax.optimization_barrier(jnp.where(active, tables.slot_of_key[key], -1))
    first = active & _first_appearance(expert, active, num_experts)
    hit, miss = first & (slot >= 0), first & (slot < 0)

    hit_slot = jnp.where(hit, slot, num_slots)  # S: out of range, dropped
    protected = protected.at[hit_slot].set(True, mode="drop")
    if rule == "lru":
        tables = tables._replace(score=tables.score.at[hit_slot].set(clock, mode="drop"))
    elif rule == "lfu":
        tables = tables._replace(score=tables.score.at[hit_slot].add(1, mode="drop"))
    else:
        tables = tables._replace(
            score=tables.score.at[hit_slot].set(_newcomer_score(key, clock, key_score, rule), mode="drop")
        )

    num_misses = miss.sum(dtype=jnp.int32)
    nth = jnp.where(miss, jnp.cumsum(miss, dtype=jnp.int32) - 1, ids.shape[0])
    miss_expert = jnp.full_like(ids, -1).at[nth].set(expert, mode="drop")

    def allocate(i: Int[Array, ""], carry: tuple[SlotTables, Array, Array]) -> tuple[SlotTables, Array, Array]:
        # One pass over the slots per miss: there are few, and sorting 345 int32 takes XLA:CPU 80 us.
        tables, protected, miss_slot = carry
        new_key = first_key + miss_expert[i]
        score = _newcomer_score(new_key, clock, key_score, rule)
        tables, slot = _replace_one(tables, protected, new_key, score)
        given = jnp.where(slot < num_slots, slot, -1)
        return tables, protected.at[slot].set(True, mode="drop"), miss_slot.at[i].set(given)

    carry = (tables, protected, jnp.full_like(ids, -1))
    tables, _, miss_slot = jax.lax.fori_loop(0, num_misses, allocate, carry)

    slots_of_ids = jnp.where(active, tables.slot_of_key[key], -1)
    counts = jnp.stack([first.sum(dtype=jnp.int32), hit.sum(dtype=jnp.int32), num_misses])
    return SlotUpdate(tables, slots_of_ids, miss_expert, miss_slot, counts)


def _land(
    tables: SlotTables,
    landed: Int[Array, " S"],
    clock: Int[Array, ""],
    key_score: Int[Array, "2 keys"] | None,
    rule: Rule,
) -> SlotTables:
    """FETCH slots whose tag has come back: COMPUTE, or EMPTY where a load was faster or the task was given up."""
    num_keys, num_slots = tables.slot_of_key.shape[0], tables.state.shape[0]
    arrived = (tables.state == SlotState.FETCH) & (tables.tag > 0) & (jnp.abs(landed) == tables.tag)

    def land_one(_: Int[Array, ""], carry: tuple[SlotTables, Array]) -> tuple[SlotTables, Array]:
        tables, pending = carry
        slot = jnp.argmax(pending).astype(jnp.int32)
        key = _element(tables.key_of_slot, slot)
        late = (_element(tables.slot_of_key, key) >= 0) | (landed[slot] < 0)
        slot = jnp.where(key < -1, num_slots, slot)  # never; the writes below come after the reads above
        score = jnp.where(late, 0, _newcomer_score(key, clock, key_score, rule, used=False))
        tables = SlotTables(
            slot_of_key=tables.slot_of_key.at[jnp.where(late, num_keys, key)].set(slot, mode="drop"),
            key_of_slot=tables.key_of_slot.at[slot].set(jnp.where(late, -1, key), mode="drop"),
            state=tables.state.at[slot].set(jnp.where(late, SlotState.EMPTY, SlotState.COMPUTE), mode="drop"),
            tag=tables.tag.at[slot].set(0, mode="drop"),
            score=tables.score.at[slot].set(score, mode="drop"),
        )
        return tables, pending.at[slot].set(False, mode="drop")

    tables, _ = jax.lax.fori_loop(0, arrived.sum(dtype=jnp.int32), land_one, (tables, arrived))
    return tables


def _replace_one(
    tables: SlotTables, protected: Bool[Array, " S"], new_key: Int[Array, ""], new_score: Int[Array, ""]
) -> tuple[SlotTables, Int[Array, ""]]:
    """Give `new_key` the first EMPTY slot, else the USED one of lowest (score, index); slot S if there is none."""
    num_keys, num_slots = tables.slot_of_key.shape[0], tables.state.shape[0]
    empty = tables.state == SlotState.EMPTY
    used = (tables.state == SlotState.USED) & ~protected
    lowest = jnp.min(jnp.where(used, tables.score, INT32_MAX))
    candidate = jnp.where(jnp.any(empty), empty, used & (tables.score == lowest))
    slot = jnp.where(jnp.any(candidate), jnp.argmax(candidate).astype(jnp.int32), num_slots)
    old_key = _element(tables.key_of_slot, slot)
    slot = jnp.where(old_key < -1, num_slots, slot)  # never; the writes below come after the read above
    found = slot < num_slots
    slot_of_key = tables.slot_of_key.at[jnp.where(old_key >= 0, old_key, num_keys)].set(-1, mode="drop")
    tables = SlotTables(
        slot_of_key=slot_of_key.at[jnp.where(found, new_key, num_keys)].set(slot, mode="drop"),
        key_of_slot=tables.key_of_slot.at[slot].set(new_key, mode="drop"),
        state=tables.state.at[slot].set(SlotState.USED, mode="drop"),
        tag=tables.tag,
        score=tables.score.at[slot].set(new_score, mode="drop"),
    )
    return tables, slot


def _newcomer_score(
    key: Int[Array, "*N"],
    clock: Int[Array, ""],
    key_score: Int[Array, "2 keys"] | None,
    rule: Rule,
    used: bool = True,
) -> Int[Array, "*N"]:
    """Score of experts just become resident, `used` by the layer or not yet; whatever for keys out of range."""
    if rule == "scored":
        assert key_score is not None
        return key_score[int(used)].at[key].get(mode="clip")
    return jnp.broadcast_to(clock if rule == "lru" else jnp.int32(1), key.shape)


def _first_appearance(expert: Int[Array, " M"], active: Bool[Array, " M"], num_experts: int) -> Bool[Array, " M"]:
    """Whether an entry is the first of its expert."""
    position = jnp.arange(expert.shape[0], dtype=jnp.int32)
    earliest = jnp.full(num_experts, INT32_MAX, jnp.int32)
    earliest = earliest.at[jnp.where(active, expert, num_experts)].min(position, mode="drop")
    return earliest[expert] == position


def _element(table: Int[Array, " N"], index: Int[Array, ""]) -> Int[Array, ""]:
    """`table[index]`, -1 where out of range, of a table that is written next.

    As a reduction, because XLA would repeat a plain read next to each use, after the write too, and copy the table.
    """
    return jnp.max(jnp.where(jnp.arange(table.shape[0]) == index, table, -1))
