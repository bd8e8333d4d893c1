"""OpenAI's JSON, in and out: `/v1/completions` and `/v1/chat/completions`. Pure functions.

Reference: OpenAI, "API reference", completions and chat. Fields that would change the output and are not supported are
refused, not ignored. Beyond OpenAI's: `top_k`, `min_p`, and `chat_template_kwargs` for the chat template's options.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.generation import Request
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.text.messages import check_messages

MAX_TOKENS = 16  # of a completion that gives no number; a chat gets what the context leaves (both as OpenAI has it)
# Fields that are not supported, and the JSON of their values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "n": ("1",),
    "best_of": ("1",),
    "echo": ("false",),
    "suffix": ('""',),
    "logprobs": ("false",),
    "top_logprobs": ("0",),
    "logit_bias": ("{}",),
    "presence_penalty": ("0", "0.0"),
    "frequency_penalty": ("0", "0.0"),
    "tools": ("[]",),
    "functions": ("[]",),
    "tool_choice": ('"none"', '"auto"'),
    "response_format": ('{"type": "text"}',),
    "modalities": ('["text"]',),
}


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a body asks for. With `usage` a stream ends with a chunk that counts tokens."""

    chat: bool
    requests: list[Request]
    stream: bool
    usage: bool
    id: str
    created: int


def parse(body: Any, engine: Engine, base: SamplingConfig, *, chat: bool) -> Query:
    """Reads a body of `/v1/chat/completions` (`chat`) or `/v1/completions`; `base` gives the sampling it leaves open.

    Raises `ConfigError` or `PromptError`, which name the field.
    """
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and json.dumps(value) not in neutral:
            raise ConfigError(f"{name} is not supported, got {json.dumps(value)[:60]}; leave it out")
    options: dict[str, Any] = dict(
        sampling=_sampling(body, base), stop=_stop(body.get("stop")), max_new_tokens=_max_new_tokens(body, chat)
    )
    if chat:
        extra = dict(_field(body, "chat_template_kwargs", dict) or {})
        if body.get("reasoning_effort") is not None:
            extra["reasoning_effort"] = body["reasoning_effort"]
        requests = [engine.request(messages=check_messages(body.get("messages")), chat_options=extra, **options)]
    else:
        requests = [
            engine.request(prompt, **options, index=index) for index, prompt in enumerate(_prompts(body.get("prompt")))
        ]
    return Query(
        chat=chat,
        requests=requests,
        stream=_field(body, "stream", bool) or False,
        usage=_field(_field(body, "stream_options", dict) or {}, "include_usage", bool) or False,
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
    )


def _field(body: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field of one of these JSON types; None where it is absent or null. Raises `ConfigError`."""
    value = body.get(name)
    # bool is an int in Python, but not in JSON.
    if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"the request: field {name!r} must be {expected}, got {value!r}")
    return value


def _max_new_tokens(body: Mapping[str, Any], chat: bool) -> int | None:
    for name in ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",):
        if (value := _field(body, name, int)) is not None:
            if value <= 0:
                raise ConfigError(f"the request: field {name!r} must be positive, got {value}")
            return int(value)
    return None if chat else MAX_TOKENS


def _sampling(body: Mapping[str, Any], base: SamplingConfig) -> SamplingConfig:
    """`base` with the numbers that are given; without a seed every request draws its own."""
    numbers = {name: _field(body, name, int, float) for name in ("temperature", "top_p", "min_p")}
    given = {name: float(number) for name, number in numbers.items() if number is not None}
    if (top_k := _field(body, "top_k", int)) is not None:
        given["top_k"] = max(0, top_k) % 2**31  # -1 is off, as elsewhere
    seed = _field(body, "seed", int)
    return base.override(**given, seed=secrets.randbits(32) if seed is None else seed % 2**32)


def _stop(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ConfigError(f"stop must be a non-empty string or a list of them, got {value!r}")
    return stops


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        lists = value if all(isinstance(item, list) and item for item in value) else [value]
        if all(isinstance(token, int) and not isinstance(token, bool) for tokens in lists for token in tokens):
            return lists
    raise PromptError(f"prompt must be a string, token ids, or a list of either, got {str(value)[:60]!r}")


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Tokens of all prompts and of all that was generated, end tokens included."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def answer(query: Query, model: str, choices: list[dict[str, Any]], tokens: dict[str, int]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    kind = "chat.completion" if query.chat else "text_completion"
    return {"id": query.id, "object": kind, "created": query.created, "model": model, "choices": choices,
            "usage": tokens}  # fmt: skip


def choice(query: Query, index: int, text: str, reasoning: str, finish_reason: str) -> dict[str, Any]:
    """What came of one prompt."""
    end = {"index": index, "logprobs": None, "finish_reason": finish_reason}
    if not query.chat:
        return {"text": text, **end}
    message = {"role": "assistant", "content": text}
    return {"message": message | ({"reasoning_content": reasoning} if reasoning else {}), **end}


def chunk(
    query: Query, model: str, choices: list[dict[str, Any]], tokens: dict[str, int] | None = None
) -> dict[str, Any]:
    """One event of a stream; the one with `tokens` is the last and has no choices."""
    kind = "chat.completion.chunk" if query.chat else "text_completion"
    body = {"id": query.id, "object": kind, "created": query.created, "model": model, "choices": choices}
    return body | ({"usage": tokens} if query.usage else {})


def delta(query: Query, index: int, text: str, reasoning: str, finish_reason: str | None) -> dict[str, Any]:
    """What one event adds to the choice of one prompt."""
    end = {"index": index, "logprobs": None, "finish_reason": finish_reason}
    if not query.chat:
        return {"text": text, **end}
    parts = {"content": text, "reasoning_content": reasoning}
    return {"delta": {name: part for name, part in parts.items() if part}, **end}


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
