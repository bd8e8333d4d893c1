"""Reading text that is still coming: what the forms of calls are read with.

A reader is a generator. It gives out events, and None where it needs more text than there is; whoever runs it then adds
some to its `Incoming`, or says that the text has ended.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.inputs import parse_json


@dataclass(frozen=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class Begin:
    """A call begins: of which tool."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON of the call's arguments."""

    text: str


@dataclass(frozen=True)
class End:
    """The call is complete: its pieces together are a JSON object."""


@dataclass(frozen=True)
class Broken:
    """What began as a call is none: all that was read of it, as it stood in the text."""

    text: str


Event = Text | Begin | Arguments | End | Broken
T = TypeVar("T")
Reading = Generator[Event | None, None, T]


class Incoming:
    """Text as it comes. `rest` is not read yet, `raw` is what was read of the call that is being read."""

    def __init__(self) -> None:
        self.rest, self.raw, self.ended = "", "", False

    def take(self, count: int) -> str:
        """The next characters, which are read now."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        self.raw += taken
        return taken


def outside(text: Incoming, marks: tuple[str, ...]) -> Reading[str | None]:
    """Gives out text before the first of the marks, which stays unread; None where there comes none of them.

    White space before a mark stays unread with it: it separates calls, and is no text of the answer.
    """
    while True:
        found, mark = min(((at, mark) for mark in marks if (at := text.rest.find(mark)) >= 0), default=(-1, None))
        if mark is None and text.ended:
            if text.rest:
                yield Text(text.take(len(text.rest)))
            return None
        keep = found if mark is not None else len(text.rest) - _begun(text.rest, marks)
        if keep := len(text.rest[:keep].rstrip()):
            yield Text(text.take(keep))
        text.raw = ""
        if mark is not None:
            return mark
        yield None


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of a text that begins a mark."""
    longest = max(map(len, marks)) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)


def comes(text: Incoming, *literals: str) -> Reading[str | None]:
    """Reads white space and whichever of the literals comes then; nothing, if none of them does."""
    while True:
        body = text.rest.lstrip()
        for literal in literals:
            if body.startswith(literal):
                text.take(len(text.rest) - len(body) + len(literal))
                return literal
        if text.ended or not any(literal.startswith(body) for literal in literals):
            return None
        yield None


def up_to(text: Incoming, *ends: str) -> Reading[tuple[str, str] | None]:
    """Reads text up to the first of the ends, and that; both. Nothing, if none comes."""
    searched = 0
    while True:
        start = max(0, searched - max(map(len, ends)))
        found = min(((at, end) for end in ends if (at := text.rest.find(end, start)) >= 0), default=None)
        if found is not None:
            before = text.take(found[0])
            text.take(len(found[1]))
            return before, found[1]
        if text.ended:
            return None
        searched = len(text.rest)
        yield None


_SIGN = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def json_object(text: Incoming) -> Reading[bool]:
    """Reads a JSON object, and gives it out as arguments as it comes. Whether there was one: what has been given out is
    only then complete and valid."""
    if (yield from peek(text)) != "{":
        return False
    parts: list[str] = []
    depth, quoted = 0, False
    while True:
        end = None
        for sign in _SIGN.finditer(text.rest):
            if sign.group() == '"':
                quoted = not quoted
            elif len(sign.group()) == 1 and not quoted:
                depth += 1 if sign.group() in "{[" else -1
                if depth == 0:
                    end = sign.end()
                    break
        whole = len(text.rest) if not _escapes(text.rest) else len(text.rest) - 1
        if part := text.take(whole if end is None else end):
            parts.append(part)
            yield Arguments(part)
        if end is not None:
            return is_object("".join(parts))
        if text.ended:
            return False
        yield None


def _escapes(text: str) -> bool:
    """Whether the last character is a backslash whose character is still to come."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def peek(text: Incoming) -> Reading[str]:
    """Reads white space; the character after it, unread, or nothing at the end."""
    while not (body := text.rest.lstrip()) and not text.ended:
        yield None
    text.take(len(text.rest) - len(body))
    return body[:1]


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(parse_json(text, "arguments"), dict)
    except ConfigError:
        return False
