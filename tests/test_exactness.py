"""Tokens do not depend on what was resident: every residency and policy gives those of full load."""

from itertools import product

import pytest

from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.experts.policy import POLICIES
from seqmoe_jax.options import EngineOptions, SamplingConfig
from seqmoe_jax.testing import tiny_model

PROMPTS = [[1, 2, 3], list(range(40, 54)), [200], [9] * 12]
NEW = 40


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def generate(engine, prompts, **options):
    tokens = [[] for _ in prompts]
    for event in engine.run(prompts, max_new_tokens=NEW, **options):
        tokens[event.sequence].append(event.token)
    return tokens


@pytest.fixture(scope="module")
def full_load(model):
    engine = TokenEngine(model, EngineOptions(policy="full", max_batch=4))
    assert not engine.config.managed
    return {
        "single": [generate(engine, [prompt])[0] for prompt in PROMPTS],
        "batch": generate(engine, PROMPTS),
        "sampled": generate(engine, PROMPTS[:1], sampling=SamplingConfig(temperature=1.0, top_k=20, seed=5)),
    }


@pytest.mark.parametrize(("policy", "residency"), [*product(POLICIES, [0.3]), ("seqmoe", 0.75), ("lru", 1.0)])
def test_one_sequence_has_the_tokens_of_full_load(model, full_load, policy, residency):
    engine = TokenEngine(model, EngineOptions(policy=policy, residency=residency))
    for prompt, expected in zip(PROMPTS, full_load["single"], strict=True):
        assert generate(engine, [prompt]) == [expected]
        stats = engine.last_stats
        assert (stats.hit_rate == 1) == (residency == 1)
        assert stats.bytes_moved == stats.experts_loaded * engine.config.layout.block_bytes
        assert (stats.experts_loaded == 0) == (residency == 1)


@pytest.mark.parametrize("policy", ["lru", "seqmoe"])
def test_the_least_residency_works(model, full_load, policy):
    engine = TokenEngine(model, EngineOptions(policy=policy, residency="least"))
    assert engine.plan.slots == 2
    assert generate(engine, PROMPTS[1:2]) == full_load["single"][1:2]
    assert engine.last_stats.hit_rate < 0.5


@pytest.mark.parametrize(("policy", "residency"), [("lru", "least"), ("seqmoe", 0.6), ("prefill-hot", 0.6)])
def test_a_batch_of_different_lengths_has_the_tokens_of_full_load(model, full_load, policy, residency):
    engine = TokenEngine(model, EngineOptions(policy=policy, residency=residency, max_batch=4))
    assert generate(engine, PROMPTS) == full_load["batch"]
    assert engine.last_stats.hit_rate < 1


def test_three_sequences_are_padded_to_four_without_a_trace(model, full_load):
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.8, max_batch=3))
    assert generate(engine, PROMPTS[:3]) == full_load["batch"][:3]


def test_sampled_tokens_do_not_depend_on_residency(model, full_load):
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.3))
    options = SamplingConfig(temperature=1.0, top_k=20, seed=5)
    assert generate(engine, PROMPTS[:1], sampling=options) == full_load["sampled"]
    assert generate(engine, PROMPTS[:1], sampling=SamplingConfig(temperature=1.0, seed=6)) != full_load["sampled"]


@pytest.mark.slow  # the families' parity tests cross chunks in every run
def test_a_prompt_of_several_chunks_has_the_tokens_of_full_load(model, monkeypatch):
    monkeypatch.setattr("seqmoe_jax.prefill.lengths.CHUNK", 32)
    prompt = [(7 * i) % 250 for i in range(75)]
    results = [
        generate(TokenEngine(model, EngineOptions(policy=policy, residency=residency)), [prompt])
        for policy, residency in (("full", 1.0), ("lru", 0.2))
    ]
    assert results[0] == results[1]


@pytest.mark.slow  # the families' parity tests cross chunks in every run
def test_a_chunked_prompt_continues_like_a_whole_one(model, monkeypatch):
    prompt = list(range(40, 70))
    whole = generate(TokenEngine(model, EngineOptions(policy="lru", residency=0.5)), [prompt])
    monkeypatch.setattr("seqmoe_jax.prefill.lengths.CHUNK", 16)
    assert generate(TokenEngine(model, EngineOptions(policy="lru", residency=0.5)), [prompt]) == whole


def test_end_tokens_end_a_sequence_and_leave_the_others_alone(model, full_load):
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.6, max_batch=4))
    end = full_load["batch"][0][5]
    events = list(engine.run(PROMPTS, max_new_tokens=NEW, eos_token_ids=[end]))
    for index, expected in enumerate(full_load["batch"]):
        cut = expected.index(end) + 1 if end in expected else NEW
        assert [event.token for event in events if event.sequence == index] == expected[:cut]
    # Another number of them is another program, in the same engine.
    assert generate(engine, PROMPTS, eos_token_ids=[-2, -3]) == full_load["batch"]


def test_an_abandoned_generation_leaves_the_engine_usable(model, full_load):
    engine = TokenEngine(model, EngineOptions(policy="seqmoe", residency=0.4))
    run = engine.run(PROMPTS[:1], max_new_tokens=NEW)
    next(run)
    next(run)
    run.close()
    assert generate(engine, PROMPTS[:1]) == full_load["single"][:1]
