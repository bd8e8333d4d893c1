"""Slot tables outside the MoE layer: making them, reserving slots for prefetches, taking experts in (paper 7.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.slot_update import SlotState, SlotTables

__all__ = ["SlotState", "SlotTables", "admit", "check_invariants", "empty_tables", "reserve"]


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
    num_keys = tables.slot_of_key.shape[0]
    total = keys.shape[0]
    key = jnp.where((keys >= 0) & (keys < num_keys), keys, num_keys)  # num_keys: dropped by every scatter
    position = jnp.arange(total, dtype=jnp.int32)
    earliest = jnp.full(num_keys, total, jnp.int32).at[key].min(position, mode="drop")
    fetched = jnp.where(tables.state == SlotState.FETCH, tables.key_of_slot, num_keys)
    blocked = (tables.slot_of_key >= 0).at[fetched].set(True, mode="drop")
    wanted = (earliest.at[key].get(mode="fill", fill_value=-1) == position) & ~blocked.at[key].get(
        mode="fill", fill_value=True
    )
    free = (tables.state == SlotState.EMPTY) | (tables.state == SlotState.USED)
    slot = _victims(tables, wanted, newcomer_score, free, keep=keep)
    tables = _vacate(tables, slot)
    at = jnp.where(slot >= 0, slot, tables.state.shape[0])
    tables = tables._replace(
        key_of_slot=tables.key_of_slot.at[at].set(keys, mode="drop"),
        state=tables.state.at[at].set(SlotState.FETCH, mode="drop"),
        tag=tables.tag.at[at].set(tags, mode="drop"),
        score=tables.score.at[at].set(0, mode="drop"),
    )
    return tables, slot


def admit(
    tables: SlotTables, keys: Int[Array, " N"], scores: Int[Array, " N"], evictable: Bool[Array, " S"]
) -> tuple[SlotTables, Int[Array, " N"]]:
    """Give slots to experts that are in device memory already: EMPTY ones, then `evictable` ones worth less.

    Args:
        tables: as between two layers, with no task open.
        keys: distinct and not resident, in descending order of `scores`; -1 for none.
        scores: of the newcomers. A resident expert goes only for a strictly higher one.
        evictable: which USED slots may be given away.

    Returns:
        Tables that say the newcomers are resident, and the slot of each, -1 where it got none. The caller copies them.
    """
    free = (tables.state == SlotState.EMPTY) | ((tables.state == SlotState.USED) & evictable)
    slot = _victims(tables, keys >= 0, scores, free, keep=0)
    tables = _vacate(tables, slot)
    at = jnp.where(slot >= 0, slot, tables.state.shape[0])
    key = jnp.where(slot >= 0, keys, tables.slot_of_key.shape[0])
    tables = tables._replace(
        slot_of_key=tables.slot_of_key.at[key].set(slot, mode="drop"),
        key_of_slot=tables.key_of_slot.at[at].set(keys, mode="drop"),
        state=tables.state.at[at].set(SlotState.USED, mode="drop"),
        score=tables.score.at[at].set(scores, mode="drop"),
    )
    return tables, slot


def _victims(
    tables: SlotTables,
    wanted: Bool[Array, " N"],
    newcomer_score: Int[Array, " N"] | None,
    free: Bool[Array, " S"],
    *,
    keep: int,
) -> Int[Array, " N"]:
    """The slot that each wanted newcomer takes: EMPTY ones, then by (score, index), all but `keep` of the free ones."""
    order = jnp.where(free, tables.state, SlotState.COMPUTE)  # EMPTY < USED < the rest
    slots = jnp.arange(free.shape[0], dtype=jnp.int32)
    _, _, line = jax.lax.sort((order, tables.score, slots), num_keys=2, is_stable=True)
    nth = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    victim = line.at[nth].get(mode="clip")
    taken = wanted & (nth < free.sum(dtype=jnp.int32) - keep)
    if newcomer_score is not None:
        taken &= (tables.state[victim] == SlotState.EMPTY) | (tables.score[victim] < newcomer_score)
    return jnp.where(taken, victim, -1)


def _vacate(tables: SlotTables, slot: Int[Array, " N"]) -> SlotTables:
    """What was resident in these slots (-1: none) no longer is."""
    num_keys = tables.slot_of_key.shape[0]
    old = jnp.where(slot >= 0, tables.key_of_slot[slot], -1)
    gone = jnp.where(old >= 0, old, num_keys)
    return tables._replace(slot_of_key=tables.slot_of_key.at[gone].set(-1, mode="drop"))


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
