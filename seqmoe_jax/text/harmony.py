"""Harmony, the format of GPT-OSS: messages in channels, of which `final` is the answer.

Reference: OpenAI, "Harmony response format" (openai/harmony, docs/format.md). A message is
`<|start|>{role}<|channel|>{channel}<|message|>{content}<|end|>`; the last one of a reply ends with `<|return|>`, a call
of a tool with `<|call|>`. Tools need the model's own template: this module renders conversations without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from typing import Any

from seqmoe_jax.errors import PromptError
from seqmoe_jax.text.stream import TextStream
from seqmoe_jax.text.tokenizers import Tokenizer

EOS_TOKEN_IDS = (200002, 200012)  # <|return|>, <|call|>: they end a reply
EFFORTS = ("low", "medium", "high")


def render(
    messages: Sequence[Mapping[str, Any]], *, reasoning_effort: str = "medium", date: str | Date | None = None
) -> str:
    """The prompt of a conversation: system, developer, user and assistant messages, ending where the reply begins.

    What others call the system prompt is Harmony's developer message. Of earlier replies only the answer is kept.
    `date` (ISO) stands in the system message; default: today. Raises `PromptError`.
    """
    if reasoning_effort not in EFFORTS:
        raise PromptError(f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {reasoning_effort!r}")
    system = (
        "You are ChatGPT, a large language model trained by OpenAI.\n"
        f"Knowledge cutoff: 2024-06\nCurrent date: {date or Date.today().isoformat()}\n\n"
        f"Reasoning: {reasoning_effort}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    parts = [_message("system", system)]
    for message in messages:
        role, content = message["role"], message["content"]
        if role in ("system", "developer"):
            parts.append(_message("developer", f"# Instructions\n\n{content}"))
        elif role == "user":
            parts.append(_message("user", content))
        elif role == "assistant" and not message.get("tool_calls"):
            parts.append(_message("assistant<|channel|>final", content))
        else:
            raise PromptError(
                f"a message of role {role!r} with tools cannot be rendered without the model's chat_template.jinja"
            )
    return "".join(parts) + "<|start|>assistant"


def _message(header: str, content: str) -> str:
    return f"<|start|>{header}<|message|>{content}<|end|>"


@dataclass(kw_only=True)
class Reply:
    """Tokens of a reply -> its text: what the channel `final` says. The other channels' text is `reasoning`.

    Same face as `TextStream`; stop strings are looked for in the final channel alone.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    _header: list[int] | None = field(default_factory=list)  # of the message being opened; None inside its content
    _channel: str = "final"

    def __post_init__(self) -> None:
        names = ("start", "channel", "constrain", "message", "end", "return", "call")
        self._marks = {name: self._mark(f"<|{name}|>") for name in names}
        self._final = TextStream(tokenizer=self.tokenizer, stop=self.stop)
        self._other = TextStream(tokenizer=self.tokenizer)

    def _mark(self, name: str) -> int:
        ids = self.tokenizer.encode(name, add_special_tokens=False)
        if len(ids) != 1:
            raise PromptError(f"this tokenizer has no token {name}: it is not GPT-OSS's")
        return ids[0]

    @property
    def text(self) -> str:
        return self._final.text

    @property
    def reasoning(self) -> str:
        return self._other.text

    @property
    def finished(self) -> bool:
        return self._final.finished

    def push(self, token: int) -> str:
        """The text of the final channel that this token settles."""
        marks = self._marks
        if token in (marks["start"], marks["end"], marks["return"], marks["call"]):
            self._header = []
        elif token == marks["message"]:
            self._channel = self._opened()
            self._header = None
        elif self._header is not None:
            self._header.append(token)
        elif self._channel == "final":
            return self._final.push(token)
        else:
            self._other.push(token)
        return ""

    def close(self) -> str:
        """What is still held back. A reply that never opened a message is text as it stands: nothing is lost."""
        self._other.close()
        out = ""
        if self._header and not self.text and not self.reasoning:
            out = "".join(self._final.push(token) for token in self._header)
        return out + self._final.close()

    def _opened(self) -> str:
        """The channel that a header names: the word after `<|channel|>`; a header without one opens the answer."""
        header, mark = self._header or [], self._marks["channel"]
        if mark not in header:
            return "final"
        after = header[header.index(mark) + 1 :]
        end = next((at for at, token in enumerate(after) if token == self._marks["constrain"]), len(after))
        words = self.tokenizer.decode(after[:end]).split()
        return words[0] if words else "final"
