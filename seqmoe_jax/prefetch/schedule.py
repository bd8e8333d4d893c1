"""Algorithm 1 of the paper (joint prefetch scheduling) and the two score-based baselines of its section 3.2.

The feasible sets {tasks : at most C(d) of them due by d, for every deadline d} form a matroid, so a greedy over
deadlines that drops the least confident task whenever a set outgrows its capacity finds the set of most confidence.
The earliest deadline in that set is moved first; after every transfer the choice is made anew.

The budget is how many transfers the link manages per layer: a moving average, and what this layer has left of it.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from seqmoe_jax.options import Scheduler
from seqmoe_jax.prefetch.compiled import compiled, inlined

SCHEDULERS: dict[Scheduler, int] = {"seqmoe": 0, "moe-infinity": 1, "promoe": 2}
SEQMOE, MOE_INFINITY, PROMOE = SCHEDULERS.values()
ALPHA = 0.1  # weight of the last layer in the moving average of the budget


@inlined
@no_type_check
def choose(scheduler, tasks, size, position, transfer_cost, average, current, layers):
    """Index of the task to transfer next, or -1 where none is due after `position`.

    Algorithm 1 weighs the stall that a task is expected to save: a transfer that takes longer (`transfer_cost` layers)
    than is left to its deadline still shortens the wait.
    """
    if scheduler == SEQMOE:
        for i in range(size):
            task = tasks[i]
            task.saving = task.confidence * min(1.0, (task.deadline - position) / transfer_cost)
        return select_seqmoe(tasks.saving, tasks.deadline, size, position, position, current, average, tasks.kept)
    if scheduler == MOE_INFINITY:
        return select_moe_infinity(tasks.confidence, tasks.deadline, size, position, position, layers)
    return select_promoe(tasks.confidence, tasks.deadline, size, position)


@compiled
@no_type_check
def next_average(average, current, alpha, queue_ran_dry):
    """Lines 1 to 3: an exponential moving average of the transfers per layer.

    The paper prints B_avg + alpha * B_cur. B_cur is what the layer left over, B_avg less its transfers, so that sum
    moves away from what was measured: it decays or grows without bound. The average it describes is
    (1 - alpha) * B_avg + alpha * transfers = B_avg - alpha * B_cur. A layer whose queue ran dry is passed over: it left
    budget for want of tasks, not of bandwidth.
    """
    if queue_ran_dry:
        return average
    return max(average - alpha * current, 1e-3)


@compiled
@no_type_check
def select_seqmoe(confidence, deadline, n, position, due, current, average, kept):
    """Index among the first n tasks, sorted by deadline, or -1. `kept` is scratch of at least n.

    Tasks due until `due` are left out (line 4: they are late).
    """
    size = 0
    for i in range(n):
        if deadline[i] > due:
            capacity = max(1.0, current) + average * (deadline[i] - position - 1)
            size = offer(kept, size, i, capacity, confidence, deadline)
    best = -1
    for j in range(size):
        i = kept[j]
        if (
            best < 0
            or deadline[i] < deadline[best]
            or (deadline[i] == deadline[best] and confidence[i] > confidence[best])
        ):
            best = i
    return best


@compiled
@no_type_check
def select_moe_infinity(confidence, deadline, n, position, due, layers):
    """The highest confidence * (1 - (deadline - position) / (L + 1)), or -1."""
    best, best_score = -1, -np.inf
    for i in range(n):
        if deadline[i] > due:
            score = confidence[i] * (1 - (deadline[i] - position) / (layers + 1))
            if score > best_score:
                best, best_score = i, score
    return best


@compiled
@no_type_check
def select_promoe(confidence, deadline, n, due):
    """The earliest deadline, the most confident among equals; or -1."""
    best = -1
    for i in range(n):
        if deadline[i] <= due:
            continue
        if (
            best < 0
            or deadline[i] < deadline[best]
            or (deadline[i] == deadline[best] and confidence[i] > confidence[best])
        ):
            best = i
    return best


@compiled
@no_type_check
def offer(heap, size, task, capacity, confidence, deadline):
    """Lines 8 to 10: pushes a task, and pops the least where that is too many. Returns the new size."""
    if size + 1 > capacity:
        # The pair push, pop in one walk: the new task goes at once, or takes the place of the least.
        if size > 0 and _before(heap[0], task, confidence, deadline):
            _sink(heap, size, task, confidence, deadline)
        return size
    at = size
    while at > 0 and _before(task, heap[(at - 1) // 2], confidence, deadline):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = task
    return size + 1


@compiled
@no_type_check
def _before(i, j, confidence, deadline):
    """Whether task i leaves the heap before j: less confident, the later deadline among equals."""
    return confidence[i] < confidence[j] or (confidence[i] == confidence[j] and deadline[i] > deadline[j])


@compiled
@no_type_check
def _sink(heap, size, task, confidence, deadline):
    """Puts `task` in the place of the root."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(heap[child + 1], heap[child], confidence, deadline):
            child += 1
        if not _before(heap[child], task, confidence, deadline):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = task
