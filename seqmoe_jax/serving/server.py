"""The HTTP side: routes, event streams, and what clients that leave and a server that ends mean for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Connection
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import SeqMoEError, ServerError
from seqmoe_jax.generation import Piece
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving import answers
from seqmoe_jax.serving.body import Intake, parse_json
from seqmoe_jax.serving.door import Door
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.query import Query, parse
from seqmoe_jax.serving.refusal import Gone, Refusal
from seqmoe_jax.serving.replies import Reply
from seqmoe_jax.serving.scheduler import RequestScheduler
from seqmoe_jax.serving.work import Work, departure, unless


class Service:
    """The handlers of one engine under one model name. `sampling` is what requests override, `hosts` the names that the
    server answers to, None: all."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        sampling: SamplingConfig,
        hosts: frozenset[str] | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
    ):
        self.engine, self.name, self.sampling, self.hosts, self.limits = engine, name, sampling, hosts, limits
        self.scheduler = RequestScheduler(engine, most_waiting=limits.waiting)
        self._readers = ThreadPoolExecutor(limits.readers, "seqmoe-reader")
        self._intake = Intake(limits, limits.body_for(engine.token_engine.context))
        self._closing = asyncio.Event()
        self._created = int(time.time())

    def app(self) -> Door:
        routes = [
            Route("/health", self.health),
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
        return Door(app, hosts=self.hosts, limits=self.limits, closing=self._closing)

    def close(self) -> None:
        """Ends everything that is under way, on the event loop."""
        self._closing.set()
        self.scheduler.close()

    async def health(self, connection: Connection) -> Response:
        return answers.respond({"status": "ok", **self.scheduler.load()})

    async def models(self, connection: Connection) -> Response:
        return answers.respond({"object": "list", "data": [self._model()]})

    async def model(self, connection: Connection) -> Response:
        if (name := connection.path_params["name"]) != self.name:
            raise Refusal(
                f"the model {name[:100]!r} does not exist; this server has {self.name!r}",
                param="model", status=404, code="model_not_found",
            )  # fmt: skip
        return answers.respond(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "seqmoe",
                "max_model_len": self.engine.token_engine.context}  # fmt: skip

    async def complete(self, connection: Connection, *, chat: bool) -> Response:
        closed = ServerError("the server is shutting down")
        if self._closing.is_set():
            raise closed
        query = await unless(self._closing.wait(), closed, self._query(connection, chat))
        work = Work(connection, query, self.scheduler)
        try:
            if not query.stream:
                return answers.respond(await _whole(query, work))
            first = await work.next()  # a request that fails at once gets a status, not a stream
        except BaseException:
            work.end()
            raise
        return StreamingResponse(_stream(query, first, work), media_type="text/event-stream")

    async def _query(self, connection: Connection, chat: bool) -> Query:
        """What a request asks for. Few are read at once; one whose client leaves while it waits is not read."""
        async with self._intake.body(connection) as data:
            reading = asyncio.get_running_loop().run_in_executor(self._readers, self._read, data, chat)
            return await unless(departure(connection), Gone(), reading)

    def _read(self, data: bytes, chat: bool) -> Query:
        body = parse_json(data, self.limits)
        return parse(body, self.engine, self.sampling, model=self.name, chat=chat)


_FAILED = "the server failed; its log says how"


async def _whole(query: Query, work: Work) -> dict[str, Any]:
    replies, count = _replies(query), 0
    async for index, piece in work:
        replies[index].add(piece)
        count += 1
    choices = [answers.choice(query, index, reply) for index, reply in enumerate(replies)]
    return answers.answer(query, choices, _usage(query, count))


def _replies(query: Query) -> list[Reply]:
    return [Reply(query.calling) for _ in query.requests]


async def _stream(query: Query, first: tuple[int, Piece], work: Work) -> AsyncIterator[str]:
    replies, count = _replies(query), 0
    try:
        if query.chat:
            yield answers.event(answers.beginning(query))
        async for index, piece in _chain(first, work):
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
