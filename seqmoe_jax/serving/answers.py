"""OpenAI's JSON of answers: whole, as the events of a stream, and of errors. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from seqmoe_jax.errors import one_line
from seqmoe_jax.serving.query import Query
from seqmoe_jax.serving.replies import Part, Reply


def dump(body: Any) -> str:
    """JSON in ASCII: clients that read by lines take U+2028, U+2029 and U+0085 for ends of lines."""
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def respond(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response that is JSON."""
    return Response(dump(body), status, headers, "application/json")


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {dump(body)}\n\n"


def error(
    message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": one_line(message), "type": kind, "param": param, "code": code}}


def refused(
    message: str,
    *,
    status: int,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error as a response: the server's from 500, else the client's."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    again = {"retry-after": "1"} if status == 503 else {}
    return respond(error(message, kind, code, param), status, {**(headers or {}), **again})


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Tokens of all prompts and of all that was generated, end tokens included."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def answer(query: Query, choices: list[dict[str, Any]], tokens: dict[str, int]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    kind = "chat.completion" if query.chat else "text_completion"
    return {"id": query.id, "object": kind, "created": query.created, "model": query.model, "choices": choices,
            "usage": tokens}  # fmt: skip


def choice(query: Query, index: int, reply: Reply) -> dict[str, Any]:
    """What came of one prompt."""
    end = {"index": index, "logprobs": None, "finish_reason": reply.finish_reason}
    if not query.chat:
        return {"text": reply.text, **end}
    message: dict[str, Any] = {"role": "assistant", "content": reply.text if reply.text or not reply.calls else None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = reply.calls
    return {"message": message, **end}


def chunk(query: Query, choices: list[dict[str, Any]], tokens: dict[str, int] | None = None) -> dict[str, Any]:
    """One event of a stream; the one with `tokens` is the last and has no choices."""
    kind = "chat.completion.chunk" if query.chat else "text_completion"
    body = {"id": query.id, "object": kind, "created": query.created, "model": query.model, "choices": choices}
    return body | ({"usage": tokens} if query.usage else {})


def beginning(query: Query) -> dict[str, Any]:
    """The first event of a chat."""
    return chunk(query, [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])


def delta(query: Query, index: int, part: Part) -> dict[str, Any]:
    """What one event adds to the choice of one prompt."""
    end = {"index": index, "logprobs": None, "finish_reason": part.finish_reason}
    if not query.chat:
        return {"text": part.text, **end}
    parts = {"content": part.text, "reasoning_content": part.reasoning, "tool_calls": part.calls}
    return {"delta": {name: value for name, value in parts.items() if value}, **end}
