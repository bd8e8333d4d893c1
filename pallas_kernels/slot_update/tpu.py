"""`slot_update` for TPUs: the tables travel to scalar memory and the scalar core walks them in order.

Lowered and interpreted in the tests, never timed on a TPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.slot_update.tables import Rule, SlotState, SlotTables, SlotUpdate

INT32_MAX = jnp.iinfo(jnp.int32).max


def slot_update_tpu(
    tables: SlotTables,
    ids: Int[Array, " M"],
    first_key: Int[Array, ""],
    clock: Int[Array, ""],
    key_score: Int[Array, "2 keys"] | None,
    landed: Int[Array, " S"] | None,
    *,
    num_experts: int,
    rule: Rule,
    interpret: bool = False,
) -> SlotUpdate:
    """See `slot_update`."""
    optional = [x for x in (key_score, landed) if x is not None]
    kernel = partial(
        _kernel, num_experts=num_experts, rule=rule, scored=key_score is not None, engine=landed is not None
    )
    anywhere, scalars = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)
    vector = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    outputs = pl.pallas_call(
        kernel,
        out_shape=[
            *(jax.ShapeDtypeStruct(table.shape, jnp.int32) for table in tables),
            *(vector, vector, vector),
            jax.ShapeDtypeStruct((3,), jnp.int32),
        ],
        in_specs=[*[anywhere] * 5, *[scalars] * (3 + len(optional))],
        out_specs=[*[anywhere] * 5, *[scalars] * 4],
        scratch_shapes=[*(pltpu.SMEM(table.shape, jnp.int32) for table in tables), pltpu.SemaphoreType.DMA((5,))],
        input_output_aliases={i: i for i in range(len(tables))},
        interpret=interpret,
        name="slot_update",
    )(*tables, ids, first_key.reshape(1), clock.reshape(1), *optional)
    return SlotUpdate(SlotTables(*outputs[:5]), *outputs[5:])


def _kernel(*refs: Any, num_experts: int, rule: Rule, scored: bool, engine: bool) -> None:
    num_inputs = 8 + scored + engine
    ids, first_key_ref, clock_ref, *rest = refs[5:num_inputs]
    key_score = rest[0] if scored else None
    landed = rest[-1] if engine else None
    slots_of_ids, miss_expert, miss_slot, counts = refs[num_inputs + 5 : num_inputs + 9]
    tables, semaphores = refs[-6:-1], refs[-1]
    slot_of_key, key_of_slot, state, tag, score = tables
    num_slots, num_ids = state.shape[0], ids.shape[0]
    first_key, clock = first_key_ref[0], clock_ref[0]

    _copy_all(refs[:5], tables, semaphores)

    def newcomer_score(key: Array, used: bool) -> Array:
        return key_score[int(used), key] if key_score is not None else clock if rule == "lru" else jnp.int32(1)

    if landed is not None:

        @pl.loop(0, num_slots)
        def _(s: Array) -> None:
            @pl.when((state[s] == SlotState.FETCH) & (tag[s] > 0) & (jnp.abs(landed[s]) == tag[s]))
            def _() -> None:
                key = key_of_slot[s]
                late = (slot_of_key[key] >= 0) | (landed[s] < 0)
                tag[s] = jnp.int32(0)
                state[s] = jnp.where(late, int(SlotState.EMPTY), int(SlotState.COMPUTE))
                key_of_slot[s] = jnp.where(late, -1, key)

                @pl.when(~late)
                def _() -> None:
                    slot_of_key[key] = s
                    score[s] = newcomer_score(key, used=False)

    def look_up(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        expert = ids[i]
        active = (expert >= 0) & (expert < num_experts)
        seen = jax.lax.fori_loop(0, i, lambda j, seen: seen | (ids[j] == expert).astype(jnp.int32), jnp.int32(0))
        first = active & (seen == 0)
        slot = slot_of_key[first_key + jnp.where(active, expert, 0)]
        hit, miss = first & (slot >= 0), first & (slot < 0)
        miss_expert[i] = jnp.int32(-1)
        miss_slot[i] = jnp.int32(-1)

        @pl.when(hit)
        def _() -> None:
            state[slot] = jnp.int32(SlotState.COMPUTE)
            if rule == "lru":
                score[slot] = clock
            elif rule == "lfu":
                score[slot] = score[slot] + 1
            else:
                score[slot] = newcomer_score(first_key + expert, used=True)

        @pl.when(miss)
        def _() -> None:  # at most i misses so far: the list stays behind the initialisation above
            miss_expert[carry[1]] = expert

        return carry[0] + hit.astype(jnp.int32), carry[1] + miss.astype(jnp.int32)

    num_hits, num_misses = jax.lax.fori_loop(0, num_ids, look_up, (jnp.int32(0), jnp.int32(0)))

    def best(s: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slot, is_empty, lowest = carry
        empty, used = state[s] == SlotState.EMPTY, state[s] == SlotState.USED
        better = (is_empty == 0) & (empty | (used & ((score[s] < lowest) | (slot < 0))))
        return (
            jnp.where(better, s, slot),
            jnp.where(better & empty, 1, is_empty),
            jnp.where(better, score[s], lowest),
        )

    @pl.loop(0, num_misses)
    def _allocate(i: Array) -> None:
        start = (jnp.int32(-1), jnp.int32(0), jnp.int32(INT32_MAX))
        slot, is_empty, _ = jax.lax.fori_loop(0, num_slots, best, start)
        key = first_key + miss_expert[i]
        miss_slot[i] = slot

        @pl.when(slot >= 0)
        def _place() -> None:
            @pl.when(is_empty == 0)
            def _evict() -> None:
                slot_of_key[key_of_slot[slot]] = jnp.int32(-1)

            slot_of_key[key] = slot
            key_of_slot[slot] = key
            state[slot] = jnp.int32(SlotState.COMPUTE)
            score[slot] = newcomer_score(key, used=True)

    @pl.loop(0, num_ids)
    def _release(i: Array) -> None:
        expert = ids[i]
        active = (expert >= 0) & (expert < num_experts)
        slot = slot_of_key[first_key + jnp.where(active, expert, 0)]
        slots_of_ids[i] = jnp.where(active, slot, -1)

        @pl.when(active & (slot >= 0))
        def _() -> None:
            state[slot] = jnp.int32(SlotState.USED)

    if landed is not None:

        @pl.loop(0, num_experts)
        def _(expert: Array) -> None:
            slot = slot_of_key[first_key + expert]

            @pl.when(slot >= 0)
            def _() -> None:  # resident, so USED or COMPUTE
                state[slot] = jnp.int32(SlotState.USED)

    counts[0] = num_hits + num_misses
    counts[1] = num_hits
    counts[2] = num_misses
    _copy_all(tables, refs[num_inputs : num_inputs + 5], semaphores)


def _copy_all(sources: tuple[Any, ...], targets: tuple[Any, ...], semaphores: Any) -> None:
    copies = [
        pltpu.make_async_copy(source, target, semaphores.at[i])
        for i, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
