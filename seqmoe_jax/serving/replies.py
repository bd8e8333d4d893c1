"""From pieces of generated text to what an answer has: text, thoughts, calls of tools, and why it ended."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from seqmoe_jax.generation import Piece
from seqmoe_jax.text.tools import Arguments, Begin, Broken, CallReader, End, Event, Form, Text, Tools


@dataclass(frozen=True, kw_only=True)
class Calling:
    """That a reply may call tools, and how. `thinking`: it begins inside the model's thoughts. Without `parallel` it
    has one call at most."""

    form: Form
    tools: Tools
    thinking: bool = False
    parallel: bool = True


@dataclass(kw_only=True)
class Part:
    """What a piece adds to an answer. `calls` are as the deltas of a stream have them."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.finish_reason)


class Reply:
    """The answer to one prompt: part by part, and afterwards whole.

    `calls` are those that are complete. A stream may have begun one that then turned out to be none: its text comes as
    text, there and here.
    """

    def __init__(self, calling: Calling | None = None):
        self._calling = calling
        self._reader = None if calling is None else CallReader(calling.form, calling.tools, thinking=calling.thinking)
        self._open: dict[str, Any] | None = None
        self._begun = 0  # calls that a stream has seen
        self.text, self.reasoning, self.finish_reason = "", "", ""
        self.calls: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> Part:
        """What a piece adds."""
        part = Part(reasoning=piece.reasoning)
        if self._reader is None:
            part.text = piece.text
        else:
            events = self._reader.push(piece.text)
            for event in events + (self._reader.close() if piece.finish_reason is not None else []):
                self._take(event, part)
        if piece.finish_reason is not None:
            called = piece.finish_reason == "stop" and bool(self.calls)
            self.finish_reason = part.finish_reason = "tool_calls" if called else piece.finish_reason
        self.text += part.text
        self.reasoning += part.reasoning
        return part

    def _take(self, event: Event, part: Part) -> None:
        if isinstance(event, Text):
            part.text += event.text
        elif isinstance(event, Broken):
            part.text += event.text
            self._open = None
        elif isinstance(event, Begin):
            assert self._calling is not None
            if self._calling.parallel or not self.calls:
                function = {"name": event.name, "arguments": ""}
                self._open = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                part.calls.append({"index": self._begun, **self._open, "function": dict(function)})
                self._begun += 1
        elif self._open is not None:
            if isinstance(event, Arguments):
                self._open["function"]["arguments"] += event.text
                part.calls.append({"index": self._begun - 1, "function": {"arguments": event.text}})
            elif isinstance(event, End):
                self.calls.append(self._open)
                self._open = None
