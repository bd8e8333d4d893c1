"""The simulated slot pool: one pool for all layers, the slot states of the paper (7.2), eviction by lowest value.

Compiled with numba; a pool is a named tuple of arrays that these functions change in place. A key is
layer * E + expert.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np

from pallas_kernels.slot_update.tables import SlotState
from seqmoe_jax.prefetch.compiled import compiled

# The engine's slot states, as the plain integers that numba compiles in.
EMPTY, USED, FETCH, COMPUTE = (
    int(state) for state in (SlotState.EMPTY, SlotState.USED, SlotState.FETCH, SlotState.COMPUTE)
)
NOWHERE = -1  # slot of a key that has none


class SimulatedPool(NamedTuple):
    """S slots and what is known of each of the L*E keys."""

    key: np.ndarray  # int64[S]
    state: np.ndarray  # int8[S]
    deadline: np.ndarray  # int64[S]  position until which a landed prefetch is protected
    untouched: np.ndarray  # bool[S]  a prefetch that nothing has used yet
    slot: np.ndarray  # int64[L*E]  slot of a key, also while its transfer is in flight; NOWHERE without one
    value: np.ndarray  # float64[L*E]  the resident of the lowest value is evicted
    locked: np.ndarray  # int64[L*E]  position at which a key was routed last: it may not leave at that position
    filled: np.ndarray  # int64[1]  no slot below this was EMPTY at the last look


def new_pool(slots: int, keys: int) -> SimulatedPool:
    return SimulatedPool(
        key=np.full(slots, -1, np.int64),
        state=np.full(slots, EMPTY, np.int8),
        deadline=np.zeros(slots, np.int64),
        untouched=np.zeros(slots, bool),
        slot=np.full(keys, NOWHERE, np.int64),
        value=np.zeros(keys, np.float64),
        locked=np.full(keys, -1, np.int64),
        filled=np.zeros(1, np.int64),
    )


@compiled
@no_type_check
def find_empty(pool):
    """The first EMPTY slot, or -1."""
    slots = pool.state.shape[0]
    at = pool.filled[0]
    while at < slots and pool.state[at] != EMPTY:
        at += 1
    pool.filled[0] = at
    return at if at < slots else -1


@compiled
@no_type_check
def find_victim(pool, position, state):
    """The slot in `state` of the lowest value whose expert does not run now, or -1."""
    best, lowest = -1, np.inf
    for s in range(pool.state.shape[0]):
        if pool.state[s] == state:
            k = pool.key[s]
            if pool.value[k] < lowest and pool.locked[k] != position:
                best, lowest = s, pool.value[k]
    return best


@compiled
@no_type_check
def vacate(pool, s):
    """Empties a slot. Returns 1 where a prefetch leaves that nothing used, else 0."""
    k = pool.key[s]
    wasted = 1 if pool.untouched[s] else 0
    if k >= 0:
        pool.slot[k] = NOWHERE
    pool.key[s] = -1
    pool.untouched[s] = False
    pool.state[s] = EMPTY
    pool.filled[0] = min(pool.filled[0], s)
    return wasted


@compiled
@no_type_check
def place(pool, s, k, state):
    """Gives an EMPTY slot to a key."""
    pool.key[s] = k
    pool.slot[k] = s
    pool.state[s] = state


@compiled
@no_type_check
def load(pool, counters, k, position):
    """Loads a missing expert into an EMPTY slot, else the USED one of the lowest value, else a landed prefetch."""
    s = find_empty(pool)
    if s < 0:
        s = find_victim(pool, position, USED)
        if s < 0:
            s = find_victim(pool, position, COMPUTE)
        counters.unused[0] += vacate(pool, s)
    place(pool, s, k, USED)
    counters.demanded[0] += 1


@compiled
@no_type_check
def release(pool, first_key, last_key, position):
    """Paper 7.2: just before a layer of keys [first_key, last_key) runs, its slots in COMPUTE become USED."""
    for k in range(first_key, last_key):
        s = pool.slot[k]
        if s != NOWHERE and pool.state[s] == COMPUTE and pool.deadline[s] <= position:
            pool.state[s] = USED
