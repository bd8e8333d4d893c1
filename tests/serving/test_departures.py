"""Clients leave at any moment: nothing goes on for them, and the log says nothing. Servers end at any moment too."""

import json
import signal
import socket
import struct
import threading
import time
from http.client import HTTPConnection

import pytest
from client import COMPLETIONS, HELLO, JSON, call, events, post, raw
from scripted import Held, scripted

from seqmoe_jax.errors import PromptError
from seqmoe_jax.generation import Piece
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.listener import Server, bind
from seqmoe_jax.serving.server import Service

BODY = json.dumps({"messages": HELLO, "max_tokens": 60, "stream": True}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def until_idle(port):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        load = json.loads(call(port, "GET", "/health")[1])
        if (load["running"], load["waiting"]) == (0, 0):
            return
        time.sleep(0.02)
    raise AssertionError(load)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "sent",
    [
        HEAD[:30],
        HEAD,
        WHOLE[:-20],
        WHOLE,
        WHOLE.replace(b"true", b"null"),
        WHOLE + WHOLE,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
        HEAD + b"Content-Length: 99999999\r\n\r\n" + b"x" * 200_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_one_that_leaves_is_forgotten_in_silence(port, faults, sent, reset):
    for pause in (0.0, 0.05):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(sent)
            time.sleep(pause)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until_idle(port)
    assert faults == []


def test_one_that_leaves_the_queue_is_never_run(serve, engine, monkeypatch):
    release, prompts = threading.Event(), []

    def held(number, request):
        prompts.append(request.tokens)
        release.wait(30)
        yield Piece(sequence=number, text="", reasoning="", finish_reason="stop")

    monkeypatch.setattr(engine, "run", scripted(held))
    with serve() as port:
        first = threading.Thread(target=post, args=(port, COMPLETIONS), kwargs=dict(prompt="a", max_tokens=1))
        first.start()
        while not prompts:
            time.sleep(0.01)
        second = HTTPConnection("127.0.0.1", port)
        second.request("POST", COMPLETIONS, json.dumps({"prompt": "left", "max_tokens": 1}), JSON)
        while json.loads(call(port, "GET", "/health")[1])["waiting"] != 1:
            time.sleep(0.01)
        second.close()
        while json.loads(call(port, "GET", "/health")[1])["waiting"]:
            time.sleep(0.01)
        release.set()
        first.join(30)
    assert prompts == [list(b"a")]


def finish(answers, compiled):
    """Ends the compilation once four have their answers; or after a while, which is too late."""
    deadline = time.monotonic() + 15
    while len(answers) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    if len(answers) < 4:
        answers.append("none came before the compilation ended")
    compiled.set()


def test_a_server_that_ends_tells_whoever_waits_at_once(serve, engine, monkeypatch, faults):
    """Also in the middle of a compilation, which takes minutes and cannot be interrupted."""
    compiled, began = threading.Event(), threading.Event()
    run = type(engine).run

    def compiling(poll):
        began.set()
        compiled.wait(60)
        return run(engine, poll=poll)

    monkeypatch.setattr(engine, "run", compiling)
    answers = []
    try:
        with serve(limits=Limits(linger=30.0)) as port:
            asking = [
                threading.Thread(target=lambda s=stream: answers.append(post(port, COMPLETIONS, prompt="a", stream=s)))
                for stream in (False, True, False)
            ]
            for thread in asking:
                thread.start()
            began.wait(30)
            half = threading.Thread(target=lambda: answers.append(raw(port, WHOLE[:-20])))
            half.start()
            threading.Thread(target=finish, args=(answers, compiled)).start()
            time.sleep(0.3)
        assert "none came before the compilation ended" not in answers
        assert sorted(answer[0] for answer in answers if isinstance(answer, tuple)) == [503] * 3
        assert all(b"503" in answer[:12] for answer in answers if isinstance(answer, bytes))
        assert "shutting down" in str(answers[0])
        for thread in (*asking, half):
            thread.join(10)
    finally:
        compiled.set()
    assert faults == []


def test_a_stream_is_told_that_the_server_ends(serve, engine, monkeypatch):
    steps = threading.Semaphore(3)
    run = type(engine).run

    monkeypatch.setattr(engine, "run", lambda poll: Held(run(engine, poll=poll), steps))
    with serve() as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/v1/chat/completions", BODY, JSON)
        response = connection.getresponse()
        response.readline()
    last = response.read().decode().strip().split("\n\n")[-1]
    connection.close()
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize("drain", [30.0, 0.3])
def test_sigterm_lets_streams_end_within_its_limit(engine, monkeypatch, drain):
    steps = threading.Semaphore(2)
    run = type(engine).run

    monkeypatch.setattr(engine, "run", lambda poll: Held(run(engine, poll=poll), steps))
    service = Service(engine, name="tiny", sampling=SamplingConfig())
    server = Server(service, drain=drain)
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listening]))
        thread.start()
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/v1/chat/completions", BODY.replace(b"60", b"8"), JSON)
        response = connection.getresponse()
        response.readline()
        server.handle_exit(signal.SIGTERM, None)
        if drain > 1:
            status, answer = post(port, COMPLETIONS, prompt="a", max_tokens=1)
            assert (status, "shutting down" in answer["error"]["message"]) == (503, True)
            status, health = call(port, "GET", "/health")
            assert (status, json.loads(health)["status"]) == (503, "draining")
            steps.release(60)
        last = response.read().decode().strip().split("\n\n")[-1]
        connection.close()
        steps.release(60)
        thread.join(20)
        assert not thread.is_alive()
        assert service.scheduler.join(20.0)
    assert (last == "data: [DONE]") == (drain > 1)
    assert ("shutting down" in last) == (drain < 1)


