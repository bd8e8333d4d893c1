"""The server speaks OpenAI's protocol over real sockets: answers, streams, errors, departures, an orderly end."""

import json
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection

import pytest
from client import HELLO, JSON, call, events, post

from seqmoe_jax.errors import ConfigError, ServerError
from seqmoe_jax.generation import Run
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving.listener import bind
from seqmoe_jax.serving.query import parse
from seqmoe_jax.serving.scheduler import Job


def test_it_says_what_it_serves(port):
    status, data = call(port, "GET", "/v1/models")
    assert status == 200
    assert [model["id"] for model in json.loads(data)["data"]] == ["tiny"]
    status, data = call(port, "GET", "/health")
    assert (status, json.loads(data)) == (200, {"status": "ok", "running": 0, "waiting": 0})


def test_a_completion_is_what_the_engine_generates(port, engine):
    status, body = post(port, "/v1/completions", model="tiny", prompt="def add(a, b):", max_tokens=5)
    assert status == 200
    expected = engine.generate("def add(a, b):", max_new_tokens=5)
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"text": expected.text, "index": 0, "logprobs": None, "finish_reason": "length"}]
    prompt = len(engine.tokenizer.encode("def add(a, b):"))
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}
    tokens = engine.tokenizer.encode("def add(a, b):")
    assert post(port, "/v1/completions", prompt=tokens, max_tokens=5)[1]["choices"] == body["choices"]


def test_a_chat_is_answered(port, engine):
    status, body = post(port, "/v1/chat/completions", model="tiny", messages=HELLO, max_completion_tokens=4)
    assert status == 200
    expected = engine.generate(messages=HELLO, max_new_tokens=4)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": expected.text}


def test_a_stream_has_the_same_text(port, engine):
    expected = engine.generate(messages=HELLO, max_new_tokens=4)
    chunks = events(port, "/v1/chat/completions", messages=HELLO, max_tokens=4, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == expected.text
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [expected.finish_reason]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(expected.tokens)
    pieces = events(port, "/v1/completions", prompt="def add(a, b):", max_tokens=5)
    text = engine.generate("def add(a, b):", max_new_tokens=5).text
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text


def test_a_stop_string_ends_it(port, engine):
    text = engine.generate("def add(a, b):", max_new_tokens=12).text
    _, body = post(port, "/v1/completions", prompt="def add(a, b):", max_tokens=12, stop=text[1:3])
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.find(text[1:3])], "stop")


def test_several_prompts_are_decoded_together(port, engine):
    prompts = ["def add(a, b):", "Once upon a time", "A third"]
    _, body = post(port, "/v1/completions", prompt=prompts, max_tokens=3)
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    assert len({choice["text"] for choice in choices}) == 3
    pair = engine.generate(prompts[:2], max_new_tokens=3)
    assert [choice["text"] for choice in choices[:2]] == [out.text for out in pair]
    assert body["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "JSON"),
        ("/v1/completions", [], 400, "object"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, "does not exist"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, 400, "context"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be an integer from 1 to"),
        ("/v1/completions", {"prompt": "a", "top_k": True}, 400, "top_k must be an integer from -1 to"),
        ("/v1/completions", {"prompt": "a", "stream": "yes"}, 400, "stream must be true or false, got 'yes'"),
        ("/v1/completions", {"prompt": [10**9]}, 400, "vocabulary"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n is not supported"),
        ("/v1/completions", {"prompt": "a", "stop": [""], "stream": True}, 400, "stop"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, 3]}, 400, "messages[1]"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
        ("/v1/chat/completions", {"messages": HELLO * 2000, "stream": True}, 400, "context"),
        ("/v1/embeddings", {}, 404, "/v1/embeddings"),
    ],
)
def test_faults_are_in_openais_form(port, path, body, status, words):
    got, data = call(port, "POST", path, body)
    fault = json.loads(data)["error"]
    assert got == status
    assert words in fault["message"]
    assert fault["type"] == "invalid_request_error"


class Slowly(Run):
    def __iter__(self):
        for piece in super().__iter__():
            time.sleep(0.02)
            yield piece


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(port, engine, service, monkeypatch, stream):
    monkeypatch.setattr(engine, "run", lambda poll: Slowly(engine.token_engine, engine.tokenizer, (), poll=poll))
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(dict(messages=HELLO, max_tokens=200, stream=stream)), JSON
    )
    if stream:
        response = connection.getresponse()
        response.readline()
        response.close()
    while not service.scheduler.load()["running"]:
        time.sleep(0.01)
    connection.close()
    deadline = time.monotonic() + 60
    while service.scheduler.load()["running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.scheduler.load() == {"running": 0, "waiting": 0}
    # The prompt may have been in the middle; its first token comes of it all the same.
    while not engine.stats.new_tokens and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 0 < engine.stats.new_tokens < 200


def ignore(piece):
    pass


def test_what_cannot_run_is_refused_at_once(service, engine):
    request = engine.request("abc", max_new_tokens=2)
    jobs = [Job(request=request, deliver=ignore) for _ in range(100)]
    with pytest.raises(ServerError, match="64 at most"):  # noqa: PT012  some of them begin meanwhile
        for job in jobs:
            service.scheduler.submit([job])
    for job in jobs:
        job.cancelled = True


def test_numbers_override_what_the_server_starts_from(engine):
    base = SamplingConfig(temperature=0.7, top_k=40)

    def sampling(**body):
        return parse({"prompt": "a", **body}, engine, base, model="tiny", chat=False).requests[0].sampling

    first, second = sampling(), sampling()
    assert (first.temperature, first.top_k) == (0.7, 40)
    assert first.seed != second.seed
    assert sampling(seed=3, top_p=0.5, top_k=-1) == SamplingConfig(temperature=0.7, top_p=0.5, seed=3)
    assert sampling(temperature=0).greedy


def test_a_port_that_is_taken_is_said(port):
    with pytest.raises(ConfigError, match="--port"):
        bind("127.0.0.1", port)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]])
def test_the_command_serves_the_demo_model_and_ends_on_a_signal(ending):
    command = [sys.executable, "-m", "seqmoe_jax.cli", "serve", "demo", "--residency", "0.5", "--port", "0"]
    with subprocess.Popen([*command, "--allow-host", "box.lan"], stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if " at http://" in line)
            port = int(line.split("127.0.0.1:")[1].split("/")[0])
            status, body = post(port, "/v1/chat/completions", messages=HELLO, max_tokens=3, temperature=0)
            assert (status, body["usage"]["completion_tokens"]) == (200, 3)
            assert call(port, "GET", "/health", headers={"Host": "evil.example"})[0] == 421
            assert call(port, "GET", "/health", headers={"Host": "box.lan"})[0] == 200
            for number in ending:
                process.send_signal(number)
            assert process.wait(30) == 0
            said = process.stderr.read()
            assert said.endswith("seqmoe: ended\n")
            assert "Traceback" not in said
        finally:
            process.kill()
