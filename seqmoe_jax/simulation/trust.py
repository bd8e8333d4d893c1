"""How far a predictor is followed, by what is seen of it while it runs, so that it never costs more than it gives.

Three measures, each from what is known at the end of a step:

* **Eviction.** A score that keeps what will be needed has the experts of the next step but one among its S highest, S
  being the number of slots. While the retention score has fewer of them there than history had at that time, experts
  are kept by history and nothing is prefetched.
* **Prefetching.** Transfers that left before anything used them raise the least confidence of a task, those that were
  used lower it again, down to where it began. Above 1 there are no tasks.
* **The predictor.** After `PATIENCE` steps of distrust it stops; it is tried again, unseen at first, after a rest that
  doubles each time. Policy and link are then those of a model without one.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import compiled
from seqmoe_jax.simulation.values import value_by_history

MEMORY = 1 / 32  # weight of a step in the running shares
MARGIN = 0.005  # by which a forecast that is not followed must be better than history to be followed again
SHARE_USED = 0.15  # of what is prefetched: where fewer are used the threshold rises
RAISE = 0.01  # of the threshold, for one transfer more than that which was not used
RETURN = 1 / 1024  # of its way back down in a step
PATIENCE, REST, MOST_REST = 64, 256, 4096  # steps


class Trust(NamedTuple):
    """What is remembered; the simulation changes it in place."""

    history: np.ndarray  # float64[L*E]: as policy `history` scores
    before: np.ndarray  # float64[2, L*E]: retention and history, as they were a step ago
    kept: np.ndarray  # float64[2]: running share of routed experts that forecast and history would have kept
    followed: np.ndarray  # bool[1]: by eviction, and by prefetching up to its threshold
    threshold: np.ndarray  # float64[1]
    distrusted: np.ndarray  # int64[1]: steps since the forecast was followed, or tried again
    resting: np.ndarray  # int64[2]: steps left until the predictor is tried again; the length of the next rest
    ran: np.ndarray  # int64[1]: counted steps in which the predictor ran
    seen: np.ndarray  # float64[2]: prefetched experts that were used, and that left unused, up to the last step


def new_trust(keys: int, threshold: float) -> Trust:
    return Trust(
        history=np.zeros(keys),
        before=np.zeros((2, keys)),
        kept=np.zeros(2),
        followed=np.ones(1, bool),
        threshold=np.full(1, threshold),
        distrusted=np.zeros(1, np.int64),
        resting=np.array([0, REST]),
        ran=np.zeros(1, np.int64),
        seen=np.zeros(2),
    )


@compiled
@no_type_check
def learn_from_step(trust, retention, slots, routed, rules, used, unused):
    """After a step that `routed` [L, K] and before which `retention` was said; prefetches used, and not, so far."""
    if trust.resting[0] > 0:
        trust.resting[0] -= 1
    else:
        trust.ran[0] += 1
        weight = MEMORY if trust.kept[1] > 0 else 1.0
        trust.kept[0] += weight * (share_kept(trust.before[0], slots, routed) - trust.kept[0])
        trust.kept[1] += weight * (share_kept(trust.before[1], slots, routed) - trust.kept[1])
        judge(trust)
    trust.before[0], trust.before[1] = retention, trust.history
    value_by_history(trust.history, routed, rules.layers)
    turn(trust, rules.threshold, used, unused)


@compiled
@no_type_check
def share_kept(score, slots, routed):
    """Of the routed experts, those among the `slots` highest scores."""
    experts = score.shape[0] // routed.shape[0]
    least, found = np.sort(score)[-slots], 0
    for layer in range(routed.shape[0]):
        for expert in routed[layer]:
            found += 0 < score[layer * experts + expert] >= least  # of what nothing is known nothing is kept
    return found / routed.size


@compiled
@no_type_check
def judge(trust):
    """Follows, waits, or sends the predictor to rest."""
    needed = 0.0 if trust.followed[0] else MARGIN
    trust.followed[0] = trust.kept[0] >= trust.kept[1] + needed
    if trust.followed[0]:
        trust.distrusted[0], trust.resting[1] = 0, REST
        return
    trust.distrusted[0] += 1
    if trust.distrusted[0] >= PATIENCE:
        trust.resting[0] = trust.resting[1]
        trust.resting[1] = min(2 * trust.resting[1], MOST_REST)
        trust.distrusted[0] = 0
        trust.kept[:] = 0.0  # a new trial has a new record


@compiled
@no_type_check
def turn(trust, least, used, unused):
    """The threshold, by what has become of prefetched experts since the last step."""
    good, bad = used - trust.seen[0], unused - trust.seen[1]
    trust.seen[0], trust.seen[1] = used, unused
    trust.threshold[0] += RAISE * (SHARE_USED * (good + bad) - good) / (1 - SHARE_USED)
    trust.threshold[0] -= RETURN * (trust.threshold[0] - least)
    trust.threshold[0] = min(max(trust.threshold[0], least), 1.5)
