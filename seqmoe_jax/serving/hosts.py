"""Which names a server answers to.

A web page can have its own name resolve to 127.0.0.1 once it is loaded (DNS rebinding); the browser then lets it read
what a server on this machine answers. The header `Host` still has the page's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def answered_hosts(address: str, named: Iterable[str] = ()) -> frozenset[str] | None:
    """The hosts that a server at an address answers to, beside those that are `named`; None: to all.

    One that others can reach is asked by names that it cannot know, so it answers to all unless some are named.
    """
    names = frozenset(name.lower().rstrip(".") for name in named)
    if "*" in names or not (names or _is_loopback(address)):
        return None
    return names | _LOCAL | {address.lower()}


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_answered(host: str | None, hosts: frozenset[str] | None) -> bool:
    """Whether a request with this header `Host` is meant for the server. Browsers always send one."""
    if host is None or hosts is None:
        return True
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    name = name.rstrip(".")
    return name in hosts or name.endswith(".localhost")
