"""Who may ask: the hosts that a server answers to, its key, and the web pages whose origin it admits."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from seqmoe_jax.errors import ConfigError

OPEN = ("/health",)  # paths that need no key
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


@dataclass(frozen=True, kw_only=True)
class Access:
    """`hosts`: names that the server answers to, None: all. `key`: what requests must have, None: nothing.
    `origins`: of web pages whose scripts may read answers."""

    hosts: frozenset[str] | None = None
    key: str | None = None
    origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and " " not in self.key):
            raise ConfigError("--api-key must be printable ASCII without spaces, as a header can have it")
        if self.key == "":
            raise ConfigError("--api-key is empty; give one, or leave it out (and SEQMOE_API_KEY unset) for none")
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors must be an origin as browsers send it, such as http://localhost:3000, or '*', got "
                    f"{origin!r}"
                )

    def has_key(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request may have its answer. How long this takes says nothing about the key."""
        if self.key is None or path in OPEN:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        offered = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(offered.encode(), self.key.encode())

    def with_origins(self, app: ASGIApp) -> ASGIApp:
        """The application for browsers as well: preflights answered, answers marked as readable."""
        if not self.origins:
            return app
        return CORSMiddleware(app, allow_origins=self.origins, allow_methods=["GET", "POST"], allow_headers=["*"])
