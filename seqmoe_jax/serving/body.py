"""The body of a request: what may send one, how large and how slow it may be, and the JSON in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from seqmoe_jax import inputs
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.refusal import Gone, Refusal


def check_headers(headers: Mapping[str, str], most: int) -> None:
    """Raises `Refusal` for a body that need not be read.

    Only JSON: any web page may have a browser send plain text or a form to this machine, but not JSON, for which the
    browser asks first.
    """
    kind, _, parameters = headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise Refusal(
            f"the body must be JSON, with the header Content-Type: application/json, got {kind.strip()[:60] or 'none'}",
            status=415,
        )
    charset = parameters.strip().lower().replace('"', "")
    if charset not in ("", "charset=utf-8", "charset=utf8"):
        raise Refusal(f"the body must be in UTF-8, got {charset[:60]!r}", status=415)
    if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
        raise Refusal(f"the body must not be compressed, got Content-Encoding: {encoding[:60]!r}", status=415)
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise _too_large(most, f"{int(length[:20]):,} bytes")


class Intake:
    """Bodies that come in at the same time."""

    def __init__(self, limits: Limits, most: int):
        self._limits, self._most = limits, most
        self._large = asyncio.Semaphore(limits.large_at_once)

    @asynccontextmanager
    async def body(self, connection: Request) -> AsyncIterator[bytes]:
        """The bytes of a body; a large one holds one of the places for such until the context ends.

        Raises `Refusal`, or `Gone` where the client leaves before the end.
        """
        check_headers(connection.headers, self._most)
        data, large = bytearray(), False
        try:
            loop = asyncio.get_running_loop()
            end = loop.time() + self._limits.body_time
            parts = aiter(connection.stream())
            while True:
                try:
                    async with asyncio.timeout_at(min(end, loop.time() + self._limits.pause)):
                        part = await anext(parts)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise Refusal(
                        f"the body did not arrive in time: {self._limits.body_time:g} seconds for all of it, and "
                        f"{self._limits.pause:g} without a byte, are too many",
                        status=408,
                    ) from None
                except ClientDisconnect:
                    raise Gone from None
                data += part
                if len(data) > self._most:
                    raise _too_large(self._most, "more")
                if not large and len(data) > self._limits.large:
                    waited = loop.time()
                    large = await self._large.acquire()
                    end += loop.time() - waited
            yield bytes(data)
        finally:
            if large:
                self._large.release()


def _too_large(most: int, came: str) -> Refusal:
    return Refusal(f"the body must have at most {most:,} bytes (which the context decides), got {came}", status=413)


def parse_json(data: bytes, limits: Limits) -> Any:
    """The JSON of a body. Raises `Refusal`."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limits.values:
        raise Refusal(f"the body must have at most {limits.values:,} values in it, got more", status=413)
    return inputs.parse_json(data, "the body", error=Refusal)
