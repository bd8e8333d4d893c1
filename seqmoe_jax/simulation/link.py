"""The simulated link: one transfer at a time, a queue of prefetch tasks, and what a demand miss does to both.

Time is in units of one layer's compute; `config.cost` is RHO, the time of one transfer.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.prefetch.schedule import next_average, select_moe_infinity, select_promoe, select_seqmoe
from seqmoe_jax.simulation.pool import COMPUTE, FETCH, NOWHERE, USED, find_empty, find_victim, place, vacate

NONE, SEQMOE, MOE_INFINITY, PROMOE = 0, 1, 2, 3


class Link(NamedTuple):
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


class LinkConfig(NamedTuple):
    """What does not change during a simulation."""

    scheduler: int
    cost: float  # RHO
    alpha: float  # of the budget's moving average
    chunks: int  # a demand miss waits for at most one of these parts of a transfer; 1: for all of it
    margin: float  # a newcomer must be worth this much more than its victim
    compare: bool  # whether it must be worth more at all
    late: bool  # whether what cannot be complete at its deadline counts for the part that can
    protect: bool  # whether a landed prefetch stays until its layer has run, whatever its value
    layers: int


class Moved(NamedTuple):
    """Counters, in transfers; a part of a transfer counts as that part."""

    prefetched: np.ndarray  # float64[1]
    unused: np.ndarray  # float64[1]
    demanded: np.ndarray  # float64[1]


def new_link(queue: int, cost: float) -> Link:
    return Link(
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
def next_layer(link, config):
    """Lines 1 to 3 of Algorithm 1."""
    link.budget[0] = next_average(link.budget[0], link.budget[1], config.alpha, link.dry[0])
    link.budget[1] = link.budget[0]
    link.dry[0] = False


@compiled
@no_type_check
def land(pool, link, moved, config, position):
    """The transfer in flight has arrived. Paper 7.2: FETCH -> COMPUTE, or USED where its layer has passed."""
    s = link.flying[1]
    pool.state[s] = COMPUTE if link.flying[2] > position and config.protect else USED
    pool.deadline[s] = link.flying[2]
    pool.untouched[s] = True
    moved.prefetched[0] += 1
    link.flying[0] = -1
    link.left[0] = 0.0


@compiled
@no_type_check
def drop(pool, link, moved, config):
    """Gives up the transfer in flight; what it moved was moved for nothing."""
    part = 1 - link.left[0] / config.cost
    moved.prefetched[0] += part
    moved.unused[0] += part
    vacate(pool, link.flying[1])
    link.flying[0] = -1
    link.left[0] = 0.0


@compiled
@no_type_check
def time_to_yield(link, config):
    """How long a demand miss waits until the transfer in flight can be interrupted."""
    chunk = config.cost / config.chunks
    parts = np.floor(link.left[0] / chunk + 1e-9)
    if config.chunks == 1:
        parts = 0.0  # what has been submitted runs to its end
    return max(0.0, link.left[0] - parts * chunk)


@compiled
@no_type_check
def remove(link, i):
    """Takes task i out, keeping the order."""
    n = link.size[0]
    for j in range(i, n - 1):
        link.key[j] = link.key[j + 1]
        link.confidence[j] = link.confidence[j + 1]
        link.deadline[j] = link.deadline[j + 1]
    link.size[0] = n - 1


@compiled
@no_type_check
def prune(pool, link, position):
    """Takes out what is resident or in flight already, and what is past its deadline."""
    n = 0
    for i in range(link.size[0]):
        if link.deadline[i] > position and pool.slot[link.key[i]] == NOWHERE:
            link.key[n] = link.key[i]
            link.confidence[n] = link.confidence[i]
            link.deadline[n] = link.deadline[i]
            n += 1
    link.size[0] = n


@compiled
@no_type_check
def choose(link, config, position, due):
    n = link.size[0]
    if config.scheduler == SEQMOE:
        current, average = link.budget[1], link.budget[0]
        return select_seqmoe(link.confidence, link.deadline, n, position, due, current, average, link.kept)
    if config.scheduler == MOE_INFINITY:
        return select_moe_infinity(link.confidence, link.deadline, n, position, due, config.layers)
    return select_promoe(link.confidence, link.deadline, n, due)


@compiled
@no_type_check
def choose_late(link, config, position, elapsed):
    """Algorithm 1 over the stall that each task is expected to save: a transfer that starts too late to be complete
    still shortens the wait by what it has moved."""
    n = link.size[0]
    for i in range(n):
        link.saving[i] = link.confidence[i] * min(1.0, (link.deadline[i] - position - elapsed) / config.cost)
    current, average = link.budget[1], link.budget[0]
    return select_seqmoe(link.saving, link.deadline, n, position, position, current, average, link.kept)


@compiled
@no_type_check
def start(pool, link, moved, config, position, elapsed):
    """Starts the next prefetch; False where there is nothing to start."""
    prune(pool, link, position)
    victim = -2  # not looked for yet
    while link.size[0] > 0:
        if config.late:
            i = choose_late(link, config, position, elapsed)
        else:
            i = choose(link, config, position, position + 1)
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
            if config.compare and pool.value[k] <= pool.value[pool.key[s]] + config.margin:
                remove(link, i)
                continue
            moved.unused[0] += vacate(pool, s)
        remove(link, i)
        place(pool, s, k, FETCH)
        link.flying[0] = k
        link.flying[1] = s
        link.flying[2] = deadline
        link.left[0] = config.cost
        link.budget[1] -= 1
        return True
    return False


@compiled
@no_type_check
def run_link(pool, link, moved, config, position, duration):
    """Transfers during `duration` of compute at `position`."""
    left = duration
    while True:
        if link.flying[0] < 0 and not start(pool, link, moved, config, position, duration - left):
            link.dry[0] = True
            return
        if link.left[0] > left:
            link.left[0] -= left
            return
        left -= link.left[0]
        land(pool, link, moved, config, position)
