"""The simulated queue of prefetch tasks: filled after a forecast, emptied by the link.

Its arrays are those of `link.SimulatedLink`; they are in order of deadline. A position is step * L + layer.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.prefetch.schedule import select_moe_infinity, select_promoe, select_seqmoe
from seqmoe_jax.simulation.pool import NOWHERE
from seqmoe_jax.simulation.rules import MOE_INFINITY, SEQMOE


@compiled
@no_type_check
def plan(pool, link, rules, threshold, first, signals, t, step, layer):
    """A new queue after a forecast: this step from `layer` on by `first`, then the steps beyond it."""
    link.size[0] = 0
    layers, early = rules.layers, signals.early.shape[0] > 0
    add_tasks(pool, link, rules, first, threshold, step, layer, layers)
    if layer > 0 and early:
        add_tasks(pool, link, rules, signals.early[t], threshold, step + 1, 0, layer)
    for i in range(rules.horizon):
        covered = layer if i == 0 and early else 0
        add_tasks(pool, link, rules, signals.ahead[t, i], rules.reach, step + 1 + i, covered, layers)


@compiled
@no_type_check
def add_tasks(pool, link, rules, probability, threshold, step, first_layer, stop_layer):
    """Paper 6.1: the likeliest experts of each layer become tasks unless they have a slot, in order of deadline."""
    layers = rules.layers
    experts = pool.slot.shape[0] // layers
    n = link.size[0]
    for layer in range(first_layer, stop_layer):
        base, last, at = layer * experts, np.inf, -1
        for _ in range(min(rules.tasks_per_layer, experts)):
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
def choose(link, rules, position, elapsed):
    """Index of the task to transfer next, -1 where there is none, `elapsed` after the layer at `position` began.

    With `rules.late` the scheduler is Algorithm 1 over the stall that each task is expected to save: a transfer that
    starts too late to be complete still shortens the wait by what it has moved.
    """
    n, due = link.size[0], position + 1
    current, average = link.budget[1], link.budget[0]
    if rules.late:
        for i in range(n):
            link.saving[i] = link.confidence[i] * min(1.0, (link.deadline[i] - position - elapsed) / rules.cost)
        return select_seqmoe(link.saving, link.deadline, n, position, position, current, average, link.kept)
    if rules.scheduler == SEQMOE:
        return select_seqmoe(link.confidence, link.deadline, n, position, due, current, average, link.kept)
    if rules.scheduler == MOE_INFINITY:
        return select_moe_infinity(link.confidence, link.deadline, n, position, due, rules.layers)
    return select_promoe(link.confidence, link.deadline, n, due)
