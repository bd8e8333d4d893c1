"""`generate` and `stream` take prompts or conversations, one or several, and say the same of both; an engine says where
tokens are routed, with which logits, and what it is itself."""

from dataclasses import replace

import numpy as np
import pytest

import seqmoe_jax as sm
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.testing import tiny_engine
from seqmoe_jax.text.chat import Chat

PROMPT = "an expert"
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
    assert last == {number: answer.finish_reason for number, answer in run.answers.items()}
    assert len(run.answers[0].tokens) == 3
    assert run.answers[0].tokens == engine.generate("abc", max_new_tokens=3).tokens
    assert engine.request("abc").max_new_tokens == engine.token_engine.context - 3


def test_a_run_ends_when_nobody_wants_it(engine):
    run = engine.run([engine.request("abc", max_new_tokens=200)])
    for count, _ in enumerate(run, start=1):
        if count == 2:
            run.drop(0)
    assert len(run.answers[0].tokens) == 2
    assert engine.stats.new_tokens < 20


@pytest.fixture(scope="module")
def trace(engine):
    return sm.Trace.record(engine, [PROMPT, list(b"a slot <b>")], max_new_tokens=5, splits=["train", "test"])


def test_a_line_in_the_terminal_and_a_table_in_the_notebook(engine, trace):
    out = engine.generate(PROMPT, max_new_tokens=3)
    for each in (engine, out, out.stats, trace):
        assert len(repr(each)) < 300
        assert "\n" not in repr(each)
        assert "object at 0x" not in repr(each)
        assert each._repr_html_().startswith("<div>")
    assert len(repr(engine.token_engine.model.weights)) < 100
    assert len(repr(engine.token_engine.model)) < 300
    assert "residency (8 slots): 50.0 %" in engine._repr_html_()
    assert str(out) == out.text


def test_what_a_notebook_shows_is_escaped(engine):
    out = engine.generate(PROMPT, max_new_tokens=1)
    shown = sm.Generation(text="<script>", reasoning="", tokens=[1], finish_reason="length", stats=out.stats)
    assert "&lt;script&gt;" in shown._repr_html_()
    assert "<script>" not in shown._repr_html_()


def test_a_closed_engine_says_so():
    engine = tiny_engine()
    engine.close()
    assert repr(engine) == "Engine(closed)"
    assert "closed" in engine._repr_html_()


def test_logits_are_those_that_generation_follows_at_any_residency(engine):
    out = engine.generate(PROMPT, max_new_tokens=6)
    tokens = [*PROMPT.encode(), *out.tokens]
    logits = engine.logits(tokens[:-1])
    assert engine.generate(PROMPT, max_new_tokens=6).tokens == out.tokens  # reading has broken nothing
    assert logits.shape == (len(tokens) - 1, 256)
    assert logits.dtype == np.float32
    assert logits[len(PROMPT) - 1 :].argmax(1).tolist() == out.tokens
    with tiny_engine(residency=1.0) as full:
        np.testing.assert_array_equal(logits, full.logits(np.array(tokens[:-1])))


def test_routing_is_what_a_trace_records(engine, trace):
    where = engine.routing(trace.tok[: trace.lens[0]])
    assert (where.ids.shape, where.weights.shape) == ((trace.lens[0], 2, 2), (trace.lens[0], 2, 2))
    assert (np.sort(where.ids, axis=2) == np.sort(trace.ids[: trace.lens[0]], axis=2)).all()
    np.testing.assert_allclose(where.weights.sum(2), 1, rtol=1e-5)
    with pytest.raises(sm.PromptError, match="empty"):
        engine.routing([])


def test_a_trace_is_recorded_saved_loaded_and_divided(engine, trace, tmp_path):
    trace.save(tmp_path / "t.npz")
    again = sm.Trace.load(tmp_path / "t.npz")
    assert again.digest == trace.digest
    assert trace.model == "tiny"
    assert trace.prefill_lens.tolist() == [len(PROMPT), 10]
    assert trace.select("test").tok[:10].tolist() == list(b"a slot <b>")
    np.testing.assert_allclose(trace.popularity().sum(1), 2, rtol=1e-6)
    written = sm.Trace.record(engine, [PROMPT], tmp_path / "one.npz", max_new_tokens=5)
    assert (written.digest, written.split) == (sm.Trace.load(tmp_path / "one.npz").digest, None)
    for prompts, more, said in [
        ("text", {}, "list of prompts to record, got text"),
        ([], {}, "got none"),
        ([PROMPT], {"splits": ["a", "b"]}, "a split for each of 1 prompts, got 2"),
        ([PROMPT], {"max_new_tokens": 1}, "at least 2"),
    ]:
        with pytest.raises(sm.PromptError, match=said):
            sm.Trace.record(engine, prompts, **more)


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
