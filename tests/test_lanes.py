"""Sequences join and leave those that are decoded together; none of them has other tokens for it."""

import random
from contextlib import closing
from itertools import count

import jax
import pytest

from seqmoe_jax import lanes
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import PromptError
from seqmoe_jax.lanes import TokenRequest
from seqmoe_jax.options import EngineOptions, SamplingConfig
from seqmoe_jax.testing import tiny_model, untrained_predictor

LENGTHS = (1, 3, 16, 17, 40)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=2, mlp_only_layers=[])


@pytest.fixture(scope="module")
def engine(model):
    with closing(
        TokenEngine(model, EngineOptions(max_batch=2, residency=0.7), predictor=untrained_predictor(model))
    ) as engine:
        yield engine


def request(draw):
    prompt = [draw.randrange(256) for _ in range(draw.choice(LENGTHS))]
    how = SamplingConfig() if draw.random() < 0.5 else SamplingConfig(temperature=0.8, seed=draw.randrange(9))
    return TokenRequest(prompt=prompt, max_new_tokens=draw.choice((1, 2, 7, 20)), sampling=how, eos_token_ids=(3, 250))


def alone(engine, asked):
    return [
        event.token
        for event in engine.run(
            [asked.prompt], max_new_tokens=asked.max_new_tokens, sampling=[asked.sampling],
            eos_token_ids=asked.eos_token_ids,
        )
    ]  # fmt: skip


def together(engine, requests, arrivals):
    """The tokens of each, when request i arrives at poll `arrivals[i]` or as soon as there is room."""
    polls, waiting, tokens = count(), list(zip(arrivals, requests, strict=True)), {}

    def poll():
        now = next(polls)
        while waiting and session.free and (waiting[0][0] <= now or not tokens or all_ended()):
            tokens[session.add(waiting.pop(0)[1])] = []

    def all_ended():
        return session.free == engine.max_batch

    session = engine.session(poll)
    for event in session.events:
        tokens[event.sequence].append(event.token)
    assert not waiting
    return [tokens[number] for number in sorted(tokens)]


@pytest.fixture(scope="module")
def asked(model):
    """Requests, and the tokens of each when it is alone."""
    draw = random.Random(1)
    requests = [request(draw) for _ in range(9)]
    engine = TokenEngine(model, EngineOptions(policy="full"))
    return requests, [alone(engine, each) for each in requests]


def check_in_mixes(engine, asked, mixes):
    requests, expected = asked
    for seed in range(mixes):
        draw = random.Random(seed)
        order = draw.sample(range(len(requests)), len(requests))
        arrivals = sorted(draw.randrange(120) for _ in order)
        assert together(engine, [requests[at] for at in order], arrivals) == [expected[at] for at in order]


def test_tokens_do_not_depend_on_company(engine, asked):
    check_in_mixes(engine, asked, 2)


@pytest.mark.slow  # a minute for each, for its programs
@pytest.mark.parametrize(
    ("options", "predicted"),
    [
        (dict(residency=1.0, policy="full"), False),
        (dict(residency=0.7), False),
        (dict(residency=0.7, transfers="device_put"), True),
        (dict(residency=0.7, transfers="callback"), True),
        (dict(residency=0.7, policy="lru"), False),
        (dict(residency=0.7, policy="lfu"), False),
        (dict(residency=0.7, policy="prefill-hot"), False),
    ],
)
def test_tokens_do_not_depend_on_company_with_any_policy_and_engine(model, asked, options, predicted):
    predictor = untrained_predictor(model) if predicted else None
    check_in_mixes(TokenEngine(model, EngineOptions(max_batch=4, **options), predictor=predictor), asked, 4)


def test_one_that_is_dropped_leaves_its_lane_to_another(engine):
    long = TokenRequest(prompt=[1, 2, 3], max_new_tokens=200, sampling=SamplingConfig())
    short = TokenRequest(prompt=[7] * 20, max_new_tokens=6, sampling=SamplingConfig())
    other = TokenRequest(prompt=[9], max_new_tokens=30, sampling=SamplingConfig())
    expected = {1: alone(engine, other), 2: alone(engine, short)}
    session, tokens, joined = engine.session(), {}, False
    numbers = [session.add(each) for each in (long, other)]
    for event in session.events:
        tokens.setdefault(event.sequence, []).append(event.token)
        if not joined and len(tokens[0]) == 5:
            session.drop(numbers[0])
            session.add(short)
            joined = True
    assert len(tokens[0]) < 20
    assert {1: tokens[1], 2: tokens[2]} == expected


def test_those_that_decode_go_on_while_a_prompt_is_read(model, monkeypatch):
    monkeypatch.setattr(lanes, "LONGEST_GAP_S", 0.0)
    engine = TokenEngine(
        model, EngineOptions(residency=0.7, max_batch=2, transfers="device_put"), predictor=untrained_predictor(model)
    )
    asked = [
        TokenRequest(prompt=[1, 2, 3], max_new_tokens=60, sampling=SamplingConfig()),
        TokenRequest(prompt=[7] * 40, max_new_tokens=3, sampling=SamplingConfig()),
    ]
    expected = [alone(engine, each) for each in asked]
    session, order = engine.session(), []
    session.add(asked[0])
    for event in session.events:
        order.append(event.sequence)
        if len(order) == 5:
            session.add(asked[1])
    between = order[5 : order.index(1)]
    assert len(between) >= len(model.spec.layers) - 1  # a step after each layer, but for those dispatched before
    monkeypatch.undo()
    assert together(engine, asked, [0, 20]) == expected


@pytest.mark.slow  # for the programs of four lanes
def test_one_that_joins_what_is_left_of_many_has_its_own_lane(model):
    """Those that end while others wait leave lanes behind that are taken before there are fewer of them."""
    engine = TokenEngine(model, EngineOptions(residency=0.7, max_batch=4))
    long = TokenRequest(prompt=[1, 2, 3], max_new_tokens=30, sampling=SamplingConfig())
    brief = [TokenRequest(prompt=[5 + at] * 3, max_new_tokens=4, sampling=SamplingConfig()) for at in range(3)]
    late = TokenRequest(prompt=[9] * 5, max_new_tokens=6, sampling=SamplingConfig())
    expected, tokens = [alone(engine, long), alone(engine, late)], {}
    session = engine.session(lambda: session.add(late) if len(tokens) == 4 and session.free == 3 else None)
    for each in (long, *brief):
        session.add(each)
    for event in session.events:
        tokens.setdefault(event.sequence, []).append(event.token)
    assert [tokens[0], tokens[4]] == expected


def test_more_than_there_are_lanes_wait(engine, asked):
    requests, expected = asked
    session, tokens = engine.session(), {}
    for each in requests:
        session.add(each)
    for event in session.events:
        tokens.setdefault(event.sequence, []).append(event.token)
    assert [tokens[number] for number in range(len(requests))] == expected


def test_what_an_engine_cannot_run_is_refused_when_it_is_added(engine):
    session = engine.session()
    with pytest.raises(PromptError, match="the context is 512"):
        session.add(TokenRequest(prompt=[1] * 510, max_new_tokens=9, sampling=SamplingConfig()))


def test_nothing_is_kept_of_sequences_that_have_ended(engine):
    def held():
        list(engine.run([[1, 2, 3], [4]], max_new_tokens=4))
        return sum(array.nbytes for array in jax.live_arrays())

    assert held() == held() == held()
