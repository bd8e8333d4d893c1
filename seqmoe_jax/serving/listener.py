"""Sockets, connections and the end of a server: what uvicorn leaves open."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.serving import answers
from seqmoe_jax.serving.server import Service

GRACE = 2  # seconds for streams to be told that the server ends; after that they are cut


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises `ConfigError`."""
    if not host:  # to listen on every address, which must be said
        raise ConfigError("--host must be an address or a name, got ''; leave it out for this machine alone")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None


class Server(uvicorn.Server):
    """Serves until it is told to stop, by a signal or `stop`; generations then end after the step they are in.

    SIGTERM lets what has begun be answered before that, for at most `drain` seconds.
    """

    def __init__(self, service: Service, *, drain: float = 0.0):
        config = uvicorn.Config(
            service.app(), log_level="warning", lifespan="off", loop="asyncio", ws="none",
            timeout_graceful_shutdown=GRACE, http=_protocol(service.limits.pause),
        )  # fmt: skip
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_fault)
        self._service, self._drain = service, drain
        self._drained_by = float("inf")

    def handle_exit(self, sig: int, frame: Any) -> None:
        """SIGTERM lets what has begun end; any other signal, or the next one, ends it in order, one more at once."""
        if sig == signal.SIGTERM and self._drain > 0 and not (self._service.draining or self.should_exit):
            self._drained_by = time.monotonic() + self._drain
            self._service.draining = True
            return
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        drained = self._service.draining and not self.server_state.tasks
        self.should_exit = self.should_exit or drained or time.monotonic() >= self._drained_by
        return await super().on_tick(counter)

    def stop(self) -> None:
        """Ends it; may be called from any thread."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.close()
        await super().shutdown(sockets)


def _is_fault(record: logging.LogRecord) -> bool:
    """What is cut when the server ends is none."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _protocol(pause: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1 with two more manners: headers must come within `pause` seconds, and bytes that are no HTTP
    get an error in OpenAI's form."""

    class Protocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self._deadline is None:
                self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._write(answers.refused("this is not an HTTP/1.1 request", status=400))

        def _await_headers(self) -> None:
            self._deadline = self.loop.call_later(pause, self._too_late)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_late(self) -> None:
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._write(answers.refused(f"the request did not begin within {pause:g} seconds", status=408))

        def _write(self, response: Any) -> None:
            """Answers, and closes."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                headers = [*response.raw_headers, (b"connection", b"close")]
                for event in (h11.Response(status_code=response.status_code, headers=headers),
                              h11.Data(data=response.body), h11.EndOfMessage()):  # fmt: skip
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return Protocol
