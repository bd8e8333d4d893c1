"""All cache management of one MoE layer in one launch (paper 7.2 and 8.2, "Device-resident cache")."""

from __future__ import annotations

from typing import get_args

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.slot_update.reference import slot_update_reference
from pallas_kernels.slot_update.tables import Rule, SlotTables, SlotUpdate


def slot_update(
    tables: SlotTables,
    ids: Int[Array, " M"],
    *,
    first_key: Int[Array, ""] | int,
    num_experts: int,
    rule: Rule,
    clock: Int[Array, ""] | int,
    elapsed: Int[Array, ""] | int = 0,
    key_score: Int[Array, "2 keys"] | None = None,
    landed: Int[Array, " S"] | None = None,
    open_slots: Int[Array, " N"] | None = None,
    progress: Int[Array, " P"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> SlotUpdate:
    """Land, look up, allocate, release: the state transitions around one MoE layer, in this order.

    1. *Land.* A FETCH slot with `landed[s] == tag[s]` becomes COMPUTE and its key resident; if an on-demand load
       made the key resident meanwhile, or if `landed[s] == -tag[s]` (the engine gave the task up), it becomes EMPTY.
    2. *Look up* `ids`. A resident expert is a hit and protected for this call.
    3. *Allocate.* Each distinct missing expert, in order of first appearance, takes the first EMPTY slot, else
       the USED slot of lowest (score, index), whose expert is evicted. A key that is in FETCH at this moment is
       loaded into a slot of its own all the same; the transfer then lands as EMPTY.
    4. *Release.* Every COMPUTE slot of this layer becomes USED, activated or not: later launches come after the
       layer's own computation on the same stream.

    Scores: a newcomer gets the clock (lru), 1 (lfu) or, under `scored`, `key_score[0, key]` where it landed and
    `key_score[1, key]` where it was loaded on demand; a hit sets the clock (lru), adds 1 once per distinct expert (lfu)
    or sets `key_score[1, key]` (scored).

    Args:
        tables: int32, donated by the caller's jit; updated in place.
        ids: routed experts of the layer in [0, E); others are inactive (use -1). Duplicates are welcome.
        first_key: layer * E; may be traced.
        num_experts: E.
        rule: how scores change.
        clock, elapsed: their sum is a number that grows from call to call. The kernel for GPUs adds them itself: so a
            step needs no launch per layer that adds one to its clock.
        key_score: retention scores, needed for "scored" and unused otherwise: [0] while an expert's layer is still to
            come in this step, [1] from its use on.
        landed: last tag reported for each slot by the transfer engine, which may change while the step runs. None:
            there is no engine, which promises that no slot is COMPUTE on entry, and saves the scans over all slots.
        open_slots: with an engine, every slot that is FETCH or COMPUTE, then -1. Needed on GPUs; elsewhere unused.
        progress: on GPUs with an engine that runs beside the step, an array in `pinned_host` memory. The kernel writes
            `(clock + elapsed) * PROGRESS_UNIT + misses` into its first element for the engine to see while a task is
            open, and where a routed expert is the one under way (`landed[s] == tag[s] + UNDER_WAY`) it waits for it
            instead of loading it again.

    There must be a slot that is neither FETCH nor protected for every distinct miss. The caller sees to it by
    keeping enough out of `reserve`; a miss that finds none gets slot -1, and nothing is corrupted.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"unknown rule {rule!r}: expected one of {get_args(Rule)}")
    if rule == "scored" and key_score is None:
        raise ValueError("rule 'scored' needs key_score, int32[keys]")
    if rule != "scored":
        key_score = None
    if progress is not None and landed is None:
        raise ValueError("progress needs landed: both belong to a transfer engine")
    first_key, clock, elapsed = (jnp.asarray(number, jnp.int32) for number in (first_key, clock, elapsed))
    ids = ids.astype(jnp.int32)
    match resolve(implementation):
        case "gpu":  # imported where used: Pallas is slow to import and absent from some builds
            from pallas_kernels.slot_update.gpu import slot_update_gpu

            return slot_update_gpu(
                tables, ids, first_key, clock, elapsed, key_score, landed, open_slots, progress,
                num_experts=num_experts, rule=rule, interpret=interpret,
            )  # fmt: skip
        case "tpu":
            from pallas_kernels.slot_update.tpu import slot_update_tpu

            now = clock + elapsed
            return slot_update_tpu(
                tables, ids, first_key, now, key_score, landed, num_experts=num_experts, rule=rule, interpret=interpret
            )
        case _:
            now = clock + elapsed
            return slot_update_reference(
                tables, ids, first_key, now, key_score, landed, num_experts=num_experts, rule=rule
            )
