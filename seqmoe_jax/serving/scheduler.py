"""One engine for many callers: a queue, and a thread that decodes what waits in it, a batch at a time.

First come, first served. A batch is the first request and those behind it that can be decoded with it, up to the
engine's `max_batch`; nothing joins a batch that has begun.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import ServerError
from seqmoe_jax.generation import Piece, Request

log = logging.getLogger("seqmoe_jax")


@dataclass(eq=False, kw_only=True)
class Job:
    """A request and where its pieces go, on the scheduler's thread: one per token, or an error in their place."""

    request: Request
    deliver: Callable[[Piece | Exception], None]
    cancelled: bool = False  # set by anyone, at any time: nobody waits for it any more


class RequestScheduler:
    """Runs jobs on an engine until it is closed."""

    def __init__(self, engine: Engine, *, most_waiting: int = 64):
        self._engine, self._most = engine, most_waiting
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="seqmoe-scheduler", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs, all or none. Raises `PromptError` for one that cannot run, `ServerError` if there is no room."""
        for job in jobs:
            self._engine.token_engine.check([job.request.tokens], [job.request.max_new_tokens])
        with self._changed:
            if self._closed:
                raise ServerError("the server is shutting down")
            if len(self._waiting) + len(jobs) > self._most:
                raise ServerError(
                    f"{len(self._waiting)} requests are waiting, {self._most} at most may; try again later"
                )
            self._waiting.extend(jobs)
            self._changed.notify()

    def load(self) -> dict[str, int]:
        """How many jobs run and how many wait."""
        with self._changed:
            return {"running": len(self._running), "waiting": len(self._waiting)}

    def close(self, timeout: float | None = None) -> None:
        """Ends what runs after the step it is in, refuses what waits, and waits for the thread (seconds)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _work(self) -> None:
        while batch := self._next():
            self._serve(batch)
        for job in self._waiting:
            job.deliver(ServerError("the server is shutting down"))

    def _next(self) -> list[Job]:
        """The next batch, taken off the queue; none when closed."""
        with self._changed:
            self._running = []
            while True:
                self._waiting = deque(job for job in self._waiting if not job.cancelled)
                if self._closed:
                    return []
                if self._waiting:
                    break
                self._changed.wait()
            # Greedy and drawn tokens are chosen by different programs.
            greedy = self._waiting[0].request.sampling.greedy
            alike = [job for job in self._waiting if job.request.sampling.greedy == greedy]
            self._running = alike[: self._engine.token_engine.max_batch]
            self._waiting = deque(job for job in self._waiting if job not in self._running)
            return self._running

    def _serve(self, batch: list[Job]) -> None:
        unfinished = set(range(len(batch)))
        fault: Exception = ServerError("the server is shutting down")
        try:
            run = self._engine.run([job.request for job in batch])
            for piece in run:
                batch[piece.sequence].deliver(piece)
                if piece.finish_reason is not None:
                    unfinished.discard(piece.sequence)
                for index, job in enumerate(batch):
                    if job.cancelled or self._closed:
                        run.drop(index)
        except Exception as error:
            log.exception("a generation failed")
            fault = error
        for index in unfinished:
            batch[index].deliver(fault)
