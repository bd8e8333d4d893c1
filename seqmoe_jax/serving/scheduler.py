"""One engine for many callers: a queue, and a thread that generates what waits in it.

First come, first served: a job joins those that are decoded as soon as one of the engine's lanes is free.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import ServerError
from seqmoe_jax.generation import Piece, Request, Run

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
        self._running: dict[int, Job] = {}  # by their number in the run
        self._run: Run | None = None
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
            told = [job for job in (*self._running.values(), *self._waiting) if not job.cancelled]
            self._changed.notify()
        for job in told:
            job.cancelled = True
            job.deliver(ServerError("the server is shutting down"))

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread (seconds); whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self._wait():
            try:
                run = self._run = self._engine.run(poll=self._poll)
                for piece in run:
                    self._hand_on(piece)
                continue
            except Exception as error:
                log.exception("a generation failed")
                fault = error
            with self._changed:
                left = list(self._running.values())
                if not left:  # nobody has joined: what failed would fail again
                    left, self._waiting = list(self._waiting), deque()
                self._running = {}
            for job in left:
                self._deliver(job, fault)

    def _wait(self) -> bool:
        """Returns when a job waits; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(not job.cancelled for job in self._waiting))
            return not self._closed

    def _poll(self) -> None:
        """Jobs that wait join the run, as many as there is room for; those that nobody waits for leave it."""
        run = self._run
        assert run is not None
        with self._changed:
            for number in [number for number, job in self._running.items() if job.cancelled]:
                run.drop(number)
                self._forget(number)
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
            joining = [self._waiting.popleft() for _ in range(min(run.free, len(self._waiting)))]
        for job in joining:
            try:
                number = run.add(job.request)
            except Exception as error:
                self._deliver(job, error)
                continue
            with self._changed:
                self._running[number] = job

    def _hand_on(self, piece: Piece) -> None:
        with self._changed:
            job = self._running.get(piece.sequence)
            if piece.finish_reason is not None:
                self._forget(piece.sequence)
        if job is not None:
            self._deliver(job, piece)

    def _forget(self, number: int) -> None:
        self._running.pop(number, None)
        if self._run is not None:
            self._run.answers.pop(number, None)

    @staticmethod
    def _deliver(job: Job, item: Piece | Exception) -> None:
        if not job.cancelled:
            job.deliver(item)
