"""The forms in which models write calls of tools. Chat templates show earlier calls in their models' form, so their
sources say which one that is.

References: the chat templates of Hermes 2 Pro, Qwen2.5, Qwen3, Qwen3-Coder, GLM-4.5, DeepSeek-V3, R1 and V3.1; OpenAI,
"Harmony response format". Each function reads one call, from its mark on, and returns whether it is one: of a tool that
there is, with an object of arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.inputs import parse_json
from seqmoe_jax.text.tools.declared import Tools
from seqmoe_jax.text.tools.reading import Arguments, Begin, Incoming, Reading, comes, json_object, peek, up_to

HARMONY_CALL = "<|start|>assistant to=functions."  # how `text.harmony` writes a call into the text of a reply
HARMONY_END = "<|call|>"


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form: what a call begins with (any of the `marks`), what may stand after it, and what reads it."""

    marks: tuple[str, ...]
    closing: tuple[str, ...]
    call: Callable[[Incoming, Tools], Reading[bool]]


def form_of(source: str) -> Form | None:
    """The form that a chat template shows; None where it shows none of those that are known."""
    return next((form for shown, form in _SHOWN if all(part in source for part in shown)), None)


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def _hermes(text: Incoming, tools: Tools) -> Reading[bool]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
    yield from comes(text, "<tool_call>")
    if (yield from peek(text)) != "{":
        return False
    while (head := _HEAD.match(text.rest)) is None:
        end = text.rest.find("</tool_call>")
        if end >= 0 or text.ended:
            return (yield from _in_another_order(text, tools, len(text.rest) if end < 0 else end))
        yield None
    if (name := _value(head[1])) not in tools:
        return False
    text.take(head.end())
    yield Begin(name)
    return (yield from json_object(text)) and (yield from comes(text, "}")) is not None


def _in_another_order(text: Incoming, tools: Tools, length: int) -> Reading[bool]:
    """A call whose object is all there, and does not begin with the name."""
    call = _value(text.rest[:length])
    named = isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"] in tools
    arguments = call.get("arguments", call.get("parameters", {})) if named else None
    if not isinstance(arguments, dict):
        return False
    text.take(length)
    yield Begin(call["name"])
    yield Arguments(json.dumps(arguments, ensure_ascii=False))
    return True


def _xml(text: Incoming, tools: Tools) -> Reading[bool]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, the outermost maybe left
    out. Values are text as it stands, or JSON where the tool's schema wants no text."""
    yield from comes(text, "<tool_call>")
    if (yield from comes(text, "<function=")) is None or (head := (yield from up_to(text, ">"))) is None:
        return False
    if (name := head[0].strip()) not in tools:
        return False
    yield Begin(name)
    before = "{"
    while tag := (yield from comes(text, "<parameter=", "</function>")):
        if tag == "</function>":
            yield Arguments("{}" if before == "{" else "}")
            return True
        key, value = (yield from up_to(text, ">")), (yield from up_to(text, "</parameter>"))
        if key is None or value is None:
            return False
        name_of, given = key[0].strip(), value[0].removeprefix("\n").removesuffix("\n")
        yield Arguments(f"{before}{_dump(name_of)}: {_dump(_typed(given, _schema_of(tools[name], name_of)))}")
        before = ", "
    return False


def _glm(text: Incoming, tools: Tools) -> Reading[bool]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, values as in `_xml`."""
    yield from comes(text, "<tool_call>")
    head = yield from up_to(text, "<arg_key>", "</tool_call>")
    if head is None or (name := head[0].strip()) not in tools:
        return False
    yield Begin(name)
    before, tag = "{", head[1]
    while tag == "<arg_key>":
        key = yield from up_to(text, "</arg_key>")
        if key is None or (yield from comes(text, "<arg_value>")) is None:
            return False
        value = yield from up_to(text, "</arg_value>")
        after = yield from comes(text, "<arg_key>", "</tool_call>")
        if value is None or after is None:
            return False
        name_of, tag = key[0].strip(), after
        yield Arguments(f"{before}{_dump(name_of)}: {_dump(_typed(value[0], _schema_of(tools[name], name_of)))}")
        before = ", "
    yield Arguments("{}" if before == "{" else "}")
    return True


_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)


def _deepseek(text: Incoming, tools: Tools) -> Reading[bool]:
    """Begin, NAME, separator, arguments, end (V3.1); or begin, `function`, separator, NAME, a new line and the
    arguments as a block of JSON, end (V3, R1)."""
    yield from comes(text, _CALLS)
    if (yield from comes(text, _CALL)) is None or (head := (yield from up_to(text, _SEPARATOR))) is None:
        return False
    name, fenced = head[0].strip(), (yield from peek(text)) != "{"
    if fenced:
        line = yield from up_to(text, "\n")
        if line is None or (yield from comes(text, "```json")) is None:
            return False
        name = line[0].strip()
    if name not in tools:
        return False
    yield from peek(text)
    yield Begin(name)
    if not (yield from json_object(text)):
        return False
    if fenced and (yield from comes(text, "```")) is None:
        return False
    yield from comes(text, _CALL_END)
    return True


def _harmony(text: Incoming, tools: Tools) -> Reading[bool]:
    """A message to a function, as `text.harmony` writes it."""
    yield from comes(text, HARMONY_CALL)
    head = yield from up_to(text, "<|message|>")
    if head is None or (name := head[0].partition("<|channel|>")[0].strip()) not in tools:
        return False
    yield from peek(text)
    yield Begin(name)
    return (yield from json_object(text))


_SHOWN = (
    (("<\uff5ctool\u2581call\u2581begin\uff5c>",),
     Form(marks=(_CALLS, _CALL), closing=(_CALLS_END,), call=_deepseek)),
    (("<|channel|>", "functions."), Form(marks=(HARMONY_CALL,), closing=(HARMONY_END,), call=_harmony)),
    (("<function=", "<parameter="), Form(marks=("<tool_call>", "<function="), closing=("</tool_call>",), call=_xml)),
    (("<tool_call>", "<arg_key>"), Form(marks=("<tool_call>",), closing=(), call=_glm)),
    (("<tool_call>",), Form(marks=("<tool_call>",), closing=("</tool_call>",), call=_hermes)),
)  # fmt: skip


def _value(text: str) -> Any:
    """A JSON value; None where it is none."""
    try:
        return parse_json(text, "a call")
    except ConfigError:
        return None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schema_of(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _typed(text: str, schema: Any) -> Any:
    """A value that stands as text: JSON where the schema does not want text and it is some, else the text."""
    types = _types(schema)
    if "string" in types and not (text == "null" and "null" in types):
        return text
    if not types:
        return text
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        return parse_json(spelled, "a value")
    except ConfigError:
        return text


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema admits, as far as it says so at its top."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {item for item in (named if isinstance(named, list) else [named]) if isinstance(item, str)}
    for inner in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        types |= _types(inner)
    if not types:
        types = {"string" if isinstance(item, str) else "number" for item in _list(schema.get("enum"))}
    return types


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
