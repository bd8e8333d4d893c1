"""New scores for all slots, and a new plan of transfers, in one launch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.plan_tasks.config import PlanConfig, Planned
from pallas_kernels.plan_tasks.reference import plan_tasks_reference
from pallas_kernels.slot_update.tables import SlotTables


def plan_tasks(
    tables: SlotTables,
    open_slots: Int[Array, " N"],
    chance: Float32[Array, " keys"],
    key_score: Int32[Array, "2 keys"],
    *,
    base: Int[Array, ""],
    next_tag: Int[Array, ""],
    transfer_cost: Float32[Array, ""],
    first_layer: int,
    config: PlanConfig,
    board: Int32[Array, " W"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Planned:
    """Rescores what is resident, then reserves slots for what the step at `base` (its layer 0's position) will need.

    A position is a value of the cache's clock: the number of MoE layers run so far. A plan is made inside the decode
    step, at its end for the coming step and at the trigger layer for the rest of the running one. It lists every task
    that is open, old ones with what the new forecast says of them, so a plan that the host never reads is lost without
    harm.

    Every resident expert of a layer from `first_layer` on gets its score of `key_score[0]`. Experts of these layers
    that are not resident, and whose chance reaches `config.threshold`, are considered for a task: at most as many as
    tasks may still be opened, by what they save, which is their chance times the share of the transfer that fits before
    their layer runs. The j-th is weighed against the j-th slot in line of eviction (EMPTY ones, then USED by score and
    index), and reserves it (FETCH) if its own score is higher, and if `config.keep` slots stay that are neither FETCH
    nor COMPUTE. Its confidence is its chance, its deadline the position of its layer.

    Args:
        tables: as between two layers. Donated.
        open_slots: of the tasks that were open after the plan before (its SLOT row); -1 for none. Every slot that is
            FETCH or COMPUTE is among them.
        chance: of being routed in this step; below `first_layer` it is of layers that have run.
        key_score: of each key before and after its layer has run; the first row counts here.
        next_tag: tags given so far.
        transfer_cost: RHO, how many layers run while one expert is moved.
        board: `pinned_host` memory of at least `config.board_words` words. The plan is written there too, for a thread
            of the host that polls (words: see `config`), under the new `next_tag` as its number. Stores may arrive in
            any order, and a reader takes what adds up. Only the kernel for GPUs can do that.

    An open task whose layer has run is listed with its deadline in the step after. The confidence of a task is 0 if its
    expert has become resident otherwise. Raises `ValueError` for a board that is too short, or that there is no kernel
    for.
    """
    arguments = (
        tables,
        open_slots,
        chance,
        key_score,
        jnp.asarray(base, jnp.int32),
        jnp.asarray(next_tag, jnp.int32),
        transfer_cost,
    )
    chosen = resolve(implementation)
    if board is not None:
        if chosen != "gpu":
            raise ValueError(f"plan_tasks: only the kernel for GPUs writes to a board, this is {chosen}")
        if board.shape[0] < config.board_words:
            raise ValueError(f"plan_tasks: the board needs {config.board_words} words, got {board.shape[0]}")
    if chosen == "gpu":  # imported where used: Pallas is slow to import and absent from some builds
        from pallas_kernels.plan_tasks.gpu import plan_tasks_gpu

        return plan_tasks_gpu(*arguments, board, first_layer=first_layer, config=config, interpret=interpret)
    return plan_tasks_reference(*arguments, first_layer=first_layer, config=config)
