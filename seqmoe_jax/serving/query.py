"""From the JSON of a request to what the engine is asked: `/v1/completions` and `/v1/chat/completions`.

Reference: OpenAI, "API reference", completions and chat; `fields` has every field.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.fields import shown
from seqmoe_jax.generation import Request
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving.fields import read_fields
from seqmoe_jax.serving.lengths import check_messages_length, check_text_length, new_tokens, too_long
from seqmoe_jax.serving.refusal import Refusal
from seqmoe_jax.serving.replies import Calling
from seqmoe_jax.serving.table import RESERVED
from seqmoe_jax.text.tools import check_tools

MAX_TOKENS = 16  # of a completion that gives no number; a chat gets what the context leaves (both as OpenAI has it)


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a body asks for. With `usage` a stream ends with a chunk that counts tokens; `calling` where the model may
    call tools."""

    chat: bool
    model: str
    requests: list[Request]
    stream: bool
    usage: bool
    id: str
    created: int
    calling: Calling | None = None


def parse(
    body: Any, engine: Engine, base: SamplingConfig, *, model: str, chat: bool, aliases: Sequence[str] = ()
) -> Query:
    """Reads a body of `/v1/chat/completions` (`chat`) or `/v1/completions`; `base` gives the sampling it leaves open,
    `model` and `aliases` are the model's names.

    Raises `Refusal`, which names the field.
    """
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    given = read_fields(body, chat=chat)
    wanted = given.get("model", model)
    check_model(wanted, (model, *aliases))
    name, most = _most_new_tokens(given)
    tools = _tools(given, engine)
    requests = [_conversation(given, tools, engine)] if chat else _prompts(given, engine)
    paths = ["messages"] if chat else _paths(len(requests))
    requests = [
        replace(
            request,
            max_new_tokens=new_tokens(
                path, request.tokens, most, engine, name=name, usual=None if chat else MAX_TOKENS
            ),
            sampling=_sampling(given, base),
            stop=tuple(given.get("stop", ())),
        )
        for path, request in zip(paths, requests, strict=True)
    ]
    for path, request in zip(paths, requests, strict=True):
        try:
            engine.token_engine.check([request.tokens], [request.max_new_tokens])
        except SeqMoEError as error:
            raise Refusal(f"{path}: {error}", param=path) from None
    return Query(
        chat=chat,
        model=wanted,
        requests=requests,
        stream=given.get("stream", False),
        usage=given.get("stream_options.include_usage", False),
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        calling=_calling(given, tools, requests[0], engine) if tools else None,
    )


def check_model(wanted: str, names: Sequence[str]) -> None:
    """Raises `Refusal` for a name that is none of the model's."""
    if wanted not in names:
        raise Refusal(
            f"the model {wanted[:100]!r} does not exist; this server has {' or '.join(map(repr, names))}",
            param="model", status=404, code="model_not_found",
        )  # fmt: skip


