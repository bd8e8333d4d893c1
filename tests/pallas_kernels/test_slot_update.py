"""Claims about slot tables: the paper's four events, the three rules, and that every implementation agrees."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import lower_for

from pallas_kernels.plan_tasks.reference import reserve
from pallas_kernels.slot_update import SlotState, SlotTables, slot_update
from seqmoe_jax.experts.slots import check_invariants, empty_tables, open_slots, settle

LAYERS, EXPERTS, SLOTS, IDS, TASKS = 3, 6, 8, 5, 4
KEYS = LAYERS * EXPERTS
KEY_SCORE = np.random.default_rng(0).integers(-50, 50, (2, KEYS)).astype(np.int32)  # before and after its use
RULES = ("lru", "lfu", "scored")


class Oracle:
    """The semantics, word for word, on Python lists."""

    def __init__(self, num_keys: int, num_slots: int):
        self.slot_of_key, self.key_of_slot = [-1] * num_keys, [-1] * num_slots
        self.state, self.tag, self.score = [SlotState.EMPTY] * num_slots, [0] * num_slots, [0] * num_slots

    @property
    def slots(self):
        return range(len(self.state))

    def line(self):
        """Slots that may be given away, in order."""
        empty = [s for s in self.slots if self.state[s] == SlotState.EMPTY]
        used = [s for s in self.slots if self.state[s] == SlotState.USED]
        return empty + sorted(used, key=lambda s: (self.score[s], s))

    def evict(self, s):
        if self.state[s] == SlotState.USED:
            self.slot_of_key[self.key_of_slot[s]] = -1

    def update(self, ids, layer, rule, clock, landed):
        def newcomer(key, used=True):
            return {"lru": clock, "lfu": 1, "scored": int(KEY_SCORE[int(used), key])}[rule]

        for s in self.slots:
            if landed is not None and self.state[s] == SlotState.FETCH and self.tag[s] == abs(landed[s]):
                key, self.tag[s] = self.key_of_slot[s], 0
                if self.slot_of_key[key] >= 0 or landed[s] < 0:
                    self.state[s], self.key_of_slot[s] = SlotState.EMPTY, -1
                else:
                    self.state[s], self.slot_of_key[key] = SlotState.COMPUTE, s
                    self.score[s] = newcomer(key, used=False)
        routed = list(dict.fromkeys(i for i in ids if i >= 0))
        missing = []
        for e in routed:
            s = self.slot_of_key[layer * EXPERTS + e]
            if s < 0:
                missing.append(e)
                continue
            self.state[s] = SlotState.COMPUTE
            self.score[s] = self.score[s] + 1 if rule == "lfu" else newcomer(layer * EXPERTS + e)
        given = []
        for e in missing:
            key, line = layer * EXPERTS + e, self.line()
            given.append(line[0] if line else -1)
            if line:
                s = line[0]
                self.evict(s)
                self.state[s], self.key_of_slot[s], self.slot_of_key[key] = SlotState.COMPUTE, key, s
                self.score[s] = newcomer(key)
        for s in self.slots:
            if self.state[s] == SlotState.COMPUTE and self.key_of_slot[s] // EXPERTS == layer:
                self.state[s] = SlotState.USED
        slots = [self.slot_of_key[layer * EXPERTS + i] if i >= 0 else -1 for i in ids]
        pad = [-1] * (len(ids) - len(missing))
        counts = [len(routed), len(routed) - len(missing), len(missing)]
        return slots, missing + pad, given + pad, counts

    def reserve(self, keys, tags, newcomer_score, keep):
        line, result, wanted = self.line(), [], 0
        under_way = {self.key_of_slot[s] for s in self.slots if self.state[s] == SlotState.FETCH}
        blocked = under_way | {k for k, s in enumerate(self.slot_of_key) if s >= 0}
        for i, key in enumerate(keys):
            result.append(-1)
            if key < 0 or key in blocked or key in keys[:i]:
                continue
            wanted += 1
            if wanted > len(line) - keep:
                continue
            s = line[wanted - 1]
            if self.state[s] == SlotState.USED and newcomer_score is not None and self.score[s] >= newcomer_score[i]:
                continue
            self.evict(s)
            self.state[s], self.key_of_slot[s], self.tag[s], self.score[s] = SlotState.FETCH, key, tags[i], 0
            result[-1] = s
        return result

    def settle(self):
        for s in self.slots:
            if self.state[s] == SlotState.FETCH:
                self.state[s], self.key_of_slot[s], self.tag[s] = SlotState.EMPTY, -1, 0
            elif self.state[s] == SlotState.COMPUTE:
                self.state[s] = SlotState.USED

    def tables(self):
        return [self.slot_of_key, self.key_of_slot, self.state, self.tag, self.score]


def ints(values):
    return jnp.asarray(values, jnp.int32)


def same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@partial(jax.jit, static_argnames=("rule", "implementation", "num_experts"))
def update(tables, ids, layer, clock, landed, rule, implementation="xla", num_experts=EXPERTS, key_score=KEY_SCORE):
    return slot_update(
        tables,
        ids,
        first_key=layer * num_experts,
        num_experts=num_experts,
        rule=rule,
        clock=clock,
        key_score=jnp.asarray(key_score),
        landed=landed,
        open_slots=None if landed is None else open_slots(tables, landed.shape[0]),
        implementation=implementation,
        interpret=implementation != "xla",
    )


reserve_jit = jax.jit(reserve, static_argnames="keep")

layer_calls = st.tuples(
    st.just("update"),
    st.lists(st.integers(-1, EXPERTS - 1), min_size=IDS, max_size=IDS),
    st.integers(0, LAYERS - 1),
    st.integers(0, 3**SLOTS - 1),  # what has become of each transfer: under way, landed, given up
)
reservations = st.tuples(
    st.just("reserve"),
    st.lists(st.integers(-1, KEYS - 1), min_size=TASKS, max_size=TASKS),
    st.booleans(),
    st.integers(0, 4),
)
settlements = st.tuples(st.just("settle"))
events = st.lists(st.one_of(layer_calls, layer_calls, reservations, settlements), max_size=20)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", [False, True])
@settings(max_examples=25, deadline=None)
@given(events=events)
def test_any_history_equals_the_oracle(rule, engine, events):
    tables, oracle = empty_tables(KEYS, SLOTS), Oracle(KEYS, SLOTS)
    for clock, (event, *args) in enumerate(events, start=1):
        if event == "update":
            ids, layer, back = args
            answers = [(0, 1, -1)[back // 3**s % 3] for s in range(SLOTS)]
            landed = [answer * tag for answer, tag in zip(answers, oracle.tag, strict=True)] if engine else None
            result = update(tables, ints(ids), ints(layer), ints(clock), ints(landed) if engine else None, rule)
            tables = result.tables
            same(result[1:], [ints(x) for x in oracle.update(ids, layer, rule, clock, landed)])
        elif event == "reserve":
            keys, weighed, keep = args
            tags = [clock * TASKS + i for i in range(TASKS)]
            newcomer = [int(KEY_SCORE[0, k]) for k in keys] if weighed else None
            tables, slots = reserve_jit(tables, ints(keys), ints(tags), ints(newcomer) if weighed else None, keep=keep)
            same([slots], [ints(oracle.reserve(keys, tags, newcomer, keep))])
        else:
            tables = jax.jit(settle)(tables)
            oracle.settle()
        same(tables, [ints(table) for table in oracle.tables()])
        check_invariants(tables)


def test_the_four_events_of_the_paper():
    tables = empty_tables(KEYS, SLOTS)
    # A prefetch task reserves an EMPTY slot.
    tables, [a, b, c, _] = reserve_jit(tables, ints([3, 9, 4, -1]), ints([1, 2, 3, 4]), None, keep=5)
    assert [a, b, c] == [0, 1, 2]
    assert tables.state[:4].tolist() == [SlotState.FETCH] * 3 + [SlotState.EMPTY]
    # An on-demand load overtakes the transfer of key 3; key 9 (layer 1) and key 4 (layer 0) land.
    tables, slots, experts, dst, counts = update(
        tables, ints([3, -1, -1, -1, -1]), ints(0), ints(1), ints([0, 2, 3] + [0] * 5), "lru"
    )
    assert (slots.tolist(), experts.tolist(), dst.tolist()) == ([3, -1, -1, -1, -1],) + (([3, -1, -1, -1, -1],) * 2)
    assert counts.tolist() == [1, 0, 1]
    # Before layer 0 runs its slots become USED, activated (3) or not (4); layer 1's waits in COMPUTE.
    assert tables.state[:4].tolist() == [SlotState.FETCH, SlotState.COMPUTE, SlotState.USED, SlotState.USED]
    # The transfer of key 3 comes back too late.
    tables, *_ = update(tables, ints([-1] * 5), ints(0), ints(2), ints([1] + [0] * 7), "lru")
    assert tables.state[:2].tolist() == [SlotState.EMPTY, SlotState.COMPUTE]
    # A transfer whose tag does not match does not land.
    tables, _ = reserve_jit(tables, ints([0, -1, -1, -1]), ints([9, 10, 11, 12]), None, keep=0)
    tables, *_ = update(tables, ints([-1] * 5), ints(1), ints(3), ints([8] + [0] * 7), "lru")
    assert tables.state[:2].tolist() == [SlotState.FETCH, SlotState.USED]
    check_invariants(tables)


@pytest.mark.parametrize(
    ("rule", "evicted"),
    [("lru", [1, 2, 0]), ("lfu", [1, 2, 0]), ("scored", np.argsort(KEY_SCORE[1, :3], kind="stable").tolist())],
)
def test_eviction_order_by_hand(rule, evicted):
    # Three slots hold experts 0, 1, 2, used in the order 1, 2, 0, 0 after loading.
    tables = empty_tables(KEYS, 3)
    for clock, expert in enumerate([0, 1, 2, 1, 2, 0, 0]):
        tables = update(tables, ints([expert]), ints(0), ints(clock), None, rule).tables
    order = []
    for expert in range(3, 6):
        tables, _, _, slot, _ = update(tables, ints([expert]), ints(0), ints(10), None, rule)
        order.append(int(slot[0]))
        tables = tables._replace(score=tables.score.at[slot[0]].set(1000))
    assert order == evicted


def test_a_miss_without_a_slot_harms_nothing():
    tables = empty_tables(KEYS, 2)
    result = update(tables, ints([0, 1, 2, 0, 2]), ints(0), ints(1), None, "lru")
    assert result.slots_of_ids.tolist() == [0, 1, -1, 0, -1]
    assert result.miss_slot.tolist() == [0, 1, -1, -1, -1]
    check_invariants(result.tables)


def test_tags_may_lie_in_host_memory():
    tables, _ = reserve_jit(empty_tables(KEYS, SLOTS), ints([3, 9, 4, -1]), ints([1, 2, 3, 4]), None, keep=0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    landed = jax.device_put(np.array([1, 7, 3] + [0] * 5, np.int32), sharding)
    state = update(tables, ints([-1] * 5), ints(1), ints(1), landed, "lru").tables.state
    assert state[:3].tolist() == [SlotState.COMPUTE, SlotState.FETCH, SlotState.COMPUTE]


def random_tables(rng, num_keys, num_slots, fill):
    """A consistent state with all four kinds of slots, and tags of which half have come back, some given up."""
    state = rng.choice(4, num_slots, p=fill).astype(np.int32)
    keys = rng.permutation(num_keys)[:num_slots].astype(np.int32)
    key_of_slot = np.where(state == SlotState.EMPTY, -1, keys)
    resident = (state == SlotState.USED) | (state == SlotState.COMPUTE)
    slot_of_key = np.full(num_keys, -1, np.int32)
    slot_of_key[key_of_slot[resident]] = np.flatnonzero(resident)
    tag = np.where(state == SlotState.FETCH, rng.integers(1, 1000, num_slots), 0).astype(np.int32)
    score = np.where(resident, rng.integers(-3, 3, num_slots), 0).astype(np.int32)
    landed = np.choose(rng.choice(3, num_slots, p=[0.5, 0.3, 0.2]), [tag, tag + 1, -tag]).astype(np.int32)
    tables = SlotTables(*(jnp.asarray(x) for x in (slot_of_key, key_of_slot, state, tag, score)))
    # Every third FETCH key is resident by now, where there is a slot for it.
    fetch, empty = np.flatnonzero(state == SlotState.FETCH)[::3], np.flatnonzero(state == SlotState.EMPTY)
    for f, e in zip(fetch, empty, strict=False):
        key = int(key_of_slot[f])
        tables = tables._replace(
            slot_of_key=tables.slot_of_key.at[key].set(int(e)),
            key_of_slot=tables.key_of_slot.at[int(e)].set(key),
            state=tables.state.at[int(e)].set(SlotState.USED),
        )
    check_invariants(tables)
    return tables, jnp.asarray(landed)


SIZES = [(24, 32, 345, 4), (3, 6, 13, 5), (2, 20, 25, 40)]  # L, E, S, M


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", [False, True])
def test_kernels_equal_the_reference(implementation, rule, engine):
    # Each size meets one rule with an engine and one without: a compilation each, so not the full product.
    layers, experts, slots, ids = SIZES[(RULES.index(rule) + engine) % len(SIZES)]
    rng = np.random.default_rng(slots)
    key_score = rng.integers(-3, 3, (2, layers * experts)).astype(np.int32)
    for trial in range(8):
        # Without an engine no slot is COMPUTE on entry.
        fill = [[0.2, 0.4, 0.2, 0.2], [0, 0.9, 0.05, 0.05]][trial % 2]
        fill = fill if engine else [fill[0], 1 - fill[0] - fill[2], fill[2], 0]
        tables, landed = random_tables(rng, layers * experts, slots, fill)
        routed = ints(rng.integers(-1, experts, ids))
        args = (tables, routed, ints(trial % layers), ints(7), landed if engine else None, rule)
        same(
            update(*args, implementation, num_experts=experts, key_score=key_score),
            update(*args, num_experts=experts, key_score=key_score),
        )


def at_size(layers, experts, slots, ids, rule, engine, implementation):
    """The function and its arguments' shapes, for lowering."""

    def call(tables, ids, layer, clock, key_score, landed, tasks=None, progress=None):
        return slot_update(
            tables,
            ids,
            first_key=layer * experts,
            num_experts=experts,
            rule=rule,
            clock=clock,
            key_score=key_score,
            landed=landed,
            open_slots=tasks,
            progress=progress,
            implementation=implementation,
        )

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    keys = layers * experts
    tables = SlotTables(shape(keys), *[shape(slots)] * 4)
    engines = (shape(slots), shape(8)) if engine else (None,)
    return call, (tables, shape(ids), shape(), shape(), shape(2, keys), *engines)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(("rule", "engine"), [("lru", False), ("lfu", True), ("scored", True)])
@pytest.mark.parametrize("size", [(48, 128, 2765, 8), (24, 32, 345, 4), (48, 128, 2765, 256)])
def test_kernels_lower_without_the_hardware(platform, rule, engine, size):
    call, shapes = at_size(*size, rule, engine, "gpu" if platform == "cuda" else "tpu")
    text = lower_for(platform, call, *shapes, donate=(0,))
    assert text.count("slot_update") >= 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", [False, True])
def test_the_reference_updates_donated_tables_in_place(rule, engine):
    call, shapes = at_size(24, 32, 345, 4, rule, engine, "xla")
    text = jax.jit(call, donate_argnums=0).lower(*shapes).compile().as_text()
    assert len(re.findall(r"may-alias|must-alias", text.splitlines()[0])) == 5
    assert not re.findall(r"= s32\[(?:345|768)\]\S* copy\(.*", text)
