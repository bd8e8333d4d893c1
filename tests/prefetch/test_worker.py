"""Claims about the transfer worker, with the C library's memmove in the place of the CUDA driver."""

import ctypes
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.plan_tasks import BASE, CHECK, CONFIDENCE_UNIT, FIRST_TASK, NUMBER, PlanConfig
from pallas_kernels.slot_update import PROGRESS_UNIT, UNDER_WAY
from scripts.checks.faults import FAILED, Faults, injected
from seqmoe_jax.host_memory import host_view
from seqmoe_jax.prefetch.compiled import address_of
from seqmoe_jax.prefetch.dma import Calls, Dma
from seqmoe_jax.prefetch.engine import EngineConfig

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
    yield Calls(*map(address_of, functions))
    del functions  # alive until here


class Step:
    """The step's side of the conversation, played by hand."""

    def __init__(self, calls):
        pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        rng = np.random.default_rng(0)
        self.pools = tuple(
            jax.device_put(rng.integers(0, 255, (EXPERTS, BYTES), dtype=np.uint8), pinned) for _ in range(LAYERS)
        )
        self.blocks = jnp.zeros((SLOTS, BYTES), jnp.uint8)
        plan = PlanConfig(layers=LAYERS, experts=EXPERTS, tasks=TASKS)
        config = EngineConfig(plan=plan, expert_bytes=BYTES, slots=SLOTS)
        self.engine = Dma(self.pools, jax.devices()[0], config, calls=calls)
        link = self.engine.link()
        self.board, self.progress = host_view(link.board), host_view(link.progress)
        self.number = 0
        self.at(0)
        self.engine.start(self.blocks)

    def at(self, position, misses=0):
        self.progress[0] = position * PROGRESS_UNIT + misses

    def plan(self, *tasks):
        """Writes a plan of tasks (key, confidence, deadline, slot, tag)."""
        self.number += TASKS
        rows = np.full((5, TASKS), -1, np.int32)
        for column, (key, confidence, deadline, slot, tag) in enumerate(tasks):
            rows[:, column] = key, int(confidence * CONFIDENCE_UNIT), deadline, slot, tag
        with np.errstate(over="ignore"):
            check = np.int32(self.number) + rows.sum(dtype=np.int32)
        self.board[FIRST_TASK:] = rows.reshape(-1)
        self.board[[BASE, CHECK]] = 0, check
        self.board[NUMBER] = self.number

    def tags(self, *slots, timeout=5.0):
        """The tags of the slots, once nothing of them is under way or to come."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < timeout:
            tags = [self.tag(slot) for slot in slots]
            if all(tag != 0 and tag < UNDER_WAY for tag in tags):
                return tags
            time.sleep(1e-3)
        raise AssertionError(f"not acknowledged: {tags}")

    def wait_until_under_way(self, slot):
        begun = time.perf_counter()
        while not self.tag(slot) and time.perf_counter() - begun < 5:
            time.sleep(1e-4)
        assert self.tag(slot)

    def tag(self, slot):
        """As the device sees it."""
        return int(host_view(self.engine._landed)[slot])

    def counts_of(self, transfers):
        """Once so many have ended: the worker notices the end of one after it has sent its tag."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < 5:
            counts = self.engine.counts()
            if counts.landed + counts.given_up == transfers:
                return counts
            time.sleep(1e-3)
        raise AssertionError(counts)

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
    step.plan((13, 0.9, 2, 4, 1), (7, 0.8, 1, 6, 2))
    assert step.tags(4, 6) == [1, 2]
    np.testing.assert_array_equal(step.expert(4), step.source(13))
    np.testing.assert_array_equal(step.expert(6), step.source(7))
    counts = step.counts_of(2)
    assert (counts.landed, counts.bytes) == (2, 2 * BYTES)


