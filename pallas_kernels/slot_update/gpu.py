"""`slot_update` for NVIDIA GPUs: one Triton program, one launch per MoE layer.

Nothing written here is read back through memory in the same launch: Triton promises no order between the stores of
one thread and the loads of another. What later phases need to know (which slots were given away, where experts
landed) is carried in registers, and a table element is loaded at most before the first store that may touch it.
Without an engine and without misses the slots are never scanned: the kernel reads M table entries and is done.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.masks import OUTSIDE, count, gather, scatter
from pallas_kernels.slot_update.tables import (
    FIRST,
    NEVER,
    PROGRESS_UNIT,
    UNDER_WAY,
    Rule,
    SlotState,
    SlotTables,
    SlotUpdate,
)

LONGEST_WAIT = 20_000  # reads of a tag, about half a microsecond each: then a transfer under way is given up
DUPLICATES_AT_ONCE = 16  # columns of the M x M comparison that are in registers at a time


def slot_update_gpu(
    tables: SlotTables,
    ids: Int[Array, " M"],
    first_key: Int[Array, ""],
    clock: Int[Array, ""],
    elapsed: Int[Array, ""],
    key_score: Int[Array, "2 keys"] | None,
    landed: Int[Array, " S"] | None,
    open_slots: Int[Array, " N"] | None = None,
    progress: Int[Array, " P"] | None = None,
    *,
    num_experts: int,
    rule: Rule,
    interpret: bool = False,
) -> SlotUpdate:
    """See `slot_update`."""
    num_slots, num_ids = tables.state.shape[0], ids.shape[0]
    if landed is not None and open_slots is None:
        raise ValueError("slot_update on a GPU: landed needs open_slots, so that not all slots have to be looked at")
    # Scores flat: a key's second one lies `keys` further on.
    scores = None if key_score is None else key_score.reshape(-1)
    given = {"scores": scores, "landed": landed, "open": open_slots, "progress": progress}
    optional = {name: x for name, x in given.items() if x is not None}
    kernel = partial(_kernel, num_experts=num_experts, rule=rule, optional=tuple(optional), interpret=interpret)
    vector = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    outputs = pl.pallas_call(
        kernel,
        out_shape=[
            *(jax.ShapeDtypeStruct(table.shape, jnp.int32) for table in tables),
            *(vector, vector, vector),
            jax.ShapeDtypeStruct((3,), jnp.int32),
        ],
        input_output_aliases={i: i for i in range(len(tables))},
        # About 8 to 32 slots per thread; few warps where the vectors are short, since reductions synchronise them.
        compiler_params=plgpu.CompilerParams(
            num_warps=min(max(pl.next_power_of_2(max(num_slots, 8 * num_ids)) // 512, 1), 8), num_stages=1
        ),
        interpret=interpret,
        name="slot_update",
    )(*tables, ids, first_key.reshape(1), clock.reshape(1), elapsed.reshape(1), *optional.values())
    return SlotUpdate(SlotTables(*outputs[:5]), *outputs[5:])


def _kernel(*refs: Any, num_experts: int, rule: Rule, optional: tuple[str, ...], interpret: bool) -> None:
    inputs = 9 + len(optional)
    slot_of_key, key_of_slot, state, tag, score, ids_ref, first_key_ref, clock_ref, elapsed_ref = refs[:9]
    given = dict(zip(optional, refs[9:inputs], strict=True))
    # `Any`: which are there is known from the arguments, and not to a type checker.
    scores_ref: Any
    landed_ref: Any
    progress_ref: Any
    open_ref: Any
    scores_ref, landed_ref, progress_ref, open_ref = (
        given.get(name) for name in ("scores", "landed", "progress", "open")
    )
    engine = landed_ref is not None
    new_slot_of_key, new_key_of_slot, new_state, new_tag, new_score, *outputs = refs[inputs:]
    slots_of_ids_ref, miss_expert_ref, miss_slot_ref, counts_ref = outputs
    num_slots, num_ids, num_keys = state.shape[0], ids_ref.shape[0], slot_of_key.shape[0]
    first_key, clock = first_key_ref[0], clock_ref[0] + elapsed_ref[0]

    def used_score(key: Array) -> Array:
        return scores_ref[num_keys + key] if scores_ref is not None else clock if rule == "lru" else jnp.int32(1)

    # Look up, on what the tables said before this launch.
    lanes = jnp.arange(pl.next_power_of_2(num_ids), dtype=jnp.int32)
    ids = gather(ids_ref, lanes, lanes < num_ids)
    active = (ids >= 0) & (ids < num_experts)
    found = gather(slot_of_key, first_key + ids, active)
    first = active & (_earliest(ids_ref, ids) == lanes)
    hit, absent = first & (found >= 0), first & (found < 0)
    num_distinct, num_hits = count(first), count(hit)
    if rule == "lru":
        scatter(new_score, found, jnp.broadcast_to(clock, lanes.shape), hit)
    elif rule == "lfu":
        scatter(new_score, found, gather(score, found, hit) + 1, hit)
    else:
        scatter(new_score, found, gather(scores_ref, num_keys + first_key + ids, hit), hit)

    slots = jnp.arange(pl.next_power_of_2(num_slots), dtype=jnp.int32)
    inside = slots < num_slots

    def wait_for_transfer(answer: Array, expected: Array, fetching: Array, slot_key: Array) -> tuple[Array, Array]:
        # Tell the engine where the step is; if this layer needs what is under way, wait for it. There is at most one.
        flying = fetching & (answer == expected + UNDER_WAY)
        slot = jnp.min(jnp.where(flying, open_, OUTSIDE))
        mine = open_ == slot
        key, awaited = jnp.sum(jnp.where(mine, slot_key, 0)), jnp.sum(jnp.where(mine, expected, 0))
        needed = (slot < OUTSIDE) & (count(absent & (first_key + ids == key)) > 0)

        @pl.when(needed)
        def _() -> None:
            progress_ref[0] = clock * PROGRESS_UNIT

        def unanswered(carry: tuple[Array, Array]) -> Array:
            return needed & (carry[0] < LONGEST_WAIT) & (carry[1] != awaited) & (carry[1] != -awaited)

        def read(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return carry[0] + 1, plgpu.load(landed_ref.at[jnp.where(needed, slot, 0)], volatile=True)

        _, last = jax.lax.while_loop(unanswered, read, (jnp.int32(0), awaited + UNDER_WAY))
        misses = num_distinct - num_hits - needed.astype(jnp.int32)

        @pl.when(count(fetching) > 0)  # with no task open nobody asks, and a store over the link costs a microsecond
        def _() -> None:
            progress_ref[0] = clock * PROGRESS_UNIT + jnp.minimum(misses, PROGRESS_UNIT - 1)

        return jnp.where(mine, last, answer), (needed & (last == awaited)).astype(jnp.int32)

    if engine:
        # Land, and release this layer's slots at once: their new protection is in `fresh` and `order` below.
        tasks = jnp.arange(pl.next_power_of_2(open_ref.shape[0]), dtype=jnp.int32)
        open_ = gather(open_ref, tasks, tasks < open_ref.shape[0])
        listed = open_ >= 0
        # All at once: a load that waits for another costs half a microsecond.
        old_state, slot_key = gather(state, open_, listed), gather(key_of_slot, open_, listed)
        expected, answer = gather(tag, open_, listed), gather(landed_ref, open_, listed)
        fetching = listed & (old_state == SlotState.FETCH)
        waiting = listed & (old_state == SlotState.COMPUTE)
        if progress_ref is not None:
            answer, waited = wait_for_transfer(answer, expected, fetching, slot_key)
        arrived = fetching & (expected > 0) & ((answer == expected) | (answer == -expected))
        fresh = arrived & (answer > 0) & (gather(slot_of_key, slot_key, arrived) < 0)
        late = arrived & ~fresh
        own = (slot_key >= first_key) & (slot_key < first_key + num_experts)
        landed_state = jnp.where(late, SlotState.EMPTY, jnp.where(own, SlotState.USED, SlotState.COMPUTE))
        if scores_ref is not None:
            landed_score = gather(scores_ref, slot_key, fresh)
        else:
            landed_score = jnp.broadcast_to(used_score(first_key), tasks.shape)
        scatter(new_slot_of_key, slot_key, open_, fresh)
        scatter(new_key_of_slot, open_, jnp.full_like(open_, -1), late)
        scatter(new_state, open_, landed_state.astype(jnp.int32), arrived | (waiting & own))
        scatter(new_tag, open_, jnp.zeros_like(open_), arrived)
        scatter(new_score, open_, landed_score, fresh)
        if not interpret:  # a slot that landed as EMPTY may be given away below: keep the two stores in order
            plgpu.debug_barrier()

    def replace(found: Array) -> tuple[Array, Array, Array, Array]:
        # Find a slot for every absent expert, one after another.
        current = gather(state, slots, inside)
        used = inside & (current == SlotState.USED)
        order = jnp.where(used, gather(score, slots, used), NEVER)
        order = jnp.where(inside & (current == SlotState.EMPTY), FIRST, order)
        if engine:
            # What was just stored must not be read back: open slots are EMPTY if their task is over, else protected.
            def correct(i: Array, order: Array) -> Array:
                slot = jnp.sum(jnp.where(tasks == i, open_, 0))
                free = jnp.sum(jnp.where(tasks == i, late.astype(jnp.int32), 0)) > 0
                order = jnp.where(slots == slot, NEVER, order)
                return jnp.where((slots == slot) & free, FIRST, order)

            order = jax.lax.fori_loop(0, open_ref.shape[0], correct, order)

        def one(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            lane, served, found, miss_expert, miss_slot, order = carry
            expert = jnp.sum(jnp.where(lanes == lane, ids, 0))
            key = first_key + expert
            lowest = jnp.min(order)
            slot = jnp.min(jnp.where(order == lowest, slots, OUTSIDE))
            exists = lowest < NEVER
            # A slot that was hit is protected, but that is looked up only for the one about to be taken.
            protected = exists & (count(hit & (hit_slot == slot)) > 0)
            if engine:
                landing = jnp.min(jnp.where(fresh & (slot_key == key), open_, OUTSIDE))
                is_miss = landing == OUTSIDE
            else:
                landing, is_miss = slot, lane < OUTSIDE  # true; the lowering takes no literals here
            take = is_miss & ~protected & exists

            @pl.when(take)
            def _() -> None:
                @pl.when(lowest != FIRST)
                def _() -> None:
                    new_slot_of_key[key_of_slot[slot]] = jnp.int32(-1)

                new_slot_of_key[key] = slot
                new_key_of_slot[slot] = key
                new_state[slot] = jnp.int32(SlotState.USED)
                new_score[slot] = used_score(key)

            if engine and rule != "lru":  # under lru a landed expert has the clock for its score already

                @pl.when(~is_miss)
                def _() -> None:  # landed, then hit
                    new_score[landing] = used_score(key) if scores_ref is not None else jnp.int32(2)

            settled = is_miss & ~protected  # a miss, served or not
            given = jnp.where(is_miss, jnp.where(exists, slot, -1), landing)
            order = jnp.where((slots == slot) & is_miss, NEVER, order)
            found = jnp.where((ids == expert) & (settled | ~is_miss), given, found)
            miss_expert = jnp.where((lanes == served) & settled, expert, miss_expert)
            miss_slot = jnp.where((lanes == served) & settled, given, miss_slot)
            following = jnp.min(jnp.where(absent & (lanes > lane), lanes, OUTSIDE))
            lane = jnp.where(settled | ~is_miss, following, lane)
            return lane, served + settled.astype(jnp.int32), found, miss_expert, miss_slot, order

        hit_slot = found
        none = jnp.full_like(lanes, -1)
        start: tuple[Array, ...] = (jnp.min(jnp.where(absent, lanes, OUTSIDE)), jnp.int32(0), found, none, none, order)
        _, served, found, miss_expert, miss_slot, _ = jax.lax.while_loop(_more, one, start)
        return served, found, miss_expert, miss_slot

    def nothing(found: Array) -> tuple[Array, Array, Array, Array]:
        none = jnp.full_like(lanes, -1)
        return num_distinct - num_hits, found, none, none  # 0; the lowering does not take a literal here

    num_misses, found, miss_expert, miss_slot = jax.lax.cond(num_hits < num_distinct, replace, nothing, found)
    for ref, value in ((slots_of_ids_ref, found), (miss_expert_ref, miss_expert), (miss_slot_ref, miss_slot)):
        scatter(ref, lanes, value, lanes < num_ids)
    counts_ref[0] = num_distinct
    hits = num_distinct - num_misses
    counts_ref[1] = hits - waited if progress_ref is not None else hits
    counts_ref[2] = num_misses


def _earliest(ids_ref: Any, ids: Int[Array, " M"]) -> Int[Array, " M"]:
    """First position of each lane's id."""

    def compare(i: Array, earliest: Array) -> Array:
        position = i * width + jnp.arange(width, dtype=jnp.int32)
        others = gather(ids_ref, position, position < ids_ref.shape[0])
        same = ids[:, None] == others[None, :]
        return jnp.minimum(earliest, jnp.min(jnp.where(same, position[None, :], OUTSIDE), axis=1))

    width = min(ids.shape[0], DUPLICATES_AT_ONCE)
    start = jnp.full_like(ids, OUTSIDE)
    if width == ids.shape[0]:
        return compare(jnp.int32(0), start)
    return jax.lax.fori_loop(0, ids.shape[0] // width, compare, start)


def _more(carry: tuple[Array, ...]) -> Array:
    return carry[0] < OUTSIDE
