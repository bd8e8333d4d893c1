"""Claims about the transfer worker, with the C library's memmove in the place of the CUDA driver."""

import ctypes
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.plan_tasks import CONFIDENCE_UNIT, PlanConfig
from pallas_kernels.slot_update import PROGRESS_UNIT
from seqmoe_jax.prefetch.compiled import address_of
from seqmoe_jax.prefetch.dma import Dma
from seqmoe_jax.prefetch.engine import EngineConfig, Faults, host_view
from seqmoe_jax.prefetch.worker import Calls

LAYERS, EXPERTS, SLOTS, BYTES, TASKS = 4, 6, 10, 5 << 20, 5


@pytest.fixture(scope="module")
def calls():
    words = [ctypes.c_size_t] * 4

    def move(target, source, size, stream):
        ctypes.memmove(target, source, size)
        return 0

    functions = [
        ctypes.CFUNCTYPE(ctypes.c_int, *words)(move),
        ctypes.CFUNCTYPE(ctypes.c_int, *words[:2])(lambda event, stream: 0),
        ctypes.CFUNCTYPE(ctypes.c_int, *words[:1])(lambda event: 0),
    ]
    copy, record, query = map(address_of, functions)
    yield Calls(copy=copy, record=record, query=query)
    del functions  # alive until here


