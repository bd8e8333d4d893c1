"""`plan_tasks` for NVIDIA GPUs: one Triton program, one launch, the plan written to the host's memory by it too.

Each table element is loaded before this launch stores to it, and stored once: Triton promises no order between the
stores of one thread and the loads of another. What is reserved is carried in registers until the end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.masks import OUTSIDE, count, gather, scatter
from pallas_kernels.plan_tasks.config import (
    BASE,
    CHECK,
    CONFIDENCE_UNIT,
    FIRST_TASK,
    LAST_TAG,
    NUMBER,
    PlanConfig,
    Planned,
)
from pallas_kernels.plan_tasks.reference import saved
from pallas_kernels.slot_update.tables import FIRST, NEVER, SlotState, SlotTables

LANES_PER_WARP = 256


def plan_tasks_gpu(
    tables: SlotTables,
    open_slots: Int[Array, " N"],
    chance: Float32[Array, " keys"],
    key_score: Int32[Array, "2 keys"],
    base: Int32[Array, ""],
    next_tag: Int32[Array, ""],
    transfer_cost: Float32[Array, ""],
    board: Int32[Array, " W"] | None = None,
    *,
    first_layer: int,
    config: PlanConfig,
    interpret: bool = False,
) -> Planned:
    """See `plan_tasks`."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    longest = pl.next_power_of_2(max(tables.slot_of_key.shape[0], tables.state.shape[0]))
    boards = () if board is None else (board,)
    operands = (
        *tables, open_slots, chance, key_score.reshape(-1), base.reshape(1), next_tag.reshape(1),
        transfer_cost.reshape(1), *boards,
    )  # fmt: skip
    *planned, tasks, tag = pl.pallas_call(
        partial(_kernel, first_layer=first_layer, config=config),
        out_shape=[
            *(jax.ShapeDtypeStruct(table.shape, jnp.int32) for table in tables),
            jax.ShapeDtypeStruct((5 * config.tasks,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        in_specs=[anywhere] * len(operands),
        out_specs=[anywhere] * 7,
        input_output_aliases={i: i for i in range(len(tables))},
        compiler_params=plgpu.CompilerParams(num_warps=min(max(longest // LANES_PER_WARP, 1), 16), num_stages=1),
        interpret=interpret,
        name="plan_tasks",
    )(*operands)
    return Planned(SlotTables(*planned), tag[0], tasks.reshape(5, config.tasks))


def _kernel(*refs: Any, first_layer: int, config: PlanConfig) -> None:
    slot_of_key, key_of_slot, state, tag, score, open_ref = refs[:6]
    chance_ref, worth_ref, base_ref, next_ref, rho_ref = refs[6:11]
    board = refs[11] if len(refs) == 19 else None  # written though it is an operand: the host's memory, not XLA's
    new_slot_of_key, new_key_of_slot, new_state, new_tag, new_score, tasks_ref, next_out = refs[-7:]
    num_keys, num_slots = slot_of_key.shape[0], state.shape[0]
    base, next_tag, rho = base_ref[0], next_ref[0], rho_ref[0]
    first_key = first_layer * config.experts

    # The tasks that are open.
    places = jnp.arange(pl.next_power_of_2(config.tasks), dtype=jnp.int32)
    listed = gather(open_ref, places, places < config.tasks)
    its_state = gather(state, listed, listed >= 0)
    fetching = (listed >= 0) & (its_state == SlotState.FETCH)
    is_open = fetching | ((listed >= 0) & (its_state == SlotState.COMPUTE))
    listed = jnp.where(is_open, listed, -1)
    key = gather(key_of_slot, listed, fetching)
    its_tag = gather(tag, listed, fetching, other=0)
    was_resident = fetching & (gather(slot_of_key, key, fetching) >= 0)

    # Slots in line of eviction, by new scores.
    slots = jnp.arange(pl.next_power_of_2(num_slots), dtype=jnp.int32)
    inside = slots < num_slots
    slot_state = gather(state, slots, inside)
    holder = gather(key_of_slot, slots, inside)
    empty, used = inside & (slot_state == SlotState.EMPTY), inside & (slot_state == SlotState.USED)
    rescored = (used | (inside & (slot_state == SlotState.COMPUTE))) & (holder >= first_key)
    value = jnp.where(rescored, gather(worth_ref, holder, rescored), gather(score, slots, inside))
    order = jnp.where(used, value, jnp.where(empty, FIRST, NEVER))
    spare = count(empty | used) - config.keep

    # What a transfer of each expert would save.
    keys = jnp.arange(pl.next_power_of_2(num_keys), dtype=jnp.int32)
    layer = lax.div(keys, jnp.full_like(keys, config.experts))
    chance = gather(chance_ref, keys, keys < num_keys, other=0.0)
    absent = gather(slot_of_key, keys, keys < num_keys, other=0) < 0
    wanted = absent & (layer >= first_layer) & (chance >= config.threshold)
    saving = jnp.where(wanted, saved(chance, layer, rho, first_layer), 0.0)

    def forget(place: Array, saving: Array) -> Array:
        fetched = jnp.sum(jnp.where((places == place) & fetching, key, 0))
        there = jnp.sum(jnp.where((places == place) & fetching, 1, 0)) > 0
        return jnp.where((keys == fetched) & there, 0.0, saving)

    saving = lax.fori_loop(0, config.tasks, forget, saving)
    room = config.tasks - count(is_open)

    def more(carry: tuple[Array, ...]) -> Array:
        nth, best, *_ = carry
        return (nth < room) & (nth < num_keys) & (best > 0)

    def consider(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        nth, best, saving, order, value, listed, key, its_tag, new = carry
        candidate = jnp.min(jnp.where(saving == best, keys, OUTSIDE))
        lowest = jnp.min(order)
        victim = jnp.min(jnp.where(order == lowest, slots, OUTSIDE))
        worth = plgpu.load(worth_ref.at[candidate])
        take = (nth < spare) & ((lowest == FIRST) | (lowest < worth))
        place = jnp.min(jnp.where((listed < 0) & (places < config.tasks), places, OUTSIDE))
        here = (places == place) & take
        listed, key = jnp.where(here, victim, listed), jnp.where(here, candidate, key)
        its_tag = jnp.where(here, lax.rem(next_tag + nth, jnp.int32(LAST_TAG)) + 1, its_tag)
        new = jnp.where(here, 1, new)
        value = jnp.where((slots == victim) & take, 0, value)
        order = jnp.where(slots == victim, NEVER, order)
        saving = jnp.where(keys == candidate, 0.0, saving)
        return nth + 1, jnp.max(saving), saving, order, value, listed, key, its_tag, new

    none = jnp.zeros_like(places)
    start: tuple[Array, ...] = (next_tag - next_tag, jnp.max(saving), saving, order, value, listed, key, its_tag, none)
    _, _, _, _, value, listed, key, its_tag, is_new = lax.while_loop(more, consider, start)
    new = is_new > 0
    evicted = gather(key_of_slot, listed, new)
    scatter(new_slot_of_key, evicted, jnp.full_like(places, -1), new & (evicted >= 0))
    scatter(new_key_of_slot, listed, key, new)
    scatter(new_state, listed, jnp.full_like(places, SlotState.FETCH), new)
    scatter(new_tag, listed, its_tag, new)
    scatter(new_score, slots, value, inside)

    there = fetching | new
    its_layer = lax.div(jnp.maximum(key, 0), jnp.full_like(key, config.experts))
    chance_of = gather(chance_ref, key, there, other=0.0)
    confidence = jnp.where(there & ~was_resident, (chance_of * CONFIDENCE_UNIT).astype(jnp.int32), 0)
    passed = (its_layer < first_layer).astype(jnp.int32)
    deadline = base + its_layer + passed * config.layers
    number = lax.rem(next_tag + min(config.tasks, num_keys), jnp.int32(LAST_TAG))
    check = number + base
    rows = jnp.where(there, key, -1), confidence, deadline, listed, jnp.where(there, its_tag, 0)
    for row, values in enumerate(rows):
        scatter(tasks_ref, places + row * config.tasks, values, places < config.tasks)
        if board is not None:
            scatter(board, places + (FIRST_TASK + row * config.tasks), values, places < config.tasks)
            check = check + jnp.sum(jnp.where(places < config.tasks, values, 0))
    next_out[0] = number
    if board is not None:
        board[BASE] = base
        board[CHECK] = check
        board[NUMBER] = number
