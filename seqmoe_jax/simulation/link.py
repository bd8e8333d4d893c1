"""The simulated link: one transfer at a time, taken from a queue of prefetch tasks.

Time is in units of one layer's compute; `rules.cost` is RHO, the time of one transfer (`rules.Rules`).
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.prefetch.schedule import next_average
from seqmoe_jax.simulation.pool import COMPUTE, FETCH, USED, find_empty, find_victim, place, vacate
from seqmoe_jax.simulation.tasks import choose, prune, remove


class SimulatedLink(NamedTuple):
    """The transfer in flight, the queue in order of deadline, and Algorithm 1's budget."""

    flying: np.ndarray  # int64[3]: key (-1: none), slot, deadline
    left: np.ndarray  # float64[1]: time that the transfer in flight still needs
    size: np.ndarray  # int64[1]: tasks in the queue
    key: np.ndarray  # int64[Q]
    confidence: np.ndarray  # float64[Q]
    deadline: np.ndarray  # int64[Q]
    saving: np.ndarray  # float64[Q]: stall that a task is expected to save, in transfers
    kept: np.ndarray  # int64[Q]: scratch of Algorithm 1
    budget: np.ndarray  # float64[2]: B_avg, B_cur
    dry: np.ndarray  # bool[1]: the queue ran dry in this layer


def new_link(queue: int, cost: float) -> SimulatedLink:
    return SimulatedLink(
        flying=np.array([-1, -1, -1], np.int64),
        left=np.zeros(1),
        size=np.zeros(1, np.int64),
        key=np.zeros(queue, np.int64),
        confidence=np.zeros(queue),
        deadline=np.zeros(queue, np.int64),
        saving=np.zeros(queue),
        kept=np.zeros(queue, np.int64),
        budget=np.full(2, 1 / cost),
        dry=np.zeros(1, bool),
    )


@compiled
@no_type_check
def next_layer(link, rules):
    """Lines 1 to 3 of Algorithm 1."""
    link.budget[0] = next_average(link.budget[0], link.budget[1], rules.alpha, link.dry[0])
    link.budget[1] = link.budget[0]
    link.dry[0] = False


@compiled
@no_type_check
def land(pool, link, counters, rules, position):
    """The transfer in flight has arrived. Paper 7.2: FETCH -> COMPUTE, or USED where its layer has passed."""
    s = link.flying[1]
    pool.state[s] = COMPUTE if link.flying[2] > position and rules.protect else USED
    pool.deadline[s] = link.flying[2]
    pool.untouched[s] = True
    counters.prefetched[0] += 1
    link.flying[0] = -1
    link.left[0] = 0.0


@compiled
@no_type_check
def drop(pool, link, counters, rules):
    """Gives up the transfer in flight; what it has moved was for nothing."""
    part = 1 - link.left[0] / rules.cost
    counters.prefetched[0] += part
    counters.unused[0] += part
    vacate(pool, link.flying[1])
    link.flying[0] = -1
    link.left[0] = 0.0


@compiled
@no_type_check
def time_to_yield(link, rules):
    """How long a demand miss waits until the transfer in flight can be interrupted."""
    chunk = rules.cost / rules.chunks
    parts = np.floor(link.left[0] / chunk + 1e-9)
    if rules.chunks == 1:
        parts = 0.0  # what has been submitted runs to its end
    return max(0.0, link.left[0] - parts * chunk)


@compiled
@no_type_check
def interrupt(pool, link, counters, rules, position):
    """A demand miss at `position` needs the link. Returns how long it waits for the transfer in flight to yield."""
    wait = time_to_yield(link, rules)
    link.left[0] -= wait
    if link.left[0] <= 1e-9:
        land(pool, link, counters, rules, position)
    return wait


@compiled
@no_type_check
def start(pool, link, counters, rules, position, elapsed):
    """Starts the next prefetch; False where there is nothing to start."""
    prune(pool, link, position)
    victim = -2  # not looked for yet
    while link.size[0] > 0:
        i = choose(link, rules, position, elapsed)
        if i < 0:
            return False
        k, deadline = link.key[i], link.deadline[i]
        s = find_empty(pool)
        if s < 0:
            if victim == -2:
                victim = find_victim(pool, position, USED)
            s = victim
            if s < 0:
                return False
            if rules.compare and pool.value[k] <= pool.value[pool.key[s]]:
                remove(link, i)
                continue
            counters.unused[0] += vacate(pool, s)
        remove(link, i)
        place(pool, s, k, FETCH)
        link.flying[0] = k
        link.flying[1] = s
        link.flying[2] = deadline
        link.left[0] = rules.cost
        link.budget[1] -= 1
        return True
    return False


@compiled
@no_type_check
def run_link(pool, link, counters, rules, position, duration):
    """Prefetches during `duration` of compute at `position`."""
    left = duration
    while True:
        if link.flying[0] < 0 and not start(pool, link, counters, rules, position, duration - left):
            link.dry[0] = True
            return
        if link.left[0] > left:
            link.left[0] -= left
            return
        left -= link.left[0]
        land(pool, link, counters, rules, position)
