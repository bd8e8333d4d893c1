"""Conversations as clients send them, checked and brought into the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.fields import shown
from seqmoe_jax.inputs import parse_json

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation whose roles are known, whose contents are plain text, and whose tool calls have arguments.

    Parts of text become one text. Fields that are null are left out: templates ask whether they are there. Only an
    assistant that calls tools may say nothing. Raises `PromptError` with the index and the role of the message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise PromptError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    return [_checked(message, index) for index, message in enumerate(messages)]


def with_parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """The same with the arguments of tool calls as objects, where they are JSON in a string, as OpenAI's clients send
    them: most templates go through their items."""
    return [
        {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]} if "tool_calls" in message
        else message
        for message in messages
    ]  # fmt: skip


def _checked(message: object, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f'{where} must be an object with a "role", got {shown(message)}')
    role = message["role"]
    if role not in ROLES:
        raise PromptError(f"{where} has the role {shown(role)}; expected one of {', '.join(ROLES)}")
    given = {name: value for name, value in message.items() if value is not None}
    if given.get("function_call"):
        raise PromptError(f"{where}.function_call is not supported; give tool_calls instead")
    calls = _checked_calls(given.pop("tool_calls", None), role, where)
    if "content" in message and message["content"] is None and calls:
        content = None  # some templates ask for just that
    else:
        content = _text_of(given.get("content"), role, where)
    return {**given, "content": content, **({"tool_calls": calls} if calls else {})}


def _text_of(content: object, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
                 for part in content]  # fmt: skip
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)  # type: ignore[arg-type]
    raise PromptError(
        f"{where}.content (role {role}) must be text, or a list of parts of type text, got {shown(content)}; images, "
        "audio and files are not supported"
    )


def _checked_calls(calls: object, role: str, where: str) -> list[dict[str, Any]]:
    """Tool calls, each `{"function": {"name": ..., "arguments": ...}}` with arguments as an object or as its JSON."""
    if not calls:
        return []
    if role != "assistant":
        raise PromptError(f"{where}.tool_calls: only an assistant calls tools, this message has the role {role}")
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise PromptError(f"{where}.tool_calls (role {role}) must be a list, got {shown(calls)}")
    checked = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(
                f'{where}.tool_calls[{at}] (role {role}) must be an object with a "function" that has a "name", got '
                f"{shown(call)}"
            )
        arguments = function.get("arguments")
        if _arguments(arguments) is None:
            raise PromptError(
                f"{where}.tool_calls[{at}].function.arguments (role {role}) must be a JSON object, got "
                f"{shown(arguments)}"
            )
        checked.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return checked


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def _arguments(arguments: object) -> dict[str, Any] | None:
    """Arguments as an object; None where they are none."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, "the arguments", strict=False) if arguments.strip() else {}
        except ConfigError:
            return None
    return {} if arguments is None else dict(arguments) if isinstance(arguments, Mapping) else None