class Step:
    """The step's side of the conversation, played by hand."""

    def __init__(self, calls, **options):
        pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        rng = np.random.default_rng(0)
        self.pools = tuple(
            jax.device_put(rng.integers(0, 255, (EXPERTS, BYTES), dtype=np.uint8), pinned) for _ in range(LAYERS)
        )
        self.blocks = jnp.zeros((SLOTS, BYTES), jnp.uint8)
        plan = PlanConfig(layers=LAYERS, experts=EXPERTS, tasks=TASKS)
        config = EngineConfig(plan=plan, expert_bytes=BYTES, slots=SLOTS, **options)
        self.engine = Dma(self.pools, jax.devices()[0], config, calls=calls)
        self.number = 0
        self.at(0)
        self.engine.start(self.blocks)

    def at(self, position, misses=0):
        self.engine._progress_view[0] = position * PROGRESS_UNIT + misses

    def post(self, base, *tasks):
        """Tasks as (key, confidence, deadline, slot, tag)."""
        self.number += TASKS
        rows = np.full((5, TASKS), -1, np.int32)
        for column, (key, confidence, deadline, slot, tag) in enumerate(tasks):
            rows[:, column] = key, int(confidence * CONFIDENCE_UNIT), deadline, slot, tag
        values = np.concatenate([[base], rows.reshape(-1)]).astype(np.int32)
        with np.errstate(over="ignore"):
            check = np.int32(self.number) + values.sum(dtype=np.int32)
        self.engine._board_view[1 : 1 + len(values)] = values
        self.engine._board_view[1 + len(values)] = check
        self.engine._board_view[0] = self.number

    def answers(self, *slots, timeout=5.0):
        """What the worker has answered for the slots, once nothing of it is under way or unanswered."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < timeout:
            answers = [self.answer(slot) for slot in slots]
            if all(answer != 0 and answer < 1 << 29 for answer in answers):
                return answers
            time.sleep(1e-3)
        raise AssertionError(f"no answer: {answers}")

    def answer(self, slot):
        """As the device sees it."""
        return int(host_view(self.engine._landed)[slot])

    def expert(self, slot):
        return host_view(self.blocks)[slot]

    def source(self, key):
        return host_view(self.pools[key // EXPERTS])[key % EXPERTS]


@pytest.fixture
def step(calls):
    step = Step(calls)
    yield step
    step.engine.close()


def test_what_a_plan_asks_for_lies_in_its_slot_when_its_tag_appears(step):
    step.post(0, (13, 0.9, 2, 4, 1), (7, 0.8, 1, 6, 2))
    assert step.answers(4, 6) == [1, 2]
    np.testing.assert_array_equal(step.expert(4), step.source(13))
    np.testing.assert_array_equal(step.expert(6), step.source(7))
    assert step.engine.moved().landed == 2
    assert step.engine.moved().bytes == 2 * BYTES


def test_tasks_that_are_late_or_not_wanted_are_given_back(step):
    step.at(3)
    step.post(0, (13, 0.9, 2, 4, 1), (7, 0.0, 9, 6, 2), (8, 0.5, 9, 7, 3))
    assert step.answers(4, 6, 7) == [-1, -2, 3]
    assert step.engine.moved().late == 2


def test_a_task_of_a_later_step_outlives_its_layer_in_the_running_one(step):
    step.engine.inject(Faults(delay_s=0.05))
    step.post(0, (7, 0.8, 1 + LAYERS, 6, 2))
    while not step.answer(6):
        time.sleep(1e-3)
    for position in (1, 2, 3):
        step.at(position)
        time.sleep(5e-3)
    assert step.answers(6) == [2]
    assert (step.engine.moved().landed, step.engine.moved().given_up) == (1, 0)


def test_a_plan_read_twice_is_answered_once(step):
    step.post(0, (13, 0.9, 2, 4, 1))
    assert step.answers(4) == [1]
    host_view(step.blocks)[4] = 0
    step.post(0, (13, 0.9, 2, 4, 1), (8, 0.5, 9, 7, 3))
    assert step.answers(7) == [3]
    assert not step.expert(4).any()


def test_a_board_that_is_being_written_is_not_read(step):
    step.post(0, (13, 0.9, 2, 4, 1))
    step.answers(4)
    step.engine._board_view[1 + 1 + TASKS] += 1  # a word that does not add up
    step.engine._board_view[0] += TASKS
    time.sleep(0.05)
    assert step.engine._counts[3] == 1  # plans read


def test_pausing_gives_back_what_is_under_way_and_starting_forgets_old_plans(step):
    step.engine.inject(Faults(throttle_s=0.2))
    step.post(0, (13, 0.9, 2, 4, 1))
    while not step.answer(4):
        time.sleep(1e-3)
    step.engine.pause()
    assert step.answer(4) == -1
    assert step.engine.moved().given_up == 1
    step.engine.inject(Faults())
    step.engine.start(step.blocks)
    time.sleep(0.05)
    assert not host_view(step.engine._landed).any()


def test_dropped_transfers_are_given_back(step):
    step.engine.inject(Faults(drop_every=2))
    step.post(0, (13, 0.9, 2, 4, 1), (7, 0.8, 1, 6, 2))
    assert sorted(np.sign(step.answers(4, 6))) == [-1, 1]
    assert (step.engine.moved().landed, step.engine.moved().dropped) == (1, 1)


def test_a_worker_that_dies_is_noticed_and_nobody_waits_for_it(step):
    step.engine.kill()
    time.sleep(0.1)
    host_view(step.engine._landed)[3] = 77 + (1 << 30)
    for _ in range(64):
        step.engine.link()
    assert "stopped" in step.engine.fault()
    assert step.engine.fault() is None
    assert not host_view(step.engine._landed).any()


def test_a_slot_array_that_moves_stops_everything(step):
    with pytest.raises(RuntimeError, match="moved"):
        step.engine.check(jnp.ones((SLOTS, BYTES), jnp.uint8))


def test_the_surest_task_goes_first_among_those_that_cannot_all_be_done(calls):
    # RHO is 8 to begin with: about one transfer fits before position 9.
    step = Step(calls)
    step.engine._rates[:] = [8e6, 1e6]
    step.engine._budget[:] = 1 / 8
    step.engine.inject(Faults(delay_s=0.03))
    step.post(0, (13, 0.3, 9, 4, 1), (7, 0.9, 9, 6, 2))
    begun = time.perf_counter()
    while not step.answer(6) and time.perf_counter() - begun < 5:
        time.sleep(1e-4)
    assert step.answer(4) == 0
    step.engine.close()
