"""What stands before the routes: who may ask, and answers that come before the end of a body."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqmoe_jax.serving import answers
from seqmoe_jax.serving.access import Access
from seqmoe_jax.serving.hosts import is_answered
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.work import unless


class Door:
    """An application behind these checks. `closing`: the server ends."""

    def __init__(self, app: ASGIApp, *, access: Access, limits: Limits, closing: asyncio.Event):
        self._app, self._access, self._limits, self._closing = app, access, limits, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, receive, send, self._limits.linger, self._closing)
        app: ASGIApp = self._app
        headers = Headers(scope=scope)
        host = headers.get("host")
        if not is_answered(host, self._access.hosts):
            app = answers.refused(
                f"this server does not answer to the host {str(host)[:100]!r}; ask for localhost, or start it with "
                "--allow-host NAME",
                status=421,
            )
        elif not self._access.has_key(scope["path"], headers):
            app = answers.refused(
                "this server wants its API key, in the header Authorization: Bearer KEY; got none or another one",
                status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        await app(scope, exchange.receive, exchange.send)


class _Exchange:
    """A request and its answer. Where the answer comes first, the rest of the body is read for a while: a socket that
    is closed with bytes unread takes the answer with it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, linger: float, closing: asyncio.Event):
        headers = Headers(scope=scope)
        self._receive, self._send, self._linger, self._closing = receive, send, linger, closing
        self._whole = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self._early = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._whole = not message.get("more_body", False)  # nor does more come of one that has left
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._whole:
            self._early = True
            headers = [*message.get("headers", []), (b"connection", b"close")]
            message = {**message, "headers": headers}
        if self._early and message["type"] == "http.response.body" and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            with suppress(TimeoutError):
                await unless(self._closing.wait(), TimeoutError(), asyncio.wait_for(self._rest(), self._linger))
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _rest(self) -> None:
        while not self._whole:
            await self.receive()
