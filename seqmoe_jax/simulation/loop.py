"""Replays a trace through pool and link: the compiled loop over steps and layers.

The time model: a step takes L units of compute; routing comes at the start of a layer; experts that are missing then
are loaded one after the other, RHO each, after what is in flight has yielded, while compute waits; prefetches run
during compute alone. A hit is a routed expert that is resident when its layer starts.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.simulation.counters import Counters, new_counters, reset
from seqmoe_jax.simulation.link import SimulatedLink, drop, interrupt, land, new_link, next_layer, run_link
from seqmoe_jax.simulation.pool import FETCH, NOWHERE, SimulatedPool, load, new_pool, release
from seqmoe_jax.simulation.rules import BELADY_8, HISTORY, NONE, SCORED, Rules
from seqmoe_jax.simulation.tasks import plan
from seqmoe_jax.simulation.trust import Trust, learn_from_step, new_trust
from seqmoe_jax.simulation.values import Uses, new_uses, value_by_history, value_in_sight, value_pending, value_used


class SimulationState(NamedTuple):
    """What a simulation changes, in place."""

    pool: SimulatedPool
    link: SimulatedLink
    uses: Uses
    counters: Counters
    trust: Trust


def new_state(slots: int, keys: int, rules: Rules) -> SimulationState:
    """An empty pool and an idle link."""
    queue = rules.tasks_per_layer * rules.layers * (2 + rules.horizon)
    return SimulationState(
        pool=new_pool(slots, keys),
        link=new_link(queue, rules.cost),
        uses=new_uses(keys),
        counters=new_counters(rules.layers),
        trust=new_trust(keys, rules.threshold),
    )


@compiled
@no_type_check
def replay(ids, first_step, rules, signals, state):
    """Steps first_step, first_step + 1, ... of the simulation; `ids` is [t, L, K], `signals` is `signals.Signals` of
    the same t steps."""
    pool, link, uses, counters, trust = state
    experts = pool.slot.shape[0] // rules.layers
    for t in range(ids.shape[0]):
        step = first_step + t
        if step == rules.skip:
            reset(counters)
            trust.ran[0], trust.seen[:] = 0, 0
        following = not rules.guard or (trust.followed[0] and trust.resting[0] == 0)
        threshold = trust.threshold[0] if rules.guard else rules.threshold
        if not following:
            pool.value[:] = trust.history
            link.size[0] = 0
        elif rules.policy == SCORED:
            value_pending(pool.value, signals.next[t], signals.retention[t], rules.keep, 0)
        elif rules.policy == BELADY_8:
            value_in_sight(pool.value, uses, step * rules.layers, rules.layers)
        if rules.scheduler != NONE and following:
            plan(pool, link, rules, threshold, signals.next[t], signals, t, step, 0)
        for layer in range(rules.layers):
            if layer == rules.trigger and following:
                if rules.policy == SCORED:
                    value_pending(pool.value, signals.refined[t], signals.retention[t], rules.keep, layer * experts)
                if rules.scheduler != NONE:
                    plan(pool, link, rules, threshold, signals.refined[t], signals, t, step, layer)
            run_layer(ids[t, layer], t, step, layer, rules, signals, state, following)
        if rules.policy == HISTORY:
            value_by_history(pool.value, ids[t], rules.layers)
        if rules.guard:
            slots, used, unused = pool.key.shape[0], counters.used[0], counters.unused[0]
            learn_from_step(trust, signals.retention[t], slots, ids[t], rules, used, unused)
        counters.steps[0] += 1


@compiled
@no_type_check
def run_layer(routed, t, step, layer, rules, signals, state, following):
    """The layer's routing is known: counts hits, loads what is missing, computes."""
    pool, link, uses, counters, _ = state
    experts = pool.slot.shape[0] // rules.layers
    base, position = layer * experts, step * rules.layers + layer
    if rules.scheduler != NONE:
        next_layer(link, rules)
    if rules.policy == SCORED and following:
        # This layer's turn in this step has come: from here on only later steps give its experts value.
        pool.value[base : base + experts] = signals.retention[t, base : base + experts]
    misses, in_flight = look_up(pool, counters, routed, base, layer, position)
    release(pool, base, base + experts, position)
    stall = settle_flight(pool, link, counters, rules, misses, in_flight, position)
    for expert in routed:
        k = base + expert
        if pool.slot[k] == NOWHERE:
            load(pool, counters, k, position)
            uses.since_load[k] = 0
            stall += rules.cost
    value_used(pool.value, uses, rules, routed, signals, t, layer, position)
    if rules.scheduler != NONE:
        run_link(pool, link, counters, rules, position, 1.0)
    counters.time[0] += stall + 1


@compiled
@no_type_check
def look_up(pool, counters, routed, base, layer, position):
    """How many routed experts have no slot, and whether one is in flight; the others are hits."""
    misses, in_flight = 0, False
    for expert in routed:
        k = base + expert
        pool.locked[k] = position
        s = pool.slot[k]
        if s == NOWHERE:
            misses += 1
        elif pool.state[s] == FETCH:
            in_flight = True
        else:
            counters.hits[layer] += 1
            counters.used[0] += pool.untouched[s]
            pool.untouched[s] = False
    counters.routed[0] += routed.shape[0]
    return misses, in_flight


@compiled
@no_type_check
def settle_flight(pool, link, counters, rules, misses, in_flight, position):
    """What the layer makes of the transfer in flight: it awaits a routed expert, interrupts any other for a miss, and
    gives up one that comes too late. Returns the stall."""
    stall = 0.0
    if in_flight:
        stall = link.left[0]
        slot = link.flying[1]
        land(pool, link, counters, rules, position)
        counters.used[0] += 1
        pool.untouched[slot] = False
    elif link.flying[0] >= 0:
        if misses:
            stall = interrupt(pool, link, counters, rules, position)
        if link.flying[0] >= 0 and rules.chunks > 1 and link.flying[2] <= position:
            drop(pool, link, counters, rules)  # its layer runs now, and without it
    return stall
