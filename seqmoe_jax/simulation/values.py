"""What a resident expert is worth under each policy; the least is evicted first."""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.simulation.rules import BELADY, BELADY_8, LFU, LRU
from seqmoe_jax.simulation.settings import HISTORY_DECAY

FAR = 1 << 40  # position of a use that never comes
SIGHT = 8  # steps that policy `belady-8` knows


class Uses(NamedTuple):
    """What the policies that need no forecasts remember, or know, of each key's uses."""

    since_load: np.ndarray  # int64[L*E]: uses since the key was loaded
    last: np.ndarray  # int64[L*E]: position
    next: np.ndarray  # int64[L*E]: position, known to `belady` and `belady-8`


def new_uses(keys: int) -> Uses:
    return Uses(since_load=np.zeros(keys, np.int64), last=np.zeros(keys, np.int64), next=np.zeros(keys, np.int64))


@compiled
@no_type_check
def value_pending(value, probability, retention, keep, first_key):
    """SCORED: experts whose layer is still to come are needed in this step, or kept for later ones."""
    for k in range(first_key, value.shape[0]):
        value[k] = probability[k] + keep * retention[k]


@compiled
@no_type_check
def value_in_sight(value, uses, position, layers):
    """BELADY_8: by next use where it is in sight; what is not goes first, the least recently used of it."""
    for k in range(value.shape[0]):
        if uses.next[k] - position <= SIGHT * layers:
            value[k] = -uses.next[k]
        else:
            value[k] = uses.last[k] - FAR


@compiled
@no_type_check
def value_by_history(value, routed, layers):
    """HISTORY, after a step that `routed` [L, K]: a discounted frequency of use."""
    experts = value.shape[0] // layers
    value *= HISTORY_DECAY
    for layer in range(layers):
        for expert in routed[layer]:
            value[layer * experts + expert] += 1 - HISTORY_DECAY


@compiled
@no_type_check
def value_used(value, uses, rules, routed, signals, t, layer, position):
    """The experts `routed` (ids within the layer) have been used at `position`; t is the row of `signals`."""
    base, active = layer * (value.shape[0] // rules.layers), routed.shape[0]
    for n in range(active):
        k = base + routed[n]
        uses.since_load[k] += 1
        if rules.policy == LRU:
            value[k] = position + n / active
        elif rules.policy == LFU:
            value[k] = uses.since_load[k] + 1e-10 * position  # the least recently used among equals
        elif rules.policy == BELADY:
            value[k] = -signals.next_use[t, layer, n]
        elif rules.policy == BELADY_8:
            uses.last[k], uses.next[k] = position, signals.next_use[t, layer, n]
            value[k] = -uses.next[k] if uses.next[k] - position <= SIGHT * rules.layers else position - FAR
