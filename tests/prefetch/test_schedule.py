"""Algorithm 1 and its baselines: the paper's worked example, and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_jax.prefetch.schedule import ALPHA, SCHEDULERS, choose, next_average, offer
from seqmoe_jax.prefetch.tasks import TASK, add, remove

# Table 2 of the paper: six candidates, and how many transfers end before each deadline.
NAMES = np.array(list("ABCDEF"))
CONFIDENCE = np.array([0.55, 0.90, 0.40, 0.75, 0.70, 0.30])
DEADLINE = np.array([1, 2, 2, 3, 3, 3])
CAPACITY = {1: 1, 2: 3, 3: 4}


def listed(confidence, deadline):
    """Tasks whose key says which they are, and their number."""
    tasks, size = np.zeros(len(confidence), TASK).view(np.recarray), 0
    for key, (sure, due) in enumerate(zip(confidence, deadline, strict=True)):
        size = add(tasks, size, key, float(sure), int(due), -1, key)
    return tasks, size


def chosen_key(confidence, deadline, *, scheduler="seqmoe", position, average=1.0, current=1.0, layers=24):
    tasks, size = listed(confidence, deadline)
    at = choose(SCHEDULERS[scheduler], tasks, size, position, 1e-9, average, current, layers)
    return None if at < 0 else int(tasks[at].key)


def feasible_set(confidence, deadline, capacity):
    """What the greedy of Algorithm 1 keeps, as a mask."""
    order = np.argsort(deadline, kind="stable")
    kept, size = np.empty(len(order), np.int64), 0
    for i in range(len(order)):
        size = offer(kept, size, i, capacity[order[i]], confidence[order], deadline[order])
    chosen = np.zeros(len(order), bool)
    chosen[order[kept[:size]]] = True
    return chosen


def transferred_in_table_2(scheduler) -> str:
    """What a score-based prefetcher moves, one transfer at a time, until every deadline has passed."""
    left, moved = list(range(6)), ""
    for done in range(CAPACITY[3]):
        position = min(d for d in CAPACITY if CAPACITY[d] > done) - 1
        at = chosen_key(CONFIDENCE[left], DEADLINE[left], scheduler=scheduler, position=position)
        moved += NAMES[left.pop(at)]
    return "".join(sorted(moved))


def test_table_2_of_the_paper():
    chosen = feasible_set(CONFIDENCE, DEADLINE, np.array([CAPACITY[d] for d in DEADLINE], float))
    assert "".join(NAMES[chosen]) == "ABDE"


@pytest.mark.parametrize(("scheduler", "moved"), [("moe-infinity", "BDEF"), ("promoe", "ABCD")])
def test_table_2_baselines(scheduler, moved):
    assert transferred_in_table_2(scheduler) == moved


def brute_force(confidence, deadline, capacity) -> float:
    best = 0.0
    for chosen in itertools.product([False, True], repeat=len(confidence)):
        mask = np.array(chosen)
        if all((mask & (deadline <= d)).sum() <= c for d, c in zip(deadline, capacity, strict=True)):
            best = max(best, float(confidence[mask].sum()))
    return best


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_set_is_optimal(data):
    n = data.draw(st.integers(1, 7))
    confidence = np.array(data.draw(st.lists(st.integers(1, 20), min_size=n, max_size=n)), float) / 20
    deadline = np.array(data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n)))
    growth = np.array(data.draw(st.lists(st.sampled_from([0, 0, 0.5, 1, 2]), min_size=6, max_size=6)), float)
    capacity = np.cumsum(growth)[deadline] + data.draw(st.sampled_from([1.0, 1.5]))
    chosen = feasible_set(confidence, deadline, capacity)
    for d, c in zip(deadline, capacity, strict=True):
        assert (chosen & (deadline <= d)).sum() <= c
    assert confidence[chosen].sum() == pytest.approx(brute_force(confidence, deadline, capacity))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_selected_task_is_the_earliest_of_the_optimal_set(data):
    n = data.draw(st.integers(0, 10))
    confidence = np.array(
        data.draw(st.lists(st.floats(0.015625, 1, width=32), min_size=n, max_size=n, unique=True)), float
    )
    deadline = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), np.int64)
    average, current = data.draw(st.sampled_from([0.25, 1.0, 1.5])), data.draw(st.sampled_from([-1.0, 0.4, 2.0]))
    position = 2
    key = chosen_key(confidence, deadline, position=position, average=average, current=current)
    live = np.flatnonzero(deadline > position)
    if not live.size:
        assert key is None
        return
    capacity = max(1, current) + average * (deadline[live] - position - 1)
    chosen = live[feasible_set(confidence[live], deadline[live], capacity)]
    assert key in chosen
    assert deadline[key] == deadline[chosen].min()


def test_a_transfer_that_cannot_be_complete_counts_for_the_part_that_can():
    # One transfer fits before position 4. At RHO 4 the first task can save no more than a quarter of a transfer.
    tasks, size = listed([0.9, 0.5], [1, 4])
    assert tasks[choose(0, tasks, size, 0, 1.0, 1e-3, 1.0, 24)].key == 0
    assert tasks[choose(0, tasks, size, 0, 4.0, 1e-3, 1.0, 24)].key == 1


def test_tasks_stay_in_order_of_deadline_and_of_their_coming():
    tasks, size = listed([0.1, 0.2, 0.3, 0.4], [7, 5, 7, 6])
    assert tasks.key[:size].tolist() == [1, 3, 0, 2]
    size = remove(tasks, size, 1)
    assert tasks.key[:size].tolist() == [1, 0, 2]


def test_budget_is_the_moving_average_of_transfers_per_layer():
    average = next_average(2.0, 2.0 - 1, ALPHA, False)
    assert average == pytest.approx(1.9)  # 0.9 * 2.0 + 0.1 * (one transfer)
    for _ in range(200):
        average = next_average(average, average - 3, ALPHA, False)
    assert average == pytest.approx(3.0)


def test_budget_learns_nothing_from_a_layer_without_tasks():
    average = 2.0
    for _ in range(1000):
        average = next_average(average, average, ALPHA, True)
    assert average == 2.0
