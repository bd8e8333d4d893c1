"""Algorithm 1 and its baselines: the paper's worked example, brute force, and speed."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_jax.prefetch.schedule import Budget, feasible_set, select_task
from seqmoe_jax.prefetch.tasks import Tasks, tasks_of

# Table 2 of the paper: six candidates, and how many transfers end before each deadline.
NAMES = np.array(list("ABCDEF"))
CONFIDENCE = np.array([0.55, 0.90, 0.40, 0.75, 0.70, 0.30])
DEADLINE = np.array([1, 2, 2, 3, 3, 3])
CAPACITY = {1: 1, 2: 3, 3: 4}


def make_tasks(confidence, deadline) -> Tasks:
    n = len(confidence)
    return Tasks(
        key=np.arange(n),
        confidence=np.asarray(confidence, np.float64),
        deadline=np.asarray(deadline, np.int64),
        slot=np.full(n, -1),
        tag=np.arange(n),
    )


def transferred_in_table_2(scheduler) -> str:
    """What a score-based prefetcher moves, one transfer at a time, until every deadline has passed."""
    left, moved = list(range(6)), ""
    for done in range(CAPACITY[3]):
        position = min(d for d in CAPACITY if CAPACITY[d] > done) - 1
        tasks = make_tasks(CONFIDENCE[left], DEADLINE[left])
        budget = Budget(average=1.0, current=1.0)
        at = select_task(tasks, position=position, budget=budget, scheduler=scheduler, layers=24, lead=0)
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
    confidence = data.draw(st.lists(st.floats(0.015625, 1, width=32), min_size=n, max_size=n, unique=True))
    deadline = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    budget = Budget(
        average=data.draw(st.sampled_from([0.25, 1.0, 1.5])), current=data.draw(st.sampled_from([-1.0, 0.4, 2.0]))
    )
    tasks = make_tasks(confidence, deadline)
    position = 2
    at = select_task(tasks, position=position, budget=budget)
    live = np.flatnonzero(tasks.deadline > position + 1)
    if not live.size:
        assert at is None
        return
    assert at is not None
    capacity = max(1, budget.current) + budget.average * (tasks.deadline[live] - position - 1)
    chosen = live[feasible_set(tasks.confidence[live], tasks.deadline[live], capacity)]
    assert at in chosen
    assert tasks.deadline[at] == tasks.deadline[chosen].min()


def test_budget_is_the_moving_average_of_transfers_per_layer():
    budget = Budget(average=2.0, current=2.0).after_transfer()
    assert budget.current == 1.0
    assert budget.at_next_layer() == Budget(average=1.9, current=1.9)  # 0.9 * 2.0 + 0.1 * (one transfer)
    for _ in range(200):
        for _ in range(3):
            budget = budget.after_transfer()
        budget = budget.at_next_layer()
    assert budget.average == pytest.approx(3.0)


def test_budget_learns_nothing_from_a_layer_without_tasks():
    idle = Budget(average=2.0, current=2.0)
    for _ in range(1000):
        idle = idle.at_next_layer(queue_ran_dry=True)
    assert idle.average == 2.0


def test_tasks_of_a_forecast():
    probability = np.array([[0.9, 0.05, 0.6, 0.2], [0.1, 0.8, 0.7, 0.3]])
    tasks = tasks_of(probability, resident=np.array([0, 6]), step=10, per_layer=3, threshold=0.15, first_tag=5)
    assert tasks.key.tolist() == [2, 3, 5, 7]
    assert tasks.deadline.tolist() == [20, 20, 21, 21]
    assert tasks.confidence.tolist() == [0.6, 0.2, 0.8, 0.3]
    assert tasks.tag.tolist() == [5, 6, 7, 8]


def test_500_tasks_take_under_100_microseconds():
    rng = np.random.default_rng(0)
    tasks = make_tasks(rng.random(500), np.sort(rng.integers(2, 48, 500)))
    budget = Budget(average=1.4, current=1.4)
    best = np.inf
    for _ in range(200):
        start = time.perf_counter()
        select_task(tasks, position=0, budget=budget)
        best = min(best, time.perf_counter() - start)
    assert best < 100e-6