def test_streams_survive_clients_that_split_lines_anywhere(port, engine, monkeypatch):
    text = "a\u2028b\u2029c\u0085d\x0be\x1cf\r\ng\U0001f642"

    def said(number, request):
        yield Piece(sequence=number, text=text, reasoning=text, finish_reason="stop")

    monkeypatch.setattr(engine, "run", scripted(said))
    _, data = call(port, "POST", "/v1/chat/completions", {"messages": HELLO, "stream": True})
    lines = [line for line in data.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == text
    assert post(port, "/v1/chat/completions", messages=HELLO)[1]["choices"][0]["message"]["content"] == text
    assert events(port, COMPLETIONS, prompt="a")[0]["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("fault", "message"),
    [(RuntimeError("secret\nlines"), "the server failed; its log says how"), (PromptError("it ended"), "it ended")],
)
def test_a_generation_that_fails_is_the_servers_fault(port, engine, monkeypatch, fault, message):
    def failing(number, request):
        for _ in request.tokens[1:]:
            yield Piece(sequence=number, text="a", reasoning="", finish_reason=None)
        raise fault

    monkeypatch.setattr(engine, "run", scripted(failing))
    for prompt in ("a", "ab"):
        status, answer = post(port, COMPLETIONS, prompt=prompt)
        assert (status, answer["error"]["message"], answer["error"]["type"]) == (500, message, "server_error")
    assert post(port, COMPLETIONS, prompt="a", stream=True)[0] == 500
    status, data = call(port, "POST", COMPLETIONS, {"prompt": "ab", "stream": True})
    last = data.decode().strip().split("\n\n")[-1]
    assert status == 200
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == message


def test_a_connection_is_kept_for_the_next_request(port):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    for body in ({"prompt": "a", "max_tokens": 1}, {"prompt": "a", "n": 2}, {"prompt": "a", "max_tokens": 1}):
        connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
        response = connection.getresponse()
        response.read()
        assert response.status == (400 if "n" in body else 200)
        assert not response.will_close
        assert connection.sock is not None
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [("HEAD", "/health", 200, None), ("HEAD", "/v1/models", 200, None), ("HEAD", COMPLETIONS, 405, "POST"),
     ("OPTIONS", COMPLETIONS, 405, "POST"), ("GET", COMPLETIONS, 405, "POST"), 
     ("DELETE", "/v1/models", 405, "GET, HEAD"),
     ("OPTIONS", "*", 404, None), ("BREW", "/tea", 404, None), ("GET", "/v1/models/other", 404, None),
     ("GET", "/v1/models/tiny", 200, None), ("GET", "/%00/%ff/", 404, None)],
)  # fmt: skip
def test_what_is_not_there_is_an_error_in_openais_form(port, method, path, status, allow):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path)
    response = connection.getresponse()
    data = response.read()
    assert response.status == status
    assert response.getheader("content-type") == "application/json"
    if allow is not None:
        assert sorted(response.getheader("allow").split(", ")) == sorted(allow.split(", "))
    if method != "HEAD" and status != 200:
        assert json.loads(data)["error"]["type"] == "invalid_request_error"
    assert (method == "HEAD") == (data == b"")
    connection.close()
