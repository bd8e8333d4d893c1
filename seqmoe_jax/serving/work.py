"""What a connection waits for, and that nothing goes on when its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from starlette.requests import Request as Connection

from seqmoe_jax.generation import Piece
from seqmoe_jax.serving.query import Query
from seqmoe_jax.serving.refusal import Gone
from seqmoe_jax.serving.scheduler import Job, RequestScheduler

T = TypeVar("T")


async def departure(connection: Connection) -> None:
    """Waits until the client has left. Its body must have been read."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass


async def unless(event: Awaitable[object], fault: Exception, work: Awaitable[T]) -> T:
    """The result of `work`. Raises `fault` if `event` comes first; `work` is cancelled then."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise fault
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


class Work:
    """The jobs of a query while its client waits for them: iterates over (which prompt, piece) as they come.

    Raises what a generation raises, and `Gone` when the client leaves. Raises `ServerError` where there is no room.
    """

    def __init__(self, connection: Connection, query: Query, scheduler: RequestScheduler):
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Queue[tuple[int, Piece | Exception]]()
        self._jobs = [
            Job(request=request, deliver=partial(self._deliver, index)) for index, request in enumerate(query.requests)
        ]
        self._unfinished = len(self._jobs)
        scheduler.submit(self._jobs)
        self._watch = asyncio.create_task(self._watching(connection))

    def end(self) -> None:
        """Nobody waits any more."""
        self._watch.cancel()
        for job in self._jobs:
            job.cancelled = True

    async def next(self) -> tuple[int, Piece]:
        index, item = await self._arrived.get()
        if isinstance(item, Exception):
            raise item
        if item.fault is not None:
            raise item.fault
        self._unfinished -= item.finish_reason is not None
        return index, item

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        while self._unfinished:
            yield await self.next()

    async def _watching(self, connection: Connection) -> None:
        await departure(connection)
        self._arrived.put_nowait((0, Gone()))
        for job in self._jobs:  # whether or not anyone still looks at what arrives
            job.cancelled = True

    def _deliver(self, index: int, item: Piece | Exception) -> None:  # on the scheduler's thread
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, item))
