"""Slot tables outside the decode step: making them, closing tasks, checking them (paper 7.2)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from pallas_kernels.slot_update import SlotState, SlotTables

__all__ = ["SlotState", "SlotTables", "check_invariants", "empty_tables", "open_slots", "settle"]


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


def open_slots(tables: SlotTables, tasks: int) -> Int32[Array, " N"]:
    """Slots of open tasks, landed or not, then -1: all that are FETCH or COMPUTE, if they are `tasks` at most."""
    is_open = (tables.state == SlotState.FETCH) | (tables.state == SlotState.COMPUTE)
    return jnp.nonzero(is_open, size=tasks, fill_value=-1)[0].astype(jnp.int32)


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
