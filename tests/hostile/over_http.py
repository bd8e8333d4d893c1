"""The server's application without a socket: bodies and headers as no client of ours would send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

from seqmoe_jax.errors import MOST_LINE, ServerError
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving.server import Service
from seqmoe_jax.testing import tiny_engine
from seqmoe_jax.text import Chat
from tests.hostile.harness import Reader
from tests.hostile.mutations import spoiled, spoiled_json

HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"), (b"accept", b"*/*"))
COMPLETION: dict[str, Any] = {
    "model": "tiny", "prompt": ["abc", "de"], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "seed": 3, "stop": ["q", "z"], "stream": False, "n": 1, "echo": False, "logit_bias": {}, "user": "u",
    "stream_options": {"include_usage": True},
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "tiny", "max_completion_tokens": 3, "temperature": 0, "stop": "q", "stream": False, "tool_choice": "none",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "user", "content": "And now?"},
    ],
    "response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip


@contextmanager
def http_readers() -> Iterator[list[Reader]]:
    """The readers of requests, as long as their engine is there."""
    engine = tiny_engine(residency=0.5, max_batch=2, context=512)
    engine.chat = Chat(render=_render)
    loop = asyncio.new_event_loop()
    service = Service(engine, name="tiny", sampling=SamplingConfig())
    app = service.app()

    def send(path: str, body: bytes, headers: list[tuple[bytes, bytes]], method: str = "POST") -> None:
        _judge(*loop.run_until_complete(_call(app, method, path, body, headers)))

    try:
        yield [
            Reader(
                name="HTTP body of a completion", attempt=partial(_body, send, "/v1/completions", COMPLETION), share=0.5
            ),
            Reader(name="HTTP body of a chat", attempt=partial(_body, send, "/v1/chat/completions", CHAT), share=0.5),
            Reader(name="HTTP headers and paths", attempt=partial(_headers, send)),
        ]
    finally:
        loop.call_soon(service.close)
        loop.run_until_complete(asyncio.sleep(0))
        service.scheduler.join(20.0)
        loop.close()


def _render(messages: Any, enable_thinking: Any = None) -> str:
    return "".join(f"{message['content']}{json.dumps(message.get('tool_calls'))}" for message in messages)


async def _call(app: Any, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    """Status and bytes of the answer of an ASGI application; the body comes in two parts."""
    parts = [{"type": "http.request", "body": part, "more_body": more} for part, more in
             ((body[: len(body) // 2], True), (body[len(body) // 2 :], False))]  # fmt: skip
    sent: list[dict[str, Any]] = []
    done = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop(0)
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            done.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode("utf-8", "surrogatepass"), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def _judge(status: int, data: bytes) -> None:
    """An answer is one that was asked for, or an error of the client in OpenAI's form, whose line is raised."""
    if status == 200:
        return
    assert 400 <= status < 500, (status, data[:300])
    line = json.loads(data)["error"]["message"]
    assert isinstance(line, str), data[:300]
    assert line.isprintable(), line[:300]
    assert len(line) <= MOST_LINE, line[:300]
    raise ServerError(line)


def _body(send: Any, path: str, good: dict[str, Any], draw: Random) -> None:
    send(path, spoiled_json(good, draw), list(HEADERS))


def _headers(send: Any, draw: Random) -> None:
    headers = [(name, spoiled(value, draw) if draw.random() < 0.5 else value) for name, value in HEADERS]
    names = (b"content-length", b"content-encoding", b"transfer-encoding", b"origin", b"host", b"expect")
    values = (
        b"-1",
        b"1" * 5000,
        "\u00b2".encode("latin-1"),
        b"gzip",
        b"",
        b"\xff\xfe",
        b"http://evil",
        b"0x10",
        b"1e9",
    )
    for _ in range(draw.choice((0, 1, 2))):
        headers.append((draw.choice(names), draw.choice(values)))
    paths = ("/v1/completions", "/v1/models", "/health", "/", "//", "/v1/models/../x", "/v1/\x00", "/" + "x" * 9000,
             "/v1/models/" + "\U0001f642" * 99, "/v1/completions/")  # fmt: skip
    methods = ("POST", "POST", "POST", "GET", "PUT", "OPTIONS", "HEAD", "BREW")
    send(draw.choice(paths), json.dumps(COMPLETION).encode(), headers, draw.choice(methods))
