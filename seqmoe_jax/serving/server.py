"""The HTTP side: routes, event streams, errors in OpenAI's form, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Connection
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import ConfigError, SeqMoEError, ServerError
from seqmoe_jax.generation import Piece
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving import protocol
from seqmoe_jax.serving.protocol import Query
from seqmoe_jax.serving.scheduler import Job, RequestScheduler

MAX_BODY = 16 << 20  # bytes
_LOOK_UP = 1.0  # seconds between looks at whether the client is still there, while no token comes


Pieces = AsyncGenerator[tuple[int, Piece], None]  # which prompt of a query, and what came of it


class Gone(Exception):
    """The client has left."""


class Service:
    """The handlers of one engine under one model name. `sampling` is what requests override."""

    def __init__(self, engine: Engine, *, name: str, sampling: SamplingConfig):
        self.engine, self.name, self.sampling = engine, name, sampling
        self.scheduler = RequestScheduler(engine)
        self._created = int(time.time())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/completions", partial(self.complete, chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self.complete, chat=True), methods=["POST"]),
            ],
            exception_handlers={
                SeqMoEError: _refused,
                HTTPException: _no_route,
                Exception: _failed,
            },
        )

    async def health(self, connection: Connection) -> Response:
        return JSONResponse({"status": "ok", **self.scheduler.load()})

    async def models(self, connection: Connection) -> Response:
        model = {"id": self.name, "object": "model", "created": self._created, "owned_by": "seqmoe",
                 "max_model_len": self.engine.token_engine.context}  # fmt: skip
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(self, connection: Connection, *, chat: bool) -> Response:
        body = await _body(connection)
        wanted = body.get("model") if isinstance(body, dict) else None
        if wanted not in (None, self.name):
            message = f"the model {wanted!r} does not exist; this server has {self.name!r}"
            return JSONResponse(protocol.error(message, code="model_not_found"), 404)
        # Templates and tokenizers take a while over a long text.
        query = await asyncio.to_thread(protocol.parse, body, self.engine, self.sampling, chat=chat)
        pieces = self._pieces(connection, query)
        try:
            if query.stream:
                first = await anext(pieces)  # a request that is refused gets a status, not a stream
                return StreamingResponse(self._stream(query, first, pieces), media_type="text/event-stream")
            return JSONResponse(await self._whole(query, pieces))
        except Gone:
            return Response(status_code=499)  # nobody reads it

    async def _whole(self, query: Query, pieces: Pieces) -> dict[str, Any]:
        texts, thoughts = [""] * len(query.requests), [""] * len(query.requests)
        reasons, count = [""] * len(query.requests), 0
        async for index, piece in pieces:
            texts[index] += piece.text
            thoughts[index] += piece.reasoning
            reasons[index] = piece.finish_reason or ""
            count += 1
        choices = [
            protocol.choice(query, index, *parts)
            for index, parts in enumerate(zip(texts, thoughts, reasons, strict=True))
        ]
        return protocol.answer(query, self.name, choices, self._usage(query, count))

    async def _stream(self, query: Query, first: tuple[int, Piece], pieces: Pieces) -> AsyncIterator[str]:
        count = 0
        try:
            if query.chat:
                role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield _event(protocol.chunk(query, self.name, [role]))
            async for index, piece in _chain(first, pieces):
                count += 1
                if piece.text or piece.reasoning or piece.finish_reason:
                    part = protocol.delta(query, index, piece.text, piece.reasoning, piece.finish_reason)
                    yield _event(protocol.chunk(query, self.name, [part]))
            if query.usage:
                yield _event(protocol.chunk(query, self.name, [], self._usage(query, count)))
            yield "data: [DONE]\n\n"
        except Gone:
            return
        except Exception as fault:  # the status has gone out: an error can only be an event
            yield _event(protocol.error(str(fault), "server_error"))
        finally:
            await pieces.aclose()

    async def _pieces(self, connection: Connection, query: Query) -> Pieces:
        """(which prompt, piece) as they come. Ends the generation when the client leaves or the iterator is closed."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece | Exception]]()

        def deliver(index: int, item: Piece | Exception) -> None:  # on the scheduler's thread
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(arrived.put_nowait, (index, item))

        jobs = [Job(request=request, deliver=partial(deliver, index)) for index, request in enumerate(query.requests)]
        self.scheduler.submit(jobs)
        unfinished = len(jobs)
        try:
            while unfinished:
                try:
                    index, item = await asyncio.wait_for(arrived.get(), _LOOK_UP)
                except TimeoutError:
                    if await connection.is_disconnected():
                        raise Gone from None
                    continue
                if isinstance(item, Exception):
                    raise item
                if await connection.is_disconnected():
                    raise Gone
                unfinished -= item.finish_reason is not None
                yield index, item
        finally:
            for job in jobs:
                job.cancelled = True

    def _usage(self, query: Query, count: int) -> dict[str, int]:
        return protocol.usage(sum(len(request.tokens) for request in query.requests), count)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises `ConfigError`."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None


class Server(uvicorn.Server):
    """Serves until it is told to stop, by a signal or `stop`; generations then end after the step they are in."""

    def __init__(self, service: Service):
        # A second is enough for streams to be told; after that they are cut.
        super().__init__(
            uvicorn.Config(service.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        )
        self._service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.stop()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        self._service.scheduler.close(0.0)
        self.should_exit = True


async def _body(connection: Connection) -> Any:
    """The JSON of a request. Raises `ConfigError`."""
    parts, size = [], 0
    async for part in connection.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            raise ConfigError(f"the body must have at most {MAX_BODY} bytes")
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body must be JSON: {error}") from None


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _refused(connection: Connection, fault: Exception) -> Response:
    if isinstance(fault, ServerError):
        return JSONResponse(protocol.error(str(fault), "server_error", "overloaded"), 503)
    return JSONResponse(protocol.error(str(fault)), 400)


async def _no_route(connection: Connection, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    message = f"{connection.method} {connection.url.path}: {fault.detail}"
    return JSONResponse(protocol.error(message), fault.status_code, headers=fault.headers)


async def _failed(connection: Connection, fault: Exception) -> Response:
    return JSONResponse(protocol.error("the server failed; its log says how", "server_error"), 500)
