"""`generate` and `stream` take prompts or conversations, one or several, and say the same of both."""

from dataclasses import replace

import pytest

from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.testing import tiny_engine
from seqmoe_jax.text.chat import Chat

HELLO = [{"role": "user", "content": "hello"}]


def shout(messages, mark="!"):
    return "".join(message["content"] + mark for message in messages)


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(residency=0.5, max_batch=2)
    engine.chat = Chat(render=shout)
    return engine


def test_a_conversation_is_its_prompt(engine):
    out = engine.generate(messages=HELLO, max_new_tokens=6)
    assert out == replace(engine.generate("hello!", max_new_tokens=6), stats=out.stats)
    assert "".join(engine.stream(messages=HELLO, max_new_tokens=6)) == out.text
    assert out.reasoning == ""
    asked = engine.generate(messages=HELLO, chat_options={"mark": "?"}, max_new_tokens=6)
    assert asked.tokens == engine.generate("hello?", max_new_tokens=6).tokens


def test_a_list_of_conversations_is_a_batch(engine):
    both = engine.generate(messages=[HELLO, [*HELLO, *HELLO]], max_new_tokens=4)
    assert [out.tokens for out in both] == [
        out.tokens for out in engine.generate(["hello!", "hello!hello!"], max_new_tokens=4)
    ]
    assert isinstance(engine.generate(messages=[HELLO], max_new_tokens=4), list)


def test_requests_of_one_batch_have_their_own_lengths(engine):
    requests = [engine.request("abc", max_new_tokens=3), engine.request([1, 2, 3], max_new_tokens=7, stop=["\x00"])]
    run = engine.run(requests)
    last = {piece.sequence: piece.finish_reason for piece in run if piece.finish_reason}
    assert last == dict(enumerate(run.reasons))
    assert len(run.new[0]) == 3
    assert run.new[0] == engine.generate("abc", max_new_tokens=3).tokens
    assert engine.request("abc").max_new_tokens == engine.token_engine.context - 3


def test_a_run_ends_when_nobody_wants_it(engine):
    run = engine.run([engine.request("abc", max_new_tokens=200)])
    for count, _ in enumerate(run, start=1):
        if count == 2:
            run.drop(0)
    assert len(run.new[0]) == 2
    assert engine.stats.new_tokens < 20


# Last: it takes the engine's template away.
def test_what_cannot_be_a_prompt_is_refused(engine):
    for arguments in (dict(), dict(prompt="a", messages=HELLO), dict(messages=[{"content": "x"}])):
        with pytest.raises(PromptError, match="message"):
            engine.generate(**arguments)
    with pytest.raises(PromptError, match="stop"):
        engine.generate("a", stop="abc")
    with pytest.raises(PromptError, match="no option 'colour'"):
        engine.generate(messages=HELLO, chat_options={"colour": "red"})
    with pytest.raises(ConfigError, match="'greedy', 'model'"):
        engine.generate("a", sampling="best")
    engine.chat = None
    with pytest.raises(PromptError, match="no chat template"):
        engine.generate(messages=HELLO)
