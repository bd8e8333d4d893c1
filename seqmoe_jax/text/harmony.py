"""Harmony, the format of GPT-OSS: messages in channels, of which `final` is the answer.

Reference: OpenAI, "Harmony response format" (openai/harmony, docs/format.md). A message is
`<|start|>{role}<|channel|>{channel}<|message|>{content}<|end|>`; the last one of a reply ends with `<|return|>`, a call
of a tool with `<|call|>`. Tools need the model's own template: this module renders conversations without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from typing import Any

from seqmoe_jax.errors import PromptError
from seqmoe_jax.text.stream import TextStream
from seqmoe_jax.text.tokenizers import Tokenizer
from seqmoe_jax.text.tools.forms import HARMONY_CALL, HARMONY_END

EOS_TOKEN_IDS = (200002, 200012)  # <|return|>, <|call|>: they end a reply
EFFORTS = ("low", "medium", "high")
FINAL = "final"
_RECIPIENT = "to="  # what a header may begin with before its channel, where a tool is called
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
_LONGEST_HEADER = 64


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

    Same face as `TextStream`; stop strings are looked for in the final channel alone. `context` are the tokens before
    the reply: a template may have opened its message already, or only its header. With `calls`, messages to functions
    are text as well, each with its header, as the form of `text.tools` reads it.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    context: Sequence[int] = ()
    calls: bool = False
    text: str = ""
    _header: list[int] | None = field(default_factory=list)  # of the message being opened; None inside its content
    _given: int = 0  # how many of the header's tokens are the prompt's
    _named: bool = False  # the header began with `<|start|>`, so a role comes first
    _channel: str = FINAL
    _call: TextStream | None = None  # of the message to a function that is open

    def __post_init__(self) -> None:
        names = ("start", "channel", "constrain", "message", "end", "return", "call")
        self._marks = {name: self._mark(f"<|{name}|>") for name in names}
        opened = [at for at, token in enumerate(self.context) if token == self._marks["start"]]
        self._final = self._other = TextStream(tokenizer=self.tokenizer)  # what the prompt says is not the reply's
        for token in self.context[opened[-1] :] if opened else ():
            self.push(token)
        self._given = len(self._header or ())
        self.text = ""
        self._final = TextStream(tokenizer=self.tokenizer, stop=self.stop, context=self.context)
        self._other = TextStream(tokenizer=self.tokenizer, context=self.context)

    def _mark(self, name: str) -> int:
        ids = self.tokenizer.encode(name, add_special_tokens=False)
        if len(ids) != 1:
            raise PromptError(f"this tokenizer has no token {name}: it is not GPT-OSS's")
        return ids[0]

    @property
    def reasoning(self) -> str:
        return self._other.text

    @property
    def finished(self) -> bool:
        return self._final.finished

    def push(self, token: int) -> str:
        """The text of the final channel that this token settles."""
        settled = self._settled(token)
        self.text += settled
        return settled

    def _settled(self, token: int) -> str:
        marks = self._marks
        if token in (marks["start"], marks["end"], marks["return"], marks["call"]):
            self._header, self._given, self._named = [], 0, token == marks["start"]
            return self._end_of_call(HARMONY_END)
        if self._header is None:
            return self._content(token)
        if token == marks["message"]:
            self._channel = self._opened()
            function, self._header = self._function() if self.calls else None, None
            if function is not None:
                self._call = TextStream(tokenizer=self.tokenizer, context=self.context)
                return f"{HARMONY_CALL}{function}<|channel|>{self._channel}<|message|>"
        else:
            self._header.append(token)
            if self._is_text():
                return self._as_text()
        return ""

    def close(self) -> str:
        """What is still held back. A reply that never opened a message is text as it stands: nothing is lost."""
        self._other.close()
        unopened = self._as_text() if self._may_be_text() and not self._said().startswith(_RECIPIENT) else ""
        rest = self._end_of_call("") + unopened + self._final.close()
        self.text += rest
        return rest

    def _end_of_call(self, mark: str) -> str:
        """What ends the text of an open call; `mark` if its message has ended."""
        call, self._call = self._call, None
        return "" if call is None else call.close() + mark

    def _content(self, token: int) -> str:
        if self._call is not None:
            return self._call.push(token)
        if self._channel == FINAL:
            return self._final.push(token)
        self._other.push(token)
        return ""

    def _is_text(self) -> bool:
        """What stands where a header should, and is none: a model that does not keep to its format."""
        if len(self._header or ()) - self._given > _LONGEST_HEADER:
            return True
        return self._may_be_text() and not _RECIPIENT.startswith(self._said()[: len(_RECIPIENT)])

    def _may_be_text(self) -> bool:
        """No role is to come, and no channel was named."""
        role_comes = self._named and not self._given
        return self._header is not None and not role_comes and self._marks["channel"] not in self._header

    def _said(self) -> str:
        return self.tokenizer.decode((self._header or [])[self._given :]).lstrip()

    def _as_text(self) -> str:
        """What the header holds beyond the prompt's part, as text of the answer."""
        header, self._header = self._header, None
        self._channel = FINAL
        return "".join(self._final.push(token) for token in (header or [])[self._given :])

    def _function(self) -> str | None:
        """The function that a header calls, by its name."""
        header, mark = self._header or [], self._marks["channel"]
        at = header.index(mark) if mark in header else len(header)
        for part in (header[:at], header[at:]):  # decoded apart: marks leave no trace between words
            if found := _FUNCTION.search(self.tokenizer.decode(part)):
                return found[1]
        return None

    def _opened(self) -> str:
        """The channel that a header names: the word after `<|channel|>`; a header without one opens the answer."""
        header, mark = self._header or [], self._marks["channel"]
        if mark not in header:
            return FINAL
        after = header[header.index(mark) + 1 :]
        end = next((at for at, token in enumerate(after) if token == self._marks["constrain"]), len(after))
        words = self.tokenizer.decode(after[:end]).split()
        return words[0] if words else FINAL
