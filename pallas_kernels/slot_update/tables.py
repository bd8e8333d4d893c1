"""The slot cache's bookkeeping: which expert lies in which slot, and what may happen to it (paper 7.2)."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

from jaxtyping import Array, Int

Rule = Literal["lru", "lfu", "scored"]

# Order of eviction in kernels: EMPTY first, then USED by score, and what must not be given away.
FIRST, NEVER = -(2**31), 2**31 - 1
UNDER_WAY = 1 << 30  # added to a slot's tag in `landed` while its transfer runs
PROGRESS_UNIT = 64  # `progress` holds clock * PROGRESS_UNIT + misses of the layer that runs


class SlotState(enum.IntEnum):
    """State of a slot. FETCH and COMPUTE are protected from eviction."""

    EMPTY = 0  # can be given away without evicting anything
    USED = 1  # holds a resident expert that may be evicted
    FETCH = 2  # reserved for a transfer under way; its key is not resident yet
    COMPUTE = 3  # holds a resident expert that waits for its layer


class SlotTables(NamedTuple):
    """All tables, int32. Donated by the caller and updated in place.

    keys = L*E is the number of (layer, expert) pairs, S the number of slots shared by all layers.
    """

    slot_of_key: Int[Array, " keys"]
    """Slot of a resident key, -1 where the key is not resident (a key in FETCH is not)."""
    key_of_slot: Int[Array, " S"]
    """Key held by a slot; for FETCH the key under way; -1 where EMPTY."""
    state: Int[Array, " S"]
    """`SlotState`."""
    tag: Int[Array, " S"]
    """Tag (> 0) that a FETCH slot waits for, else 0."""
    score: Int[Array, " S"]
    """Retention score: the lowest is evicted first, ties by lowest slot. 0 while EMPTY or FETCH."""


class SlotUpdate(NamedTuple):
    """What `slot_update` returns, all int32."""

    tables: SlotTables
    slots_of_ids: Int[Array, " M"]
    """Slot of each routed expert, -1 for inactive entries."""
    miss_expert: Int[Array, " M"]
    """Expert indices within the layer that have to be loaded, in order of first appearance, then -1."""
    miss_slot: Int[Array, " M"]
    """The slots they are to be loaded into, then -1."""
    counts: Int[Array, " 3"]
    """Distinct experts routed, hits among them, misses; the rest was under way and waited for."""
