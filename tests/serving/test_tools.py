"""Tools through the server, as OpenAI's own client sends and reads them."""

import json

import pytest
from client import events, post
from scripted import scripted

from seqmoe_jax.generation import Piece
from seqmoe_jax.text.chat import Chat
from seqmoe_jax.text.template import Template

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Weather in Rome?"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def chat(engine, monkeypatch):
    """Has the engine talk by a template, and say what it is told to; gives the prompts that it was asked."""
    prompts = []

    def start(source=TEMPLATE, says="", size=5, reason="stop"):
        def answered(number, request):
            prompts.append(engine.tokenizer.decode(request.tokens))
            for at in range(0, len(says), size):
                yield Piece(sequence=number, text=says[at : at + size], reasoning="", finish_reason=None)
            yield Piece(sequence=number, text="", reasoning="", finish_reason=reason)

        monkeypatch.setattr(engine, "chat", Chat(render=Template({"default": source}, special={}, where="template")))
        monkeypatch.setattr(engine, "run", scripted(answered))
        return prompts

    return start


@pytest.fixture
def client(port):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_calls_a_tool_and_sends_what_it_said(client, chat):
    prompts = chat(says=f"One moment.\n{CALL}\n{CALL}")
    answer = client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL], tool_choice="auto").choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "One moment."
    assert [(c.type, c.function.name, c.function.arguments) for c in answer.message.tool_calls] == [
        ("function", "weather", '{"city": "Rome"}')
    ] * 2
    assert len({c.id for c in answer.message.tool_calls}) == 2
    assert prompts[0].startswith(f"[{json.dumps(TOOL)}]user:Weather")
    chat(says="Sunny.")
    said = [{"role": "tool", "tool_call_id": c.id, "content": f"sun {c.id}"} for c in answer.message.tool_calls]
    answer = client.chat.completions.create(model="tiny", messages=[*ASKED, answer.message, *said], tools=[TOOL])
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "Sunny.")
    assert answer.choices[0].message.tool_calls is None
    assert prompts[1].count("weather") == 3
    assert all(message["content"] in prompts[1] for message in said)


def test_the_official_client_reads_a_streamed_call(client, chat):
    chat(says=f"Hm. {CALL}{CALL}")
    stream = client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL], stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    for index in (0, 1):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.id[:5], first.type, first.function.name, first.function.arguments) == (
            "call_", "function", "weather", "",
        )  # fmt: skip
        assert len(rest) > 1
        assert all((delta.id, delta.function.name) == (None, None) for delta in rest)
        assert "".join(delta.function.arguments for delta in rest) == '{"city": "Rome"}'
    assert "".join(choice.delta.content or "" for choice in choices) == "Hm."
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


def test_the_official_clients_stream_helper_accumulates_calls(client, chat):
    chat(says=CALL)
    with client.chat.completions.stream(model="tiny", messages=ASKED, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'


def test_a_call_that_breaks_off_is_text(port, chat):
    chat(says=CALL[:-20], reason="length")
    choice = post(port, CHAT, messages=ASKED, tools=[TOOL])[1]["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": CALL[:-20]}
    choices = [chunk["choices"][0] for chunk in events(port, CHAT, messages=ASKED, tools=[TOOL])]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == CALL[:-20]
    assert choices[-1]["finish_reason"] == "length"


def test_without_parallel_calls_the_first_one_is_given(port, chat):
    chat(says=CALL + CALL)
    body = dict(messages=ASKED, tools=[TOOL], parallel_tool_calls=False)
    message = post(port, CHAT, **body)[1]["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 1)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(port, CHAT, **body)]
    assert {part["index"] for delta in deltas for part in delta.get("tool_calls", [])} == {0}


def test_a_model_that_is_to_call_none_is_not_told_of_them(port, chat):
    prompts = chat(says=CALL)
    body = dict(messages=ASKED, tools=[TOOL], tool_choice="none")
    assert post(port, CHAT, **body)[1]["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert prompts == ["user:Weather in Rome?"]


@pytest.mark.parametrize(
    ("source", "body", "param", "words"),
    [
        (TEMPLATE, dict(tools=[TOOL], tool_choice="required"), "tool_choice", 'must be "auto" or "none"'),
        (TEMPLATE, dict(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}),
         "tool_choice", "nothing holds a model to a call"),
        (TEMPLATE, dict(tools=[{"type": "function"}]), "tools[0]", "must be"),
        (TEMPLATE, dict(tools={"a": 1}), "tools", "must be a list"),
        (TEMPLATE, dict(functions=[TOOL["function"]]), "functions", "give tools"),
        (TEMPLATE.replace("tools or []", "[]"), dict(tools=[TOOL]), "tools", "not read by this model's chat template"),
        (TEMPLATE.replace("tools or []", "(tools or [])[1:]"), dict(tools=[TOOL]), "tools[0]", "does not appear"),
        (TEMPLATE.replace("tool_call>", "call>"), dict(tools=[TOOL]), "tools", "in a form that cannot be read"),
        (TEMPLATE, dict(tools=[{**TOOL, "function": {**TOOL["function"], "description": "x" * 10**5}}]), "messages",
         "context"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(port, chat, source, body, param, words):
    chat(source)
    status, answer = post(port, CHAT, messages=ASKED, **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


def test_a_model_without_conversations_has_no_tools(port, engine, monkeypatch):
    monkeypatch.setattr(engine, "chat", None)
    status, answer = post(port, CHAT, messages=ASKED, tools=[TOOL])
    assert (status, answer["error"]["param"]) == (400, "tools")
