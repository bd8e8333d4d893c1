"""Replays a trace through pool and link: the compiled loop over steps and layers.

The time model: a step takes L units of compute; routing comes at the start of a layer; experts that are missing then
are loaded one after the other, RHO each, after what is in flight has yielded, while compute waits; prefetches run
during compute alone. A hit is a routed expert that is resident when its layer starts.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.simulation.link import NONE, drop, land, next_layer, run_link, time_to_yield
from seqmoe_jax.simulation.pool import (
    COMPUTE,
    FETCH,
    NOWHERE,
    USED,
    find_empty,
    find_victim,
    place,
    vacate,
)

LRU, LFU, SCORED, BELADY, BELADY_8 = 0, 1, 2, 3, 4
FAR = 1 << 40  # position of a use that never comes
HORIZON_8 = 8  # steps that policy `belady-8` sees


class Rules(NamedTuple):
    """What does not change during a simulation, beside the link."""

    policy: int
    keep: float  # weight of the retention score of an expert whose layer is still to come in this step
    tasks_per_layer: int
    threshold: float  # least confidence of a task
    trigger: int  # layer at which forecasts made in mid-step are there; L: never
    horizon: int  # how many steps beyond the running one get tasks
    reach: float  # least confidence of a task beyond the running step


class Signals(NamedTuple):
    """What the policy and the prefetcher know at each of t steps; arrays of no rows where not used."""

    next: np.ndarray  # float32[t, L*E]
    retention: np.ndarray  # float32[t, L*E]
    refined: np.ndarray  # float32[t, L*E]
    early: np.ndarray  # float32[t, L*E]: of the next step, at the trigger
    ahead: np.ndarray  # float32[t, horizon, L*E]
    next_use: np.ndarray  # int64[t, L, K]: position of the next use of each routed expert


class Tally(NamedTuple):
    """What is counted, beside transfers."""

    hits: np.ndarray  # int64[L]
    routed: np.ndarray  # int64[1]
    time: np.ndarray  # float64[1]
    steps: np.ndarray  # int64[1]
    uses: np.ndarray  # int64[L*E]: uses since a key was loaded
    last_use: np.ndarray  # int64[L*E]: position
    next_use: np.ndarray  # int64[L*E]: position, known to the oracles


@compiled
@no_type_check
def replay(ids, first_step, skip, rules, config, signals, pool, link, moved, tally):
    """Steps first_step, first_step + 1, ... of the simulation; `ids` is [t, L, K]. The first `skip` steps of the
    simulation are not counted."""
    steps, layers, _ = ids.shape
    experts = pool.slot.shape[0] // layers
    for t in range(steps):
        step = first_step + t
        if step == skip:
            forget(moved, tally)
        if rules.policy == SCORED:
            value_pending(signals.next[t], signals.retention[t], rules.keep, pool.value, 0)
        elif rules.policy == BELADY_8:
            value_within_horizon(tally, pool.value, step * layers, HORIZON_8 * layers)
        if config.scheduler != NONE:
            plan(pool, link, rules, config, signals.next[t], signals, t, step, 0)
        for layer in range(layers):
            if layer == rules.trigger:
                if rules.policy == SCORED:
                    first_key = layer * experts
                    value_pending(signals.refined[t], signals.retention[t], rules.keep, pool.value, first_key)
                if config.scheduler != NONE:
                    plan(pool, link, rules, config, signals.refined[t], signals, t, step, layer)
            replay_layer(ids[t, layer], layer, step, t, rules, config, signals, pool, link, moved, tally)
        tally.steps[0] += 1


@compiled
@no_type_check
def replay_layer(routed, layer, step, t, rules, config, signals, pool, link, moved, tally):
    layers = tally.hits.shape[0]
    experts = pool.slot.shape[0] // layers
    base, position = layer * experts, step * layers + layer
    if config.scheduler != NONE:
        next_layer(link, config)
    if rules.policy == SCORED:
        # This layer's turn in this step has come: from here on only later steps give its experts value.
        for k in range(base, base + experts):
            pool.value[k] = signals.retention[t, k]
    misses, flying_missed = 0, False
    for expert in routed:
        k = base + expert
        pool.locked[k] = position
        s = pool.slot[k]
        if s == NOWHERE:
            misses += 1
        elif pool.state[s] == FETCH:
            flying_missed = True
        else:
            tally.hits[layer] += 1
            pool.untouched[s] = False
    tally.routed[0] += routed.shape[0]
    for k in range(base, base + experts):  # paper 7.2: just before the layer runs, COMPUTE -> USED
        s = pool.slot[k]
        if s != NOWHERE and pool.state[s] == COMPUTE and pool.deadline[s] <= position:
            pool.state[s] = USED

    stall = 0.0
    if flying_missed:
        stall += link.left[0]
        land(pool, link, moved, config, position)
        pool.untouched[link.flying[1]] = False
    elif link.flying[0] >= 0:
        if misses:
            wait = time_to_yield(link, config)
            stall += wait
            link.left[0] -= wait
            if link.left[0] <= 1e-9:
                land(pool, link, moved, config, position)
        if link.flying[0] >= 0 and config.chunks > 1 and link.flying[2] <= position:
            drop(pool, link, moved, config)  # its layer runs now, and without it
    for expert in routed:
        k = base + expert
        if pool.slot[k] == NOWHERE:
            load(pool, moved, k, position)
            tally.uses[k] = 0
            stall += config.cost
    for n in range(routed.shape[0]):
        k = base + routed[n]
        tally.uses[k] += 1
        if rules.policy == LRU:
            pool.value[k] = position + n / routed.shape[0]
        elif rules.policy == LFU:
            pool.value[k] = tally.uses[k] + 1e-10 * position  # the least recently used among equals
        elif rules.policy == BELADY:
            pool.value[k] = -signals.next_use[t, layer, n]
        elif rules.policy == BELADY_8:
            tally.last_use[k], tally.next_use[k] = position, signals.next_use[t, layer, n]
            sees = signals.next_use[t, layer, n] - position <= HORIZON_8 * layers
            pool.value[k] = -signals.next_use[t, layer, n] if sees else position - FAR
    if config.scheduler != NONE:
        run_link(pool, link, moved, config, position, 1.0)
    tally.time[0] += stall + 1


@compiled
@no_type_check
def forget(moved, tally):
    """The counted part begins."""
    moved.prefetched[0] = 0.0
    moved.unused[0] = 0.0
    moved.demanded[0] = 0.0
    tally.time[0] = 0.0
    tally.routed[0] = 0
    tally.steps[0] = 0
    for layer in range(tally.hits.shape[0]):
        tally.hits[layer] = 0


@compiled
@no_type_check
def load(pool, moved, k, position):
    """A demand miss: an EMPTY slot, else the USED one of the lowest value, else a landed prefetch."""
    s = find_empty(pool)
    if s < 0:
        s = find_victim(pool, position, USED)
        if s < 0:
            s = find_victim(pool, position, COMPUTE)
        moved.unused[0] += vacate(pool, s)
    place(pool, s, k, USED)
    moved.demanded[0] += 1


@compiled
@no_type_check
def value_pending(probability, retention, keep, value, first_key):
    """Values of the experts whose layer is still to come: needed in this step, or kept for later ones."""
    for k in range(first_key, value.shape[0]):
        value[k] = probability[k] + keep * retention[k]


@compiled
@no_type_check
def value_within_horizon(tally, value, position, horizon):
    """Policy `belady-8`: by next use where it is in sight; what is not goes first, the least recently used of it."""
    for k in range(value.shape[0]):
        if tally.next_use[k] - position <= horizon:
            value[k] = -tally.next_use[k]
        else:
            value[k] = tally.last_use[k] - FAR


@compiled
@no_type_check
def plan(pool, link, rules, config, first, signals, t, step, layer):
    """A new queue after a forecast: this step from `layer` on by `first`, then the steps beyond it."""
    link.size[0] = 0
    add_tasks(pool, link, first, rules.tasks_per_layer, rules.threshold, step, layer, config.layers, config.layers)
    if layer > 0 and signals.early.shape[0] > 0:
        add_tasks(
            pool, link, signals.early[t], rules.tasks_per_layer, rules.threshold, step + 1, 0, layer, config.layers
        )
    for ahead in range(rules.horizon):
        add_tasks(
            pool,
            link,
            signals.ahead[t, ahead],
            rules.tasks_per_layer,
            rules.reach,
            step + 1 + ahead,
            layer if ahead == 0 and signals.early.shape[0] > 0 else 0,
            config.layers,
            config.layers,
        )


@compiled
@no_type_check
def add_tasks(pool, link, probability, per_layer, threshold, step, first_layer, stop_layer, layers):
    """Paper 6.1: the likeliest experts of each layer become tasks unless they have a slot, in order of deadline."""
    experts = pool.slot.shape[0] // layers
    n = link.size[0]
    for layer in range(first_layer, stop_layer):
        base, last, at = layer * experts, np.inf, -1
        for _ in range(min(per_layer, experts)):
            best, top = -1, -1.0
            for k in range(base, base + experts):
                p = probability[k]
                # The next in descending order; equals in order of expert.
                if (p < last or (p == last and k > at)) and p > top:
                    best, top = k, p
            if best < 0 or top < threshold:
                break
            last, at = top, best
            if pool.slot[best] == NOWHERE and n < link.key.shape[0]:
                link.key[n], link.confidence[n], link.deadline[n] = best, top, step * layers + layer
                n += 1
    link.size[0] = n
