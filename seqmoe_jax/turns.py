"""Whose turn it is: an engine runs one generation at a time, and its end must not meet one that is half done.

A generation is a generator, so whoever reads it may stop in its middle, hand it to another thread, or drop it. Its turn
begins with its first token and ends with the generator, however that ends.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import closing
from contextvars import ContextVar
from types import GeneratorType
from typing import Any, TypeVar

from seqmoe_jax.errors import EngineError

Event = TypeVar("Event")

# Turns that were taken or gone on with in this context. A thread of a pool, which works now for one caller and now for
# another, has another context for each.
_known: ContextVar[frozenset[_Turn]] = ContextVar("seqmoe_turns", default=frozenset())


class _Turn:
    """One generator's turn."""

    generator: weakref.ref[GeneratorType[Any, None, None]]
    thread = 0  # that began or went on with it last
    parked = False

    @property
    def over(self) -> bool:
        # Not a note made at its end: an interrupt may come before that.
        generator = self.generator()
        return generator is None or generator.gi_frame is None

    @property
    def running(self) -> bool:
        """Whether a thread is in it just now, rather than its reader with a token of it."""
        generator = self.generator()
        return generator is not None and generator.gi_running and not self.parked

    @property
    def here(self) -> bool:
        """Whether it cannot go on while the caller waits for it."""
        return self.thread == threading.get_ident() and (self.running or self in _known.get() or _in_event_loop())

    def mark(self) -> None:
        self.thread = threading.get_ident()
        if self not in (known := _known.get()):
            _known.set(frozenset(turn for turn in known if not turn.over) | {self})


class Turns:
    """The turns of one engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: _Turn | None = None
        self._leaving = False
        self.closed = False

    def run(self, events: Callable[[], Generator[Event, None, None]]) -> Generator[Event, None, None]:
        """What `events()` gives, begun when it is this generator's turn.

        Another thread's generation is waited for. Raises `EngineError` at the first token where the one that is open
        waits for the caller itself, and at any token once `close` was called.
        """
        turn = _Turn()
        generator = self._run(turn, events)
        assert isinstance(generator, GeneratorType)
        turn.generator = weakref.ref(generator)
        return generator

    def close(self, *, leaving: bool = False) -> bool:
        """Nothing begins or goes on any more. Returns when no thread is inside a generation: False where the caller is
        inside one itself, which then ends at its next token.

        `leaving`: the process ends, and threads that Python does not wait for stay where they are.
        """
        with self._changed:
            self.closed, self._leaving = True, self._leaving or leaving
            self._changed.notify_all()
            while (turn := self._holder) is not None and turn.running:
                if turn.thread == threading.get_ident():
                    return False
                self._changed.wait(0.02)  # nobody says when a generator has yielded
        return True

    def check_open(self, turn: _Turn | None = None) -> None:
        """Raises `EngineError` after `close`."""
        if not self.closed:
            return
        if self._leaving and threading.current_thread().daemon:
            if turn is not None:
                turn.parked = True
            threading.Event().wait()  # an error would be printed over what the program says at its end
        raise EngineError("this engine has been closed; load the model again")

    def _run(self, turn: _Turn, events: Callable[[], Generator[Event, None, None]]) -> Generator[Event, None, None]:
        try:
            self._take(turn)
            with closing(events()) as inner:
                for event in inner:
                    yield event
                    self.check_open(turn)
                    turn.mark()
        finally:
            with self._changed:
                if self._holder is turn:
                    self._holder = None
                self._changed.notify_all()

    def _take(self, turn: _Turn) -> None:
        if not self._free() and self._holder is not None and self._holder.here:
            gc.collect()  # a stream that was dropped in a cycle of objects, such as a traceback, is open until then
        with self._changed:
            while not (self.closed or self._free()):
                if self._holder is not None and self._holder.here:
                    raise EngineError(
                        "another generation of this engine is open in this thread and would be waited for without end; "
                        "read it to its end or close it (`stream.close()`), or load a second engine"
                    )
                self._changed.wait(1.0)
            if not self.closed:
                turn.mark()
                self._holder = turn
        self.check_open(turn)  # which may stay: not while it holds the condition

    def _free(self) -> bool:
        return self._holder is None or self._holder.over


def _in_event_loop() -> bool:
    """Whether waiting here would stop the event loop that this thread runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
