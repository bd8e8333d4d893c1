"""The HTTP side: routes, event streams, and what clients that leave and a server that ends mean for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Connection
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import SeqMoEError, ServerError
from seqmoe_jax.generation import Piece
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving import answers
from seqmoe_jax.serving.access import Access
from seqmoe_jax.serving.body import Intake, parse_json
from seqmoe_jax.serving.door import Door
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.metrics import Meter, Metrics
from seqmoe_jax.serving.query import Query, check_model, parse
from seqmoe_jax.serving.refusal import Gone, Refusal
from seqmoe_jax.serving.replies import Reply
from seqmoe_jax.serving.scheduler import RequestScheduler
from seqmoe_jax.serving.tokenizing import detokenize, tokenize
from seqmoe_jax.serving.work import Work, departure, unless

T = TypeVar("T")


class Service:
    """The handlers of one engine under the names of its model. `sampling` is what requests override."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        sampling: SamplingConfig,
        aliases: Sequence[str] = (),
        access: Access = Access(),  # noqa: B008  frozen
        limits: Limits = Limits(),  # noqa: B008  frozen
    ):
        self.engine, self.name, self.sampling, self.access, self.limits = engine, name, sampling, access, limits
        self.aliases = tuple(dict.fromkeys(alias for alias in aliases if alias != name))
        self.scheduler = RequestScheduler(engine, most_waiting=limits.waiting)
        self.metrics = Metrics(engine, self.scheduler)
        self.draining = False  # set by anyone: what has begun is answered, nothing else is
        self._readers = ThreadPoolExecutor(limits.readers, "seqmoe-reader")
        self._intake = Intake(limits, limits.body_for(engine.token_engine.context))
        self._closing = asyncio.Event()
        self._created = int(time.time())

    def app(self) -> ASGIApp:
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.scrape),
            Route("/tokenize", partial(self.read, use=tokenize), methods=["POST"]),
            Route("/detokenize", partial(self.read, use=detokenize), methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", partial(self.complete, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.complete, chat=True), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            Refusal: _refused, SeqMoEError: _ended, ServerError: _unavailable, Gone: _gone,
            HTTPException: _no_route, Exception: _failed,
        }  # fmt: skip
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return self.access.with_origins(Door(app, access=self.access, limits=self.limits, closing=self._closing))

    def close(self) -> None:
        """Ends everything that is under way, on the event loop."""
        self._closing.set()
        self.scheduler.close()
        self.metrics.close()

    async def health(self, connection: Connection) -> Response:
        status = "draining" if self.draining else "ok"
        return answers.respond({"status": status, **self.scheduler.load()}, 503 if self.draining else 200)

    async def scrape(self, connection: Connection) -> Response:
        return Response(self.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, connection: Connection) -> Response:
        return answers.respond({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, connection: Connection) -> Response:
        check_model(name := connection.path_params["name"], self._names)
        return answers.respond(self._model(name))

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "seqmoe",
                "max_model_len": self.engine.token_engine.context}  # fmt: skip

    async def read(self, connection: Connection, *, use: Callable[[Any, Engine], dict[str, Any]]) -> Response:
        """What `use` makes of a body, without the model."""

        def reading(data: bytes) -> dict[str, Any]:
            body = parse_json(data, self.limits)
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                check_model(body["model"], self._names)
            return use(body, self.engine)

        return answers.respond(await self._read(connection, reading))

    async def complete(self, connection: Connection, *, chat: bool) -> Response:
        arrival = time.monotonic()
        self._check_open()
        query = await self._read(connection, partial(self._query, chat=chat))
        self._check_open()
        meter = self.metrics.meter(arrival, sum(len(request.tokens) for request in query.requests))
        work = Work(connection, query, self.scheduler)
        try:
            if not query.stream:
                return answers.respond(await _whole(query, work, meter))
            first = await work.next()  # a request that fails at once gets a status, not a stream
        except BaseException:
            work.end()
            raise
        return StreamingResponse(_stream(query, first, work, meter), media_type="text/event-stream")

    def _check_open(self) -> None:
        if self.draining or self._closing.is_set():
            raise ServerError("the server is shutting down")

    async def _read(self, connection: Connection, use: Callable[[bytes], T]) -> T:
        """What `use` makes of a body. Few are read at once; one whose client leaves while it waits is not read."""
        closed = ServerError("the server is shutting down")
        return await unless(self._closing.wait(), closed, self._use(connection, use))

    async def _use(self, connection: Connection, use: Callable[[bytes], T]) -> T:
        async with self._intake.body(connection) as data:
            reading = asyncio.get_running_loop().run_in_executor(self._readers, use, data)
            return await unless(departure(connection), Gone(), reading)

    def _query(self, data: bytes, *, chat: bool) -> Query:
        body = parse_json(data, self.limits)
        return parse(body, self.engine, self.sampling, model=self.name, chat=chat, aliases=self.aliases)


_FAILED = "the server failed; its log says how"


async def _whole(query: Query, work: Work, meter: Meter) -> dict[str, Any]:
    replies, count = _replies(query), 0
    async for index, piece in work:
        meter.piece(index, piece)
        replies[index].add(piece)
        count += 1
    choices = [answers.choice(query, index, reply) for index, reply in enumerate(replies)]
    return answers.answer(query, choices, _usage(query, count))


def _replies(query: Query) -> list[Reply]:
    return [Reply(query.calling) for _ in query.requests]


async def _stream(query: Query, first: tuple[int, Piece], work: Work, meter: Meter) -> AsyncIterator[str]:
    replies, count = _replies(query), 0
    try:
        if query.chat:
            yield answers.event(answers.beginning(query))
        async for index, piece in _chain(first, work):
            meter.piece(index, piece)
            count += 1
            if part := replies[index].add(piece):
                yield answers.event(answers.chunk(query, [answers.delta(query, index, part)]))
        if query.usage:
            yield answers.event(answers.chunk(query, [], _usage(query, count)))
        yield "data: [DONE]\n\n"
    except Gone:
        return
    except Exception as fault:  # the status has gone out: an error can only be an event
        yield answers.event(answers.error(str(fault) if isinstance(fault, SeqMoEError) else _FAILED, "server_error"))
    finally:
        work.end()


async def _chain(first: tuple[int, Piece], rest: Work) -> AsyncIterator[tuple[int, Piece]]:
    yield first
    async for item in rest:
        yield item


def _usage(query: Query, count: int) -> dict[str, int]:
    return answers.usage(sum(len(request.tokens) for request in query.requests), count)


async def _refused(connection: Connection, fault: Exception) -> Response:
    assert isinstance(fault, Refusal)
    return answers.refused(str(fault), status=fault.status, code=fault.code, param=fault.param)


async def _ended(connection: Connection, fault: Exception) -> Response:
    return answers.refused(str(fault), status=500)


async def _unavailable(connection: Connection, fault: Exception) -> Response:
    return answers.refused(str(fault), status=503, code="overloaded")


async def _gone(connection: Connection, fault: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _no_route(connection: Connection, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    path = connection.url.path
    return answers.refused(f"{connection.method} {path[:200]}: {fault.detail}", status=fault.status_code,
                           headers=fault.headers)  # fmt: skip


async def _failed(connection: Connection, fault: Exception) -> Response:
    return answers.refused(_FAILED, status=500)
