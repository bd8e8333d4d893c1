"""Slot tables outside the decode step: making them, closing tasks, taking experts in, checking them (paper 7.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.slot_update import SlotState, SlotTables

__all__ = ["SlotState", "SlotTables", "admit", "check_invariants", "empty_tables", "open_slots", "settle"]


def empty_tables(num_keys: int, num_slots: int) -> SlotTables:
    """Tables of a cache that holds nothing. Five buffers of their own, so that all can be donated."""
    return SlotTables(
        slot_of_key=jnp.full(num_keys, -1, jnp.int32),
        key_of_slot=jnp.full(num_slots, -1, jnp.int32),
        state=jnp.full(num_slots, SlotState.EMPTY, jnp.int32),
        tag=jnp.zeros(num_slots, jnp.int32),
        score=jnp.zeros(num_slots, jnp.int32),
    )


def settle(tables: SlotTables) -> SlotTables:
    """Closes all tasks and releases what waits: FETCH becomes EMPTY, COMPUTE USED. No transfer may be under way."""
    fetch, waits = tables.state == SlotState.FETCH, tables.state == SlotState.COMPUTE
    state = jnp.where(fetch, SlotState.EMPTY, jnp.where(waits, SlotState.USED, tables.state)).astype(jnp.int32)
    return tables._replace(
        state=state,
        key_of_slot=jnp.where(fetch, -1, tables.key_of_slot),
        tag=jnp.zeros_like(tables.tag),
    )


settle_jit = jax.jit(settle, donate_argnums=0)


def open_slots(tables: SlotTables, tasks: int) -> Int32[Array, " N"]:
    """Slots of open tasks, landed or not, then -1: all that are FETCH or COMPUTE, if they are `tasks` at most."""
    is_open = (tables.state == SlotState.FETCH) | (tables.state == SlotState.COMPUTE)
    return jnp.nonzero(is_open, size=tasks, fill_value=-1)[0].astype(jnp.int32)


def admit(
    tables: SlotTables, keys: Int[Array, " N"], scores: Int[Array, " N"], evictable: Bool[Array, " S"]
) -> tuple[SlotTables, Int32[Array, " N"]]:
    """Give slots to experts that are in device memory already: EMPTY ones, then `evictable` ones worth less.

    Args:
        tables: as between two layers, with no task open.
        keys: distinct and not resident, in descending order of `scores`; -1 for none.
        scores: of the newcomers. A resident expert goes only for a strictly higher one; the j-th newcomer is weighed
            against the j-th in line of eviction.
        evictable: which USED slots may be given away.

    Returns:
        Tables that say the newcomers are resident, and the slot of each, -1 where it got none. The caller copies them.
    """
    slot_of_key, key_of_slot, state, tag, score = tables
    num_keys, num_slots = slot_of_key.shape[0], state.shape[0]
    free = (state == SlotState.EMPTY) | ((state == SlotState.USED) & evictable)
    order = jnp.where(free, state, SlotState.COMPUTE)  # EMPTY < USED < the rest
    _, _, line = jax.lax.sort((order, score, jnp.arange(num_slots, dtype=jnp.int32)), num_keys=2, is_stable=True)
    wanted = keys >= 0
    nth = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    victim = line.at[nth].get(mode="clip")
    taken = wanted & (nth < free.sum(dtype=jnp.int32))
    taken &= (state[victim] == SlotState.EMPTY) | (score[victim] < scores)
    old = jnp.where(taken, key_of_slot[victim], -1)
    slot = jnp.where(taken, victim, num_slots)
    slot_of_key = slot_of_key.at[jnp.where(old >= 0, old, num_keys)].set(-1, mode="drop")
    tables = SlotTables(
        slot_of_key=slot_of_key.at[jnp.where(taken, keys, num_keys)].set(victim, mode="drop"),
        key_of_slot=key_of_slot.at[slot].set(keys, mode="drop"),
        state=state.at[slot].set(SlotState.USED, mode="drop"),
        tag=tag,
        score=score.at[slot].set(scores, mode="drop"),
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
