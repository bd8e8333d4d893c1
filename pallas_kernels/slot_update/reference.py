"""`slot_update` in plain XLA: the oracle of the kernels, and what runs on CPU and older GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.slot_update.tables import Rule, SlotState, SlotTables, SlotUpdate

INT32_MAX = jnp.iinfo(jnp.int32).max


def slot_update_reference(
    tables: SlotTables,
    ids: Int[Array, "M"],
    first_key: Int[Array, ""],
    clock: Int[Array, ""],
    key_score: Int[Array, "keys"] | None,
    landed: Int[Array, "S"] | None,
    *,
    num_experts: int,
    rule: Rule,
) -> SlotUpdate:
    """See `slot_update`. Tables are written by scatters only, so donated ones are updated in place."""
    num_keys, num_slots = tables.slot_of_key.shape[0], tables.state.shape[0]
    if landed is not None:
        tables = _land(tables, landed, clock, key_score, rule)
    slot_of_key, key_of_slot, state, tag, score = tables

    active = (ids >= 0) & (ids < num_experts)
    expert = jnp.where(active, ids, 0)
    key = first_key + expert
    slot = jnp.where(active, slot_of_key[key], -1)
    first = active & _first_appearance(expert, active, num_experts)
    hit, miss = first & (slot >= 0), first & (slot < 0)

    # Hits are protected, so that no miss of this call takes their slot.
    hit_slot = jnp.where(hit, slot, num_slots)
    state = state.at[hit_slot].set(SlotState.COMPUTE, mode="drop")
    if rule == "lru":
        score = score.at[hit_slot].set(clock, mode="drop")
    elif rule == "lfu":
        score = score.at[hit_slot].add(1, mode="drop")

    # Misses, compacted in order of first appearance; entries past the last are out of range and dropped.
    num_misses = miss.sum(dtype=jnp.int32)
    nth = jnp.where(miss, jnp.cumsum(miss, dtype=jnp.int32) - 1, ids.shape[0])
    miss_expert = jnp.full_like(ids, -1).at[nth].set(expert, mode="drop")
    miss_slot = _allocate(state, score, num_misses, ids.shape[0])

    given = jnp.where(miss_slot >= 0, miss_slot, num_slots)
    new_key = jnp.where(miss_slot >= 0, first_key + miss_expert, num_keys)
    old_key = jnp.where(miss_slot >= 0, key_of_slot[miss_slot], -1)
    slot_of_key = slot_of_key.at[jnp.where(old_key >= 0, old_key, num_keys)].set(-1, mode="drop")
    slot_of_key = slot_of_key.at[new_key].set(miss_slot, mode="drop")
    key_of_slot = key_of_slot.at[given].set(new_key, mode="drop")
    score = score.at[given].set(_newcomer_score(new_key, clock, key_score, rule), mode="drop")

    # The layer is about to run: all it owns becomes evictable for whatever comes after it on the stream.
    state = state.at[given].set(SlotState.USED, mode="drop")
    if landed is None:  # then only this call's hits can be COMPUTE
        state = state.at[hit_slot].set(SlotState.USED, mode="drop")
    else:
        own = (key_of_slot >= first_key) & (key_of_slot < first_key + num_experts)
        state = jnp.where(own & (state == SlotState.COMPUTE), SlotState.USED, state)

    slots_of_ids = jnp.where(active, slot_of_key[key], -1)
    counts = jnp.stack([first.sum(dtype=jnp.int32), hit.sum(dtype=jnp.int32), num_misses])
    tables = SlotTables(slot_of_key, key_of_slot, state, tag, score)
    return SlotUpdate(tables, slots_of_ids, miss_expert, miss_slot, counts)


def _land(
    tables: SlotTables,
    landed: Int[Array, "S"],
    clock: Int[Array, ""],
    key_score: Int[Array, "keys"] | None,
    rule: Rule,
) -> SlotTables:
    """FETCH slots whose tag has come back: COMPUTE, or EMPTY where an on-demand load was faster."""
    slot_of_key, key_of_slot, state, tag, score = tables
    num_keys, num_slots = slot_of_key.shape[0], state.shape[0]
    arrived = (state == SlotState.FETCH) & (tag > 0) & (landed == tag)
    late = arrived & (slot_of_key[key_of_slot] >= 0)
    fresh = arrived & ~late
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    return SlotTables(
        slot_of_key=slot_of_key.at[jnp.where(fresh, key_of_slot, num_keys)].set(slots, mode="drop"),
        key_of_slot=jnp.where(late, -1, key_of_slot),
        state=jnp.where(fresh, SlotState.COMPUTE, jnp.where(late, SlotState.EMPTY, state)),
        tag=jnp.where(arrived, 0, tag),
        score=jnp.where(fresh, _newcomer_score(key_of_slot, clock, key_score, rule), score),
    )


def _newcomer_score(
    key: Int[Array, "N"], clock: Int[Array, ""], key_score: Int[Array, "keys"] | None, rule: Rule
) -> Int[Array, "N"]:
    """Score of experts that have just become resident; whatever for keys out of range."""
    if rule == "scored":
        assert key_score is not None
        return key_score.at[key].get(mode="clip")
    return jnp.broadcast_to(clock if rule == "lru" else jnp.int32(1), key.shape)


def _first_appearance(expert: Int[Array, "M"], active: Bool[Array, "M"], num_experts: int) -> Bool[Array, "M"]:
    """Whether an entry is the first of its expert."""
    position = jnp.arange(expert.shape[0], dtype=jnp.int32)
    earliest = jnp.full(num_experts, INT32_MAX, jnp.int32)
    earliest = earliest.at[jnp.where(active, expert, num_experts)].min(position, mode="drop")
    return earliest[expert] == position


def _allocate(state: Int[Array, "S"], score: Int[Array, "S"], num: Int[Array, ""], size: int) -> Int[Array, "M"]:
    """Slots for `num` newcomers in turn: the first EMPTY one, else the lowest (score, index) among USED; else -1.

    One pass over the slots per newcomer: there are few, and sorting 345 int32 takes XLA:CPU 80 us.
    """

    def give(i: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, given = carry
        empty, used = state == SlotState.EMPTY, state == SlotState.USED
        lowest = jnp.min(jnp.where(used, score, INT32_MAX))
        candidate = jnp.where(jnp.any(empty), empty, used & (score == lowest))
        slot = jnp.argmax(candidate).astype(jnp.int32)
        # With no candidate, index S: dropped below.
        slot = jnp.where(candidate[slot], slot, state.shape[0])
        state = state.at[slot].set(SlotState.COMPUTE, mode="drop")
        return state, given.at[i].set(jnp.where(slot < state.shape[0], slot, -1))

    _, given = jax.lax.fori_loop(0, num, give, (state, jnp.full(size, -1, jnp.int32)))
    return given
