"""Planning on the device: which experts the forecast wants moved, in which slots, by when (paper 6.1, 7.2).

A plan is made inside the decode step, at its end for the coming step and at the trigger layer for the rest of the
running one. It reserves slots for new tasks (FETCH) and lists every task that is open, old ones with what the new
forecast says of them, so a plan that the host never reads is lost without harm. Positions are values of the cache's
clock: the number of MoE layers run so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from seqmoe_jax.experts.slots import SlotState, SlotTables, reserve

KEY, CONFIDENCE, DEADLINE, SLOT, TAG = range(5)  # rows of a plan
CONFIDENCE_UNIT = 1 << 20
LAST_TAG = (1 << 29) - 1


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Static shape of planning. Hashable: part of a static argument."""

    layers: int  # L
    experts: int  # E
    tasks: int = 8  # most tasks open at a time; each holds a slot
    threshold: float = 0.2  # least probability of being routed
    keep: int = 8  # slots that are never reserved: one layer's misses and hits must fit beside the tasks


def make_plan(
    tables: SlotTables,
    probability: Float[Array, "L E"],
    worth: Int32[Array, " keys"],
    base: Int[Array, ""],
    next_tag: Int[Array, ""],
    transfer_layers: Float32[Array, ""],
    *,
    first_layer: int,
    config: PlanConfig,
) -> tuple[SlotTables, Int32[Array, ""], Int32[Array, "5 N"]]:
    """Reserves slots for what the step at `base` (the position of its layer 0) is likely to need.

    Args:
        tables: as between two layers.
        probability: of being routed in that step; rows below `first_layer` are of layers that have run.
        worth: scores as in the slot tables of experts still to come; a newcomer must exceed its victim's.
        next_tag: tags given so far.
        transfer_layers: RHO, how many layers run while one expert is moved. A task that starts too late to be complete
            counts for the part that can be.

    Returns:
        Tables, the new count of tags, and the open tasks: key (-1: none), confidence in `CONFIDENCE_UNIT`, deadline,
        slot (under key -1 also of a landed expert that waits for its layer), tag. The confidence of a task whose
        expert has become resident otherwise is 0.
    """
    keys = config.layers * config.experts
    layer = jnp.arange(keys, dtype=jnp.int32) // config.experts
    chance = probability.reshape(-1)
    ahead = (layer - first_layer + 1).astype(jnp.float32)
    saving = chance * jnp.minimum(1.0, ahead / transfer_layers)
    wanted = (tables.slot_of_key < 0) & (layer >= first_layer) & (chance >= config.threshold)
    count = min(config.tasks, keys)
    best, key = lax.top_k(jnp.where(wanted, saving, 0.0), count)
    room = config.tasks - (open_slots(tables, config.tasks) >= 0).sum(dtype=jnp.int32)
    key = jnp.where((best > 0) & (jnp.arange(count) < room), key, -1)
    tags = (next_tag + jnp.arange(count, dtype=jnp.int32)) % LAST_TAG + 1
    tables, _ = reserve(tables, key, tags, worth[jnp.maximum(key, 0)], keep=config.keep)

    slot = open_slots(tables, config.tasks)
    there = (slot >= 0) & (tables.state[jnp.maximum(slot, 0)] == SlotState.FETCH)
    key = jnp.where(there, tables.key_of_slot[jnp.maximum(slot, 0)], -1)
    at = jnp.maximum(key, 0)
    resident = tables.slot_of_key[at] >= 0
    passed = (layer[at] < first_layer).astype(jnp.int32)  # its layer comes again in the step after
    confidence = jnp.where(resident | ~there, 0, (chance[at] * CONFIDENCE_UNIT).astype(jnp.int32))
    deadline = base + layer[at] + passed * config.layers
    tag = jnp.where(there, tables.tag[jnp.maximum(slot, 0)], 0)
    return tables, (next_tag + count) % LAST_TAG, jnp.stack([key, confidence, deadline, slot, tag])


def open_slots(tables: SlotTables, tasks: int) -> Int32[Array, " N"]:
    """Slots of open tasks, landed or not, then -1: all that are FETCH or COMPUTE, if they are `tasks` at most."""
    is_open = (tables.state == SlotState.FETCH) | (tables.state == SlotState.COMPUTE)
    (slot,) = jnp.nonzero(is_open, size=tasks, fill_value=-1)
    return slot.astype(jnp.int32)


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