def _most_new_tokens(given: Mapping[str, Any]) -> tuple[str, int | None]:
    """The number that was asked for, and under which of its two names."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len({given[name] for name in names}) == 2:
        raise Refusal("max_tokens and max_completion_tokens are two names of one number; give one", param="max_tokens")
    return (names[0], given[names[0]]) if names else ("max_tokens", None)


def _sampling(given: Mapping[str, Any], base: SamplingConfig) -> SamplingConfig:
    """`base` with the numbers that are given; without a seed every prompt draws its own."""
    numbers = {name: given[name] for name in ("temperature", "top_p", "min_p", "top_k") if name in given}
    if "top_k" in numbers:
        numbers["top_k"] = max(0, numbers["top_k"])
    seed = given.get("seed", -1)
    return base.override(**numbers, seed=secrets.randbits(32) if seed == -1 else seed % 2**32)


def _tools(given: Mapping[str, Any], engine: Engine) -> list[Any]:
    """The tools that the model is told of: none where it is not to call any."""
    tools: list[Any] = given.get("tools", [])
    if not tools:
        return []
    try:
        check_tools(tools)
    except SeqMoEError as error:
        raise _at_fault(error, "tools") from None
    if engine.chat is None or "tools" not in engine.chat.options:
        raise Refusal(
            "tools are not read by this model's chat template, so it would not know of them; describe them in a "
            "message, or leave tools out",
            param="tools",
        )
    if engine.chat.calls is None:
        raise Refusal(
            "tools are called by this model in a form that cannot be read from its answers; leave tools out",
            param="tools",
        )
    return [] if given.get("tool_choice") == "none" else tools


def _calling(given: Mapping[str, Any], tools: list[Any], request: Request, engine: Engine) -> Calling:
    assert engine.chat is not None
    assert engine.chat.calls is not None
    thinking = engine.tokenizer.decode(request.tokens[-8:]).rstrip().endswith("<think>")
    return Calling(form=engine.chat.calls, tools=check_tools(tools), thinking=thinking,
                   parallel=given.get("parallel_tool_calls", True))  # fmt: skip


def _at_fault(error: SeqMoEError, field: str) -> Refusal:
    """The refusal for an error that names the part of a field, or else the field."""
    named = re.search(r"(messages|tools)\[\d+\](\.\w+)*", str(error))
    return Refusal(str(error), param=named.group() if named else field)


def conversation(given: Mapping[str, Any], engine: Engine) -> Request:
    """The conversation of a body as a prompt. Raises `Refusal`."""
    return _conversation(given, _tools(given, engine), engine)


def _conversation(given: Mapping[str, Any], tools: list[Any], engine: Engine) -> Request:
    messages = given.get("messages")
    if messages is None:
        raise Refusal('messages must be a list such as [{"role": "user", "content": "Hello"}]', param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            path = f"messages[{index}]"
            raise Refusal(f'{path} must be an object with a "role" and a "content", got {shown(message)}', param=path)
    options = dict(given.get("chat_template_kwargs", {}))
    check_messages_length(messages, {**options, "tools": tools}, engine)
    if "reasoning_effort" in given:
        if options.get("reasoning_effort", given["reasoning_effort"]) != given["reasoning_effort"]:
            raise Refusal(
                "chat_template_kwargs has another reasoning_effort; give it once", param="chat_template_kwargs"
            )
        options["reasoning_effort"] = given["reasoning_effort"]
    _check_options(options, engine)
    if tools:
        options["tools"] = tools
    try:
        request = engine.request(messages=messages, chat_options=options)
    except SeqMoEError as error:
        raise _at_fault(error, "messages") from None
    return replace(request, chat=replace(request.chat, with_calls=True)) if tools and request.chat else request


def _check_options(options: Mapping[str, Any], engine: Engine) -> None:
    """Raises `Refusal` for an option that the chat template never reads: it would do nothing, without a word."""
    read = frozenset() if engine.chat is None else engine.chat.options
    for name in options.keys() - read:
        path = name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
        has = f"it reads {', '.join(sorted(read - RESERVED))}" if read - RESERVED else "it reads none"
        raise Refusal(f"{path} is no option of this model's chat template; {has}; leave it out", param=path)


def _prompts(given: Mapping[str, Any], engine: Engine) -> list[Request]:
    prompts: Sequence[str | list[int]] = given.get("prompt", ())
    if not prompts:
        raise Refusal("prompt is missing: give text or token ids", param="prompt")
    requests = []
    vocabulary = engine.token_engine.model.spec.vocab
    for path, prompt in zip(_paths(len(prompts)), prompts, strict=True):
        if not prompt:
            raise Refusal(f"{path} is empty: give at least one character or token", param=path)
        if isinstance(prompt, str):
            check_text_length(path, prompt, engine)
        elif len(prompt) > engine.token_engine.context:
            raise too_long(path, f"{len(prompt):,} tokens", engine)
        elif not all(0 <= token < vocabulary for token in prompt):
            raise Refusal(f"{path} has a token id outside of the vocabulary of {vocabulary}", param=path)
        try:
            requests.append(engine.request(prompt))
        except SeqMoEError as error:
            raise Refusal(f"{path}: {error}", param=path) from None
    return requests


def _paths(count: int) -> list[str]:
    return ["prompt"] if count == 1 else [f"prompt[{index}]" for index in range(count)]
