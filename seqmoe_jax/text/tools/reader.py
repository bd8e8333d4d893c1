"""Calls in the text of a reply, as it comes."""

from __future__ import annotations

from seqmoe_jax.text.tools.declared import Tools
from seqmoe_jax.text.tools.forms import Form
from seqmoe_jax.text.tools.reading import Broken, End, Event, Incoming, Reading, Text, comes, outside

_THINK, _THINK_END = "<think>", "</think>"  # what stands between is said to nobody, and calls nothing


class CallReader:
    """Text in, events out: text that belongs to no call, and calls of the `tools` in a model's `form`.

    Nothing is lost: what turns out to be no call comes as `Broken`, which has all of its text, whether or not a `Begin`
    and arguments have come before. `thinking`: the reply begins inside the model's thoughts.
    """

    def __init__(self, form: Form, tools: Tools, *, thinking: bool = False):
        self._text = Incoming()
        self._reading = _reply(self._text, form, tools, thinking)

    def push(self, text: str) -> list[Event]:
        """The events that more text settles."""
        self._text.rest += text
        return self._events()

    def close(self) -> list[Event]:
        """Those of the end of the text."""
        self._text.ended = True
        return self._events()

    def _events(self) -> list[Event]:
        events: list[Event] = []
        while (event := next(self._reading, None)) is not None:
            events.append(event)
        return events


def _reply(text: Incoming, form: Form, tools: Tools, thinking: bool) -> Reading[None]:
    called = False
    if thinking:
        yield from outside(text, (_THINK_END,))
    while True:
        mark = yield from _between(text, (*form.marks, _THINK), called)
        if mark is None:
            return
        if mark == _THINK:
            yield Text(text.take(text.rest.index(_THINK) + len(_THINK)))
            yield from outside(text, (_THINK_END,))
            continue
        if (yield from form.call(text, tools)):
            called = True
            yield End()
            yield from comes(text, *form.closing)
        else:
            yield Broken(text.raw)


def _between(text: Incoming, marks: tuple[str, ...], called: bool) -> Reading[str | None]:
    """`outside`, without white space that ends a reply after calls."""
    if called:
        while not (body := text.rest.strip()) and not text.ended:
            yield None
        if not body:
            return None
    return (yield from outside(text, marks))
