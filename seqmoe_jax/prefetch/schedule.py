"""Algorithm 1 of the paper (joint prefetch scheduling) and the two score-based baselines of its section 3.2.

The feasible sets {tasks : at most C(d) of them due by d, for every deadline d} form a matroid, so a greedy over
deadlines that drops the least confident task whenever a set outgrows its capacity finds the set of most confidence.
The earliest deadline in that set is moved first; after every transfer the choice is made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Float64, Int64

from seqmoe_jax.options import Scheduler
from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.prefetch.tasks import Tasks


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many transfers the link manages per layer: a running mean, and what this layer has left of it."""

    average: float
    current: float
    alpha: float = 0.1  # weight of the last layer

    def at_next_layer(self, *, queue_ran_dry: bool = False) -> Budget:
        """Lines 1 to 3: an exponential moving average of the transfers per layer.

        The paper prints B_avg + alpha * B_cur. B_cur is what the layer left over, B_avg less its transfers, so that
        sum moves away from what was measured: it decays or grows without bound. The average it describes is
        (1 - alpha) * B_avg + alpha * transfers = B_avg - alpha * B_cur. A layer whose queue ran dry is passed over:
        it left budget for want of tasks, not of bandwidth.
        """
        average = next_average(self.average, self.current, self.alpha, queue_ran_dry)
        return Budget(average=average, current=average, alpha=self.alpha)

    def after_transfer(self) -> Budget:
        """Line 12."""
        return Budget(average=self.average, current=self.current - 1, alpha=self.alpha)


def select_task(
    tasks: Tasks, *, position: int, budget: Budget, scheduler: Scheduler = "seqmoe", layers: int = 1, lead: int = 1
) -> int | None:
    """Index of the task to transfer next, None where no task can be in time.

    Tasks due within `lead` layers are left out (line 4: they are late, or might be). `layers` is L, which only
    `moe-infinity` needs.
    """
    confidence, deadline = tasks.confidence, tasks.deadline
    order = None
    if not is_sorted(deadline):
        order = np.argsort(deadline, kind="stable")
        confidence, deadline = confidence[order], deadline[order]
    n, due = len(tasks), position + lead
    if scheduler == "seqmoe":
        kept = np.empty(n, np.int64)
        at = select_seqmoe(confidence, deadline, n, position, due, budget.current, budget.average, kept)
    elif scheduler == "moe-infinity":
        at = select_moe_infinity(confidence, deadline, n, position, due, layers)
    else:
        at = select_promoe(confidence, deadline, n, due)
    if at < 0:
        return None
    return int(at if order is None else order[at])


def feasible_set(
    confidence: Float64[np.ndarray, " n"],
    deadline: Int64[np.ndarray, " n"],
    capacity: Float64[np.ndarray, " n"],
) -> Bool[np.ndarray, " n"]:
    """The set of most total confidence of which, for every task, at most `capacity` are due no later than it.

    `capacity` is per task, equal for equal deadlines and not falling with the deadline. Lines 5 to 10.
    """
    order = np.argsort(deadline, kind="stable")
    kept = np.empty(order.shape[0], np.int64)
    size = _greedy(confidence[order], deadline[order], capacity[order], kept)
    chosen = np.zeros(order.shape[0], bool)
    chosen[order[kept[:size]]] = True
    return chosen


@compiled
@no_type_check
def is_sorted(values):
    for i in range(1, values.shape[0]):  # noqa: SIM110  a loop is what numba compiles
        if values[i] < values[i - 1]:
            return False
    return True


@compiled
@no_type_check
def next_average(average, current, alpha, queue_ran_dry):
    if queue_ran_dry:
        return average
    return max(average - alpha * current, 1e-3)


@compiled
@no_type_check
def select_seqmoe(confidence, deadline, n, position, due, current, average, kept):
    """Index among the first n tasks, sorted by deadline, or -1. `kept` is scratch of at least n."""
    size = 0
    for i in range(n):
        if deadline[i] > due:
            capacity = max(1.0, current) + average * (deadline[i] - position - 1)
            size = _offer(kept, size, i, capacity, confidence, deadline)
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
def _greedy(confidence, deadline, capacity, kept):
    size = 0
    for i in range(confidence.shape[0]):
        size = _offer(kept, size, i, capacity[i], confidence, deadline)
    return size


@compiled
@no_type_check
def _before(i, j, confidence, deadline):
    """Whether task i leaves the heap before j: less confident, the later deadline among equals."""
    return confidence[i] < confidence[j] or (confidence[i] == confidence[j] and deadline[i] > deadline[j])


@compiled
@no_type_check
def _offer(heap, size, task, capacity, confidence, deadline):
    """Lines 8 to 10: push, and pop the least where that is too many. Returns the new size."""
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
