"""Reading prompts: experts streamed in groups give the tokens of full load, hot experts stay, the predictor is warm."""

import ctypes
import gc
import weakref

import jax
import numpy as np
import pytest

from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.experts.slots import check_invariants
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefetch.cuda import CopyStream
from seqmoe_jax.prefill.streaming import CopySender, Popularity, choose_groups, group_size
from seqmoe_jax.testing import tiny_model, untrained_predictor

pytest.importorskip("flax.nnx")

PROMPT = [(7 * i) % 250 for i in range(75)]
NEW = 6


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=2, mlp_only_layers=[])  # what is compiled is a test's time


@pytest.fixture(autouse=True)
def small_passes_and_groups(monkeypatch, model):
    """A prompt of 75 tokens is two passes, of four chunks and one; a layer's experts come in groups of three."""
    monkeypatch.setattr("seqmoe_jax.prefill.programs.CHUNK", 16)
    monkeypatch.setattr("seqmoe_jax.prefill.streaming.GROUP_BYTES", 3 * model.spec.expert_layout.block_bytes)


@pytest.fixture(scope="module")
def predictor(model):
    return untrained_predictor(model)


def generate(engine, prompts=(PROMPT,), new=NEW):
    tokens = [[] for _ in prompts]
    for event in engine.run(list(prompts), max_new_tokens=new):
        tokens[event.sequence].append(event.token)
    return tokens


@pytest.fixture(scope="module")
def expected(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqmoe_jax.prefill.programs.CHUNK", 16)
        return generate(TokenEngine(model, EngineOptions(policy="full")))


@pytest.mark.parametrize("policy", ["seqmoe", "lru", "prefill-hot"])
def test_streamed_prompts_have_the_tokens_of_full_load(model, expected, policy):
    engine = TokenEngine(model, EngineOptions(policy=policy, residency=0.4), stream_prompts=True)
    for _ in range(2):
        assert generate(engine) == expected
        stats = engine.last_stats
        assert stats.experts_streamed > 0
        assert stats.bytes_moved == (stats.experts_streamed + stats.experts_loaded) * engine.config.layout.block_bytes
        check_invariants(engine._offload.cache.tables)


def test_prompts_may_be_loaded_on_demand_instead(model, expected):
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.4))
    assert generate(engine) == expected
    assert engine.last_stats.experts_streamed == 0
    assert engine.plan.staging == 0


def test_a_short_prompt_loads_on_demand(model):
    engine = TokenEngine(model, EngineOptions(residency=0.4), stream_prompts=True)
    generate(engine, [[5]])
    assert engine.last_stats.experts_streamed == 0
    assert engine.last_stats.experts_loaded > 0


def test_what_a_prompt_uses_little_does_not_displace_what_was_used_more(model):
    """The slots hold the experts of the highest scores after a prompt, which all came by."""
    engine = TokenEngine(model, EngineOptions(residency=0.4), stream_prompts=True)
    list(engine.run([PROMPT[:60]], max_new_tokens=1))
    tables, retention = engine._offload.cache.tables, np.asarray(engine._offload.forecast.retention)
    resident = np.asarray(tables.slot_of_key) >= 0
    assert resident.sum() == engine.plan.slots == 6
    np.testing.assert_array_equal(np.sort(retention[resident]), np.sort(retention)[-6:])


@pytest.fixture(scope="module")
def predicting(model, predictor):
    return TokenEngine(
        model, EngineOptions(residency=0.6, transfers="none", max_batch=2), predictor=predictor, stream_prompts=True
    )


def test_the_predictor_has_read_the_prompt_as_decoding_would_have(predicting):
    """Reading n + 1 tokens leaves the state that reading n and decoding one leaves."""
    ((first, _),) = generate(predicting, [PROMPT[:40]], 2)
    decoded = jax.device_get((predicting._offload.predictor, predicting._offload.forecast))
    generate(predicting, [[*PROMPT[:40], first]], 1)
    read = jax.device_get((predicting._offload.predictor, predicting._offload.forecast))
    assert read[0]["step"] == 42
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), read, decoded)


def test_the_padding_of_a_shorter_prompt_does_not_reach_the_predictor(predicting):
    generate(predicting, [PROMPT[:40], PROMPT[:7]], 1)
    together = jax.device_get(predicting._offload.predictor)
    generate(predicting, [PROMPT[:7]], 1)
    alone = jax.device_get(predicting._offload.predictor)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b[0], atol=2e-3), together, alone)


def test_likely_experts_are_sent_in_the_order_of_their_chance():
    popularity = Popularity(1, 6, 2)
    assert np.allclose(popularity.chance(1), 2 / 6)
    popularity.observe(np.array([[0, 900, 20, 0, 1000, 80]]), 1000)
    chance = popularity.chance(8)
    assert 0 < chance[0, 0] < chance[0, 2] < chance[0, 5] < chance[0, 1] < chance[0, 4] < 1
    resident = np.array([[False, False, False, False, True, False]])
    (groups,) = choose_groups(popularity.chance(40), resident, 2)
    order = [int(expert) for group in groups for expert in group.experts if expert >= 0]
    assert order == [1, 5]
    assert [group.count for group in choose_groups(popularity.chance(100), resident, 2)[0]] == [2, 2, 1]
    assert choose_groups(popularity.chance(2), resident, 2)[0][0].experts.tolist() == [1, -1]
    profiled = Popularity(1, 6, 2, np.full((1, 6), 0.9))
    assert np.allclose(profiled.chance(1), 0.9)


def test_groups_are_bounded_in_bytes(model):
    layout = model.spec.expert_layout
    assert group_size(layout, 8) == 3
    assert group_size(layout, 2) == 2


class LateCopies(CopyStream):
    """Where device memory is host memory: a copy is made when it is waited for, and no sooner."""

    def __init__(self):
        self.pending, self.copies = [], 0

    def enter(self):
        pass

    def copy(self, target, source, size):
        self.pending.append((target, source, size))

    def record(self, event):
        self.pending.append(event)

    def close(self):
        pass

    def wait(self, event):
        while event in self.pending:
            first = self.pending.pop(0)
            if isinstance(first, tuple):
                ctypes.memmove(*first)
                self.copies += 1


def test_copies_behind_the_back_of_xla_have_the_tokens_of_full_load(model, expected, monkeypatch):
    stream = LateCopies()
    monkeypatch.setattr(
        "seqmoe_jax.prefill.reader.make_sender", lambda pools, device, size: CopySender(pools, device, size, stream)
    )
    engine = TokenEngine(model, EngineOptions(residency=0.4), stream_prompts=True)
    for _ in range(2):
        assert generate(engine) == expected
    assert stream.copies > engine.last_stats.experts_streamed > 0
    assert not stream.pending


def test_an_engine_that_is_let_go_is_gone_at_once(model):
    engine = TokenEngine(model, EngineOptions(residency=0.7), stream_prompts=True)
    generate(engine)
    engine.close()
    alive = weakref.ref(engine)
    gc.disable()  # device memory must not wait for the collector
    try:
        del engine
        assert alive() is None
    finally:
        gc.enable()
