"""Slot tables outside the MoE layer: making them, reserving slots for prefetches, giving them back (paper 7.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.slot_update import SlotState, SlotTables

__all__ = ["SlotState", "SlotTables", "check_invariants", "empty_tables", "reserve"]


def empty_tables(num_keys: int, num_slots: int) -> SlotTables:
    """Tables of a cache that holds nothing. Five buffers of their own, so that all can be donated."""
    return SlotTables(
        slot_of_key=jnp.full(num_keys, -1, jnp.int32),
        key_of_slot=jnp.full(num_slots, -1, jnp.int32),
        state=jnp.full(num_slots, SlotState.EMPTY, jnp.int32),
        tag=jnp.zeros(num_slots, jnp.int32),
        score=jnp.zeros(num_slots, jnp.int32),
    )


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


def check_invariants(tables: SlotTables) -> None:
    """Raise `AssertionError` where the tables contradict each other. Reads them back to the host: for tests."""
    slot_of_key, key_of_slot, state, tag, score = (np.asarray(table) for table in tables)
    resident = np.isin(state, [SlotState.USED, SlotState.COMPUTE])
    empty, fetch = state == SlotState.EMPTY, state == SlotState.FETCH
    assert np.all(resident | empty | fetch), f"unknown states: {state}"
    slots = np.flatnonzero(resident)
    assert np.all(key_of_slot[slots] >= 0), "resident slots without a key"
    assert np.array_equal(slot_of_key[key_of_slot[slots]], slots), "a resident slot is not the slot of its key"
    keys = np.flatnonzero(slot_of_key >= 0)
    assert np.array_equal(np.sort(key_of_slot[slots]), keys), "keys point at slots that do not hold them"
    assert np.all(key_of_slot[empty] == -1), "an EMPTY slot has a key"
    assert np.all(key_of_slot[fetch] >= 0), "a FETCH slot has no key"
    assert np.unique(key_of_slot[fetch]).size == fetch.sum(), "two FETCH slots wait for the same key"
    assert np.all((tag > 0) == fetch), "exactly the FETCH slots wait for a tag"
    assert np.all(score[empty | fetch] == 0), "a slot without a resident expert has a score"