def test_tasks_that_are_late_or_not_wanted_are_given_back(step):
    step.at(3)
    step.plan((13, 0.9, 2, 4, 1), (7, 0.0, 9, 6, 2), (8, 0.5, 9, 7, 3))
    assert step.tags(4, 6, 7) == [-1, -2, 3]
    assert step.engine.counts().late == 2


def test_a_transfer_whose_layer_has_run_without_it_is_given_back(step):
    with injected(step.engine, Faults(throttle_s=0.05)):
        step.plan((13, 0.9, 2, 4, 1))
        step.wait_until_under_way(4)
        step.at(3)
        assert step.tags(4) == [-1]
    counts = step.counts_of(1)
    assert (counts.landed, counts.given_up) == (0, 1)


def test_a_task_of_a_later_step_outlives_its_layer_in_the_running_one(step):
    with injected(step.engine, Faults(throttle_s=0.01)):
        step.plan((7, 0.8, 1 + LAYERS, 6, 2))
        step.wait_until_under_way(6)
        for position in (1, 2, 3):
            step.at(position)
            time.sleep(5e-3)
        assert step.tags(6) == [2]
    counts = step.counts_of(1)
    assert (counts.landed, counts.given_up) == (1, 0)


def test_a_plan_read_twice_is_acknowledged_once(step):
    step.plan((13, 0.9, 2, 4, 1))
    assert step.tags(4) == [1]
    host_view(step.blocks)[4] = 0
    step.plan((13, 0.9, 2, 4, 1), (8, 0.5, 9, 7, 3))
    assert step.tags(7) == [3]
    assert not step.expert(4).any()


def test_a_board_that_is_being_written_is_not_read(step):
    step.plan((13, 0.9, 2, 4, 1))
    step.tags(4)
    step.board[FIRST_TASK + TASKS] += 1  # a word that does not add up
    step.board[NUMBER] += TASKS
    time.sleep(0.05)
    assert step.engine.shared.plans == 1


def test_pausing_gives_back_what_is_in_flight_and_starting_forgets_old_plans(step):
    with injected(step.engine, Faults(throttle_s=0.2)):
        step.plan((13, 0.9, 2, 4, 1))
        step.wait_until_under_way(4)
        step.engine.pause()
    assert step.tag(4) == -1
    assert step.engine.counts().given_up == 1
    step.engine.start(step.blocks)
    time.sleep(0.05)
    assert not any(map(step.tag, range(SLOTS)))


def test_dropped_transfers_are_given_back(step):
    with injected(step.engine, Faults(drop_every=2)) as faults:
        step.plan((13, 0.9, 2, 4, 1), (7, 0.8, 1, 6, 2))
        assert sorted(np.sign(step.tags(4, 6))) == [-1, 1]
    assert faults.dropped == 1


def test_a_worker_that_dies_is_noticed_and_nobody_waits_for_it(step):
    with injected(step.engine, Faults(broken=True)):
        step.plan((13, 0.9, 2, 4, 1))
        step.wait_until_under_way(4)
        time.sleep(0.1)
        assert step.tag(4) == 1 + UNDER_WAY
        for _ in range(64):
            step.engine.link()
    assert f"stopped (status {FAILED})" in step.engine.fault()
    assert step.engine.fault() is None
    assert not any(map(step.tag, range(SLOTS)))


def test_a_slot_array_that_moves_stops_everything(step):
    with pytest.raises(RuntimeError, match="moved"):
        step.engine.check(jnp.ones((SLOTS, BYTES), jnp.uint8))


def test_the_surest_task_goes_first_among_those_that_cannot_all_be_done(step):
    # At RHO 8 about one transfer fits before position 9.
    shared = step.engine.shared
    shared.transfer_ns, shared.layer_ns, shared.average, shared.current = 8e6, 1e6, 1 / 8, 1 / 8
    with injected(step.engine, Faults(throttle_s=0.01)):
        step.plan((13, 0.3, 9, 4, 1), (7, 0.9, 9, 6, 2))
        step.wait_until_under_way(6)
        assert step.tag(4) == 0
