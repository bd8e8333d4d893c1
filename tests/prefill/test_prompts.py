"""Reading prompts in several passes: the tokens of full load, hot experts stay, the predictor is warm."""

import gc
import weakref

import jax
import numpy as np
import pytest

from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.experts.slots import check_invariants
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefill.lengths import capacity_of, passes_of
from seqmoe_jax.testing import tiny_model, untrained_predictor

pytest.importorskip("flax.nnx")

PROMPT = [(7 * i) % 250 for i in range(75)]
NEW = 6


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=2, mlp_only_layers=[])  # what is compiled is a test's time


@pytest.fixture(scope="module", autouse=True)
def small_passes():
    """A prompt of 75 tokens is two passes, of four chunks and one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqmoe_jax.prefill.lengths.CHUNK", 16)
        yield


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
    return generate(TokenEngine(model, EngineOptions(policy="full")))


def test_passes_cover_every_prompt_in_few_lengths():
    assert [(each.length, len(each.chunks)) for each in passes_of([75])] == [(64, 4), (16, 1)]
    for lengths in ([1], [16], [17], [63, 2], [64, 65], [200, 3, 40]):
        read = dict.fromkeys(range(len(lengths)), 0)
        for each in passes_of(lengths):
            end = 0
            for chunk in each.chunks:
                assert (chunk.at, chunk.start) == (end, read[chunk.sequence])
                end += chunk.width
                read[chunk.sequence] += chunk.width
            assert end <= each.length <= 64
        for sequence, length in enumerate(lengths):
            assert length <= read[sequence] <= capacity_of(lengths, [1] * len(lengths))


def test_a_prompt_is_cut_alike_whoever_else_is_there():
    def cuts(lengths, sequence, **how):
        chunks = (chunk for each in passes_of(lengths, **how) for chunk in each.chunks)
        return [(chunk.start, chunk.width) for chunk in chunks if chunk.sequence == sequence]

    assert cuts([75], 0) == cuts([200, 75, 5], 1) == cuts([3, 1, 75], 2, pass_chunks=16)


@pytest.mark.parametrize("policy", ["seqmoe", "lru", "prefill-hot"])
def test_prompts_have_the_tokens_of_full_load(model, expected, policy):
    engine = TokenEngine(model, EngineOptions(policy=policy, residency=0.4))
    for _ in range(2):
        assert generate(engine) == expected
        stats = engine.last_stats
        assert stats.bytes_moved == stats.experts_loaded * engine.config.layout.block_bytes > 0
        check_invariants(engine.offloading.state.cache.tables)


def test_what_a_prompt_uses_little_does_not_displace_what_it_uses_more(model):
    """A layer that misses evicts what the prompt used least: of the layers before it, what is hot stays."""
    engine = TokenEngine(model, EngineOptions(residency=0.75))
    list(engine.run([PROMPT[:60]], max_new_tokens=1))
    tables, retention = engine.offloading.state.cache.tables, np.asarray(engine.offloading.state.forecast.retention)
    resident = np.asarray(tables.slot_of_key) >= 0
    assert resident.sum() == engine.plan.slots == 12
    first, stays = retention[:8], resident[:8]
    assert 0 < stays.sum() < 8
    assert first[stays].min() >= first[~stays].max()
    np.testing.assert_array_equal(resident[8:], retention[8:] > 0)


@pytest.fixture(scope="module")
def predicting(model, predictor):
    return TokenEngine(model, EngineOptions(residency=0.6, transfers="none", max_batch=2), predictor=predictor)


def test_the_predictor_has_read_the_prompt_as_decoding_would_have(predicting):
    """Reading n + 1 tokens leaves the state that reading n and decoding one leaves."""
    ((first, _),) = generate(predicting, [PROMPT[:40]], 2)
    decoded = jax.device_get((predicting.offloading.state.predictor, predicting.offloading.state.forecast))
    generate(predicting, [[*PROMPT[:40], first]], 1)
    read = jax.device_get((predicting.offloading.state.predictor, predicting.offloading.state.forecast))
    assert read[0]["step"] == 42
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), read, decoded)


@pytest.mark.parametrize("residency", [0.5, 1.0])
def test_what_is_read_does_not_depend_on_who_is_read_along(model, residency):
    """To the bit: nothing is padded to the longest prompt of a batch, and none is cut otherwise than alone."""
    engine = TokenEngine(model, EngineOptions(residency=residency, max_batch=4))
    prompts = [PROMPT[:40], PROMPT[5:12], PROMPT]
    for prompt, together in zip(prompts, engine.routing(prompts), strict=True):
        (alone,) = engine.routing([prompt])
        jax.tree.map(np.testing.assert_array_equal, together, alone)
    together = [tokens[0] for tokens in generate(engine, prompts, 1)]
    assert together == [generate(engine, [prompt], 1)[0][0] for prompt in prompts]


def test_the_padding_of_a_shorter_prompt_does_not_reach_the_predictor(predicting):
    generate(predicting, [PROMPT[:40], PROMPT[:7]], 1)
    together = jax.device_get(predicting.offloading.state.predictor)
    generate(predicting, [PROMPT[:7]], 1)
    alone = jax.device_get(predicting.offloading.state.predictor)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b[0], atol=2e-3), together, alone)


def test_an_interrupted_reading_leaves_a_state_that_is_valid(model, expected, monkeypatch):
    """An interrupt after any program finds what that program made, and the next prompt goes on from it."""
    engine = TokenEngine(model, EngineOptions(residency=0.4))
    generate(engine)
    hold, held = engine.offloading.hold, []

    def interrupted(offload):
        hold(offload)
        held.append(offload)
        if len(held) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine.offloading, "hold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(engine)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(engine.offloading.state))
    check_invariants(engine.offloading.state.cache.tables)
    monkeypatch.undo()
    assert generate(engine) == expected


def test_a_prompt_of_equal_layers_compiles_each_program_once(model):
    """More layers of the same kind are no more programs: those of the time to the first token are few."""
    engine = TokenEngine(model, EngineOptions(residency=0.4))
    generate(engine, [PROMPT[:16]], 1)
    names = [
        "begin_prompt",
        "begin_chunk",
        "route_chunk",
        "apply_experts",
        "combine",
        "finish_chunk",
        "end_chunk",
        "first_token",
        "begin_decoding",
    ]
    assert {name: len(engine.programs.named(name)) for name in names} == dict.fromkeys(names, 1)


def test_an_engine_that_is_let_go_is_gone_at_once(model):
    engine = TokenEngine(model, EngineOptions(residency=0.7))
    generate(engine)
    engine.close()
    alive = weakref.ref(engine)
    gc.disable()  # device memory must not wait for the collector
    try:
        del engine
        assert alive() is None
    finally:
        gc.enable()
