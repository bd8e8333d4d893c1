"""Claims about planning on the device: what is reserved, what a plan says, and that the kernel does the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.plan_tasks import CONFIDENCE, CONFIDENCE_UNIT, DEADLINE, KEY, SLOT, TAG, PlanConfig, plan_tasks
from pallas_kernels.slot_update import SlotState, slot_update
from seqmoe_jax.experts.slots import check_invariants, empty_tables, open_slots

LAYERS, EXPERTS, SLOTS = 4, 6, 11
KEYS = LAYERS * EXPERTS
CONFIG = PlanConfig(layers=LAYERS, experts=EXPERTS, tasks=5, threshold=0.2, keep=3)


@partial(jax.jit, static_argnames=("first_layer", "implementation", "config"))
def planned(tables, listed, chance, score, base, tag, rho, first_layer=0, implementation="xla", config=CONFIG):
    return plan_tasks(
        tables, listed, chance, score, base=base, next_tag=tag, transfer_cost=rho, first_layer=first_layer,
        config=config, implementation=implementation, interpret=implementation != "xla",
    )  # fmt: skip


def plan(tables, chances, score=None, listed=None, base=0, tag=0, rho=1.0, **options):
    chance = jnp.zeros(KEYS).at[jnp.array([*chances], int)].set(jnp.array([*chances.values()], float))
    score = jnp.ones((2, KEYS), jnp.int32) if score is None else score
    listed = jnp.full(5, -1, jnp.int32) if listed is None else listed
    return planned(tables, listed, chance, score, jnp.int32(base), jnp.int32(tag), jnp.float32(rho), **options)


def resident(*keys, score=0):
    tables = empty_tables(KEYS, SLOTS)
    at = jnp.arange(len(keys))
    return tables._replace(
        slot_of_key=tables.slot_of_key.at[jnp.array(keys, int)].set(at),
        key_of_slot=tables.key_of_slot.at[at].set(jnp.array(keys, int)),
        state=tables.state.at[at].set(SlotState.USED),
        score=tables.score.at[at].set(score),
    )


def test_what_is_likely_and_absent_gets_a_slot_and_a_task():
    result = plan(resident(0, 1), {0: 0.9, 7: 0.8, 13: 0.5, 20: 0.1}, base=40, tag=10)
    check_invariants(result.tables)
    tasks = np.asarray(result.tasks)
    assert tasks[KEY].tolist() == [7, 13, -1, -1, -1]  # 0 is resident, 20 unlikely
    assert tasks[DEADLINE, :2].tolist() == [41, 42]
    assert tasks[SLOT].tolist() == [2, 3, -1, -1, -1]
    assert tasks[TAG, :2].tolist() == [11, 12]
    np.testing.assert_allclose(tasks[CONFIDENCE] / CONFIDENCE_UNIT, [0.8, 0.5, 0, 0, 0], atol=1e-5)
    assert result.next_tag == 15
    assert result.tables.state[2:4].tolist() == [SlotState.FETCH] * 2


def test_a_transfer_that_cannot_be_complete_counts_for_its_part():
    result = plan(resident(0), {0: 0.9, 1: 0.9, 19: 0.5}, rho=4.0)
    assert np.asarray(result.tasks)[KEY, :2].tolist() == [19, 1]  # .9 * 1/4 < .5 * 4/4


def test_a_newcomer_must_be_worth_more_than_its_victim_by_the_new_scores():
    full = resident(*range(SLOTS))
    score = jnp.full((2, KEYS), 5, jnp.int32).at[0, 3].set(1).at[0, 12].set(4)
    result = plan(full, {12: 0.9, 13: 0.8}, score=score)
    # 12 (worth 4) takes the slot of key 3 (worth 1); 13 (worth 5) is weighed against the next, worth 5 too.
    assert np.asarray(result.tasks)[KEY].tolist() == [12, -1, -1, -1, -1]
    assert result.tables.slot_of_key[3] == -1
    assert result.tables.score[4] == 5


def test_slots_are_kept_for_misses():
    result = plan(resident(), dict.fromkeys(range(KEYS), 0.9), config=PlanConfig(
        layers=LAYERS, experts=EXPERTS, tasks=5, keep=SLOTS - 2))  # fmt: skip
    assert (np.asarray(result.tasks)[KEY] >= 0).sum() == 2


def test_open_tasks_are_told_again_and_take_no_second_slot():
    first = plan(resident(), {7: 0.8, 13: 0.5})
    again = plan(first.tables, {7: 0.6, 19: 0.4}, listed=first.tasks[SLOT], base=4, tag=5)
    tasks = np.asarray(again.tasks)
    assert tasks[KEY].tolist() == [7, 13, 19, -1, -1]
    assert tasks[TAG, :3].tolist() == [1, 2, 6]
    assert tasks[CONFIDENCE, 1] == 0  # not wanted any more
    check_invariants(again.tables)


def test_in_mid_step_only_layers_to_come_are_planned_and_rescored():
    tables = resident(0, 12, score=9)
    result = plan(tables, {1: 0.9, 13: 0.9}, first_layer=2, base=8)
    assert np.asarray(result.tasks)[KEY].tolist() == [13, -1, -1, -1, -1]
    assert np.asarray(result.tasks)[DEADLINE, 0] == 10
    assert result.tables.score[:2].tolist() == [9, 1]


def test_in_mid_step_an_open_task_whose_layer_has_run_is_due_in_the_step_after():
    opened = plan(resident(), {1: 0.9})
    result = plan(opened.tables, {1: 0.4, 13: 0.6}, listed=opened.tasks[SLOT], first_layer=2, base=8)
    tasks = np.asarray(result.tasks)
    assert tasks[KEY, :2].tolist() == [1, 13]
    np.testing.assert_allclose(tasks[CONFIDENCE, :2] / CONFIDENCE_UNIT, [0.4, 0.6], atol=1e-5)
    assert tasks[DEADLINE, :2].tolist() == [8 + LAYERS, 8 + 2]


def test_the_kernel_does_the_same_in_any_history():
    rng = np.random.default_rng(0)
    tables, listed, tag, opened = empty_tables(KEYS, SLOTS), jnp.full(5, -1, jnp.int32), jnp.int32(0), 0
    for clock in range(40):
        first_layer, rho = (0, 2)[clock % 2], jnp.float32(rng.choice([0.5, 3.0]))
        chance = jnp.asarray(np.round(rng.random(KEYS) ** 2, 1), jnp.float32)  # with ties
        score = jnp.asarray(rng.integers(0, 9, (2, KEYS)), jnp.int32)
        arguments = (tables, listed, chance, score, jnp.int32(clock), tag, rho, first_layer)
        ours, reference = planned(*arguments, "gpu"), planned(*arguments, "xla")
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        check_invariants(ours.tables)
        expected = set(np.asarray(open_slots(ours.tables, 5)).tolist()) - {-1}
        assert set(np.asarray(ours.tasks[SLOT]).tolist()) - {-1} == expected
        opened += int((np.asarray(ours.tasks[KEY]) >= 0).sum())
        tables, tag, tasks = ours.tables, ours.next_tag, ours.tasks
        listed = tasks[SLOT]
        landed = jnp.where(jnp.asarray(rng.random(SLOTS) < 0.4), tables.tag, 0)
        ids = jnp.asarray(rng.choice(EXPERTS, 2, replace=False), jnp.int32)
        tables = slot_update(
            tables, ids, first_key=clock % LAYERS * EXPERTS, num_experts=EXPERTS, rule="scored", clock=clock,
            key_score=score, landed=landed, implementation="xla",
        ).tables  # fmt: skip
    assert opened > 40


def test_only_the_kernel_writes_to_a_board():
    tables = resident(0)
    arguments = (tables, jnp.full(5, -1, jnp.int32), jnp.zeros(KEYS), jnp.ones((2, KEYS), jnp.int32))
    rest = dict(base=jnp.int32(0), next_tag=jnp.int32(0), transfer_cost=jnp.float32(1), first_layer=0, config=CONFIG)
    with pytest.raises(ValueError, match="only the kernel for GPUs writes to a board"):
        plan_tasks(*arguments, **rest, board=jnp.zeros(99, jnp.int32), implementation="xla")
    with pytest.raises(ValueError, match="the board needs 28 words, got 27"):
        plan_tasks(*arguments, **rest, board=jnp.zeros(27, jnp.int32), implementation="gpu")


@pytest.mark.parametrize(("layers", "experts", "slots"), [(24, 32, 345), (48, 128, 1536), (93, 512, 20000)])
def test_it_lowers_for_cuda(layers, experts, slots):
    config = PlanConfig(layers=layers, experts=experts, tasks=8)

    def call(tables, board):
        keys = layers * experts
        return plan_tasks(
            tables, jnp.full(8, -1, jnp.int32), jnp.zeros(keys), jnp.ones((2, keys), jnp.int32),
            base=jnp.int32(0), next_tag=jnp.int32(0), transfer_cost=jnp.float32(1), first_layer=layers // 2,
            config=config, board=board, implementation="gpu",
        )  # fmt: skip

    text = lower_for("cuda", call, empty_tables(layers * experts, slots), jnp.zeros(64, jnp.int32))
    assert "plan_tasks" in text
