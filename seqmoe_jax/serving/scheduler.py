"""One engine for many callers: a queue, and a thread that decodes what waits in it, a batch at a time.

First come, first served. A batch is the first job and those behind it that can be decoded with it, up to the engine's
`max_batch`; nothing joins a batch that has begun.
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
    """One prompt and where its pieces go, on the scheduler's thread: one per token, or an error in their place."""

    request: Request
    deliver: Callable[[Piece | Exception], None]
    cancelled: bool = False  # set by anyone, at any time: nobody waits for it any more
    _group: object = None  # jobs that were submitted together have the same


class RequestScheduler:
    """Runs jobs on an engine until it is closed. `most_waiting`: submissions that may wait, each of many jobs."""

    def __init__(self, engine: Engine, *, most_waiting: int = 64):
        self._engine, self._most = engine, most_waiting
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="seqmoe-scheduler", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs, all or none, that the engine can run. Raises `ServerError` where too many wait or the scheduler
        is closed."""
        with self._changed:
            if self._closed:
                raise ServerError("the server is shutting down")
            waiting = len({id(job._group) for job in self._waiting if not job.cancelled})
            if waiting >= self._most:
                raise ServerError(f"{waiting} requests are waiting, {self._most} at most may; try again later")
            group = object()
            for job in jobs:
                job._group = group
            self._waiting.extend(jobs)
            self._changed.notify()

    def load(self) -> dict[str, int]:
        """How many jobs run and how many wait."""
        with self._changed:
            return {"running": len(self._running), "waiting": sum(not job.cancelled for job in self._waiting)}

    def close(self) -> None:
        """Tells whoever waits for a job that there will be no more of it, at once: what runs may be in a compilation of
        minutes. The thread ends after the step it is in, see `join`."""
        with self._changed:
            self._closed = True
            told = [job for job in (*self._running, *self._waiting) if not job.cancelled]
            self._changed.notify()
        for job in told:
            job.cancelled = True
            job.deliver(ServerError("the server is shutting down"))

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread (seconds); whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while batch := self._next():
            self._serve(batch)

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
                self._deliver(batch[piece.sequence], piece)
                if piece.finish_reason is not None:
                    unfinished.discard(piece.sequence)
                for index, job in enumerate(batch):
                    if job.cancelled:
                        run.drop(index)
        except Exception as error:
            log.exception("a generation failed")
            fault = error
        for index in unfinished:
            self._deliver(batch[index], fault)

    @staticmethod
    def _deliver(job: Job, item: Piece | Exception) -> None:
        if not job.cancelled:
            job.deliver(item)
