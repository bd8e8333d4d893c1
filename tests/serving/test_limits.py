"""What is too large, too many or too slow is refused before it costs anything, and the refusal arrives."""

import json
import socket
import threading
import time
from http.client import HTTPConnection

import pytest
from client import COMPLETIONS, HELLO, JSON, call, post, raw
from scripted import scripted

from seqmoe_jax.generation import Piece
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving import lengths
from seqmoe_jax.serving.body import parse_json
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.query import parse
from seqmoe_jax.serving.refusal import Refusal

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LARGE = json.dumps({"prompt": "the quick brown fox " * 750_000}).encode()


def error(answer):
    """Status, message and whether the connection closes, of an answer with its headers."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"], b"connection: close" in head.lower()


def test_a_large_body_is_refused_while_its_client_still_sends_it(port):
    status, answer = call(port, "POST", COMPLETIONS, LARGE)
    assert status == 413
    assert "at most 327,680 bytes" in json.loads(answer)["error"]["message"]


def test_a_large_body_in_chunks_is_refused_too(port):
    def chunks():
        for at in range(0, len(LARGE), 1 << 16):
            yield LARGE[at : at + (1 << 16)]

    status, answer = call(port, "POST", COMPLETIONS, chunks())
    assert status == 413
    assert "got more" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/health"])
def test_so_is_one_that_nobody_wants(port, path):
    status, _ = call(port, "POST", path, LARGE)
    assert status == (404 if path == "/v1/embeddings" else 405)


def test_a_client_that_asks_first_is_answered_without_its_body(port):
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_twelve_large_bodies_at_once_keep_nobody_from_their_answers(port):
    statuses = []
    senders = [
        threading.Thread(target=lambda: statuses.append(call(port, "POST", COMPLETIONS, LARGE)[0])) for _ in range(12)
    ]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        assert call(port, "GET", "/health")[0] == 200
        time.sleep(0.01)
    assert statuses == [413] * 12


def test_large_bodies_that_a_context_allows_are_read_a_few_at_a_time(serve):
    limits = Limits(large=1000, large_at_once=1, readers=1)
    with serve(limits=limits) as port:
        body = json.dumps({"prompt": ["word " * 10] * 60, "max_tokens": 1, "temprature": 1}).encode()
        statuses = []
        with socket.create_connection(("127.0.0.1", port)) as slow:  # holds the only place, and leaves
            slow.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:2000])
            time.sleep(0.1)
            senders = [
                threading.Thread(target=lambda: statuses.append(call(port, "POST", COMPLETIONS, body)[0]))
                for _ in range(3)
            ]
            for sender in senders:
                sender.start()
            assert call(port, "GET", "/health")[0] == 200
            assert statuses == []
        for sender in senders:
            sender.join(30)
        assert statuses == [400] * 3


@pytest.mark.parametrize("sent", [b'{"prompt"', b""])
def test_a_body_that_stalls_times_out(serve, sent):
    with serve(limits=Limits(pause=0.2, linger=0.2)) as port:
        status, message, closes = error(raw(port, HEAD + b"Content-Length: 100\r\n\r\n" + sent))
    assert (status, closes) == (408, True)
    assert "0.2" in message


def test_a_body_that_drips_times_out(serve):
    with serve(limits=Limits(pause=5.0, body_time=0.5, linger=0.2)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n")
            connection.settimeout(0.05)
            answer = b""
            while not answer.endswith(b"}"):
                connection.sendall(b" ")
                try:
                    answer += connection.recv(10_000)
                except TimeoutError:
                    continue
        assert error(answer)[0] == 408


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHo"])
def test_headers_that_do_not_come_time_out(serve, sent):
    with serve(limits=Limits(pause=0.2)) as port:
        assert error(raw(port, sent))[0] == 408
        # The next request of a connection has as long again, the pause between two is its own matter.
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        for _ in range(3):
            connection.request("GET", "/health")
            assert connection.getresponse().read().startswith(b'{"status":"ok"')
            time.sleep(0.1)
        connection.close()


def test_bytes_that_are_no_http_get_an_error_in_the_same_form(port):
    for garbage in (b"garbage\r\n\r\n", b"\x16\x03\x01" + bytes(200), b"GET / HTTP/1.1\r\n" + b"a" * 100_000,
                    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n"):  # fmt: skip
        status, message, closes = error(raw(port, garbage))
        assert (status, closes) == (400, True)
        assert "HTTP" in message


class Counting:
    """A tokenizer that counts what it is given."""

    def __init__(self, tokenizer):
        self.vocab, self.decode, self._encode, self.characters = tokenizer.vocab, tokenizer.decode, tokenizer.encode, 0

    def encode(self, text, **options):
        self.characters += len(text)
        return self._encode(text, **options)


@pytest.mark.parametrize(
    ("chat", "body"),
    [
        (False, {"prompt": "a" * 200_000}),
        (False, {"prompt": "a" * 60_000}),
        (False, {"prompt": [0] * 200_000}),
        (True, {"messages": [{"role": "user", "content": "a" * 60_000}]}),
        (True, {"messages": [{"role": "user", "content": "a" * 200}] * 300}),
        (True, {"messages": HELLO * 600}),
        (True, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]}),
        (True, {"messages": HELLO, "chat_template_kwargs": {"a": ["a" * 30_000] * 2}}),
    ],
)
def test_a_text_that_is_too_long_is_refused_after_a_few_pieces(engine, monkeypatch, chat, body):
    counting = Counting(engine.tokenizer)
    monkeypatch.setattr(engine, "tokenizer", counting)
    with pytest.raises(Refusal, match="the context is 512 tokens") as caught:
        parse(body, engine, SamplingConfig(), model="tiny", chat=chat)
    assert caught.value.code == "context_length_exceeded"
    assert counting.characters <= 1 << 14


def test_a_text_of_long_tokens_is_not_too_long(engine, monkeypatch):
    class Spaces:
        vocab = 256
        decode = engine.tokenizer.decode

        def encode(self, text, **options):
            return [32] * (len(text) // 100)

    monkeypatch.setattr(engine, "tokenizer", Spaces())
    lengths.check_text_length("prompt", " " * 50_000, engine)
    query = parse({"prompt": " " * 50_000}, engine, SamplingConfig(), model="tiny", chat=False)
    assert len(query.requests[0].tokens) == 500


def test_a_body_of_very_many_values_is_not_parsed():
    with pytest.raises(Refusal, match="at most 100 values") as caught:
        parse_json(b"[" + b"{}," * 60 + b"1]", Limits(values=100))
    assert caught.value.status == 413


@pytest.mark.parametrize("count", [65, 200])
def test_more_prompts_than_requests_may_wait_are_one_request(port, engine, monkeypatch, count):
    def echo(number, request):
        text = engine.tokenizer.decode(request.tokens)
        yield Piece(sequence=number, text=text, reasoning="", finish_reason="stop")

    monkeypatch.setattr(engine, "run", scripted(echo))
    prompts = [f"prompt {index}" for index in range(count)]
    status, answer = post(port, COMPLETIONS, prompt=prompts)
    assert status == 200
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(prompts))


def test_requests_that_do_not_fit_into_the_queue_may_come_again(serve, engine, monkeypatch):
    release = threading.Event()
    run = type(engine).run
    monkeypatch.setattr(engine, "run", lambda poll: (release.wait(30), run(engine, poll=poll))[1])
    statuses = []
    with serve(limits=Limits(waiting=2)) as port:
        senders = [
            threading.Thread(target=lambda: statuses.append(post(port, COMPLETIONS, prompt="a", max_tokens=1)[0]))
            for _ in range(8)
        ]
        for sender in senders:
            sender.start()
        deadline = time.monotonic() + 20
        while len(statuses) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(statuses) == {503}
        release.set()
        for sender in senders:
            sender.join(30)
        assert 200 in statuses
        assert post(port, COMPLETIONS, prompt=["a"] * 5, max_tokens=1)[0] == 200


def test_only_json_that_says_so_is_read(port):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for kind, expected in [
        (None, 415), ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data", 415),
        ("text/plain; application/json", 415), ("application/json; charset=latin-1", 415),
        ("application/json", 200), ("Application/JSON; charset=UTF-8", 200), ('application/json;charset="utf-8"', 200),
    ]:  # fmt: skip
        status, answer = call(port, "POST", COMPLETIONS, body, {} if kind is None else {"Content-Type": kind})
        assert status == expected, kind
        assert status == 200 or "application/json" in json.loads(answer)["error"]["message"] or "UTF-8" in str(answer)
    assert call(port, "POST", COMPLETIONS, body, {**JSON, "Content-Encoding": "gzip"})[0] == 415
