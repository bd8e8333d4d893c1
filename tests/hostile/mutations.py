"""Damaged and hostile inputs made of good ones, the same for the same seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

DEEP = "DEEP"  # stands for lists in each other, deeper than any parser goes; written into the text

# What stands where something else belongs.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**16, 2**31 - 1, 2**31, 2**40, 2**63, 2**64, 10**12, 10**15, 10**400,
    -(10**30), 0.0, -0.0, 0.5, 1e-45, 1e9, 1e39, 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "0", "NaN",
    "x" * 300, "a\nb\x1b[31m\x00", "\ud83d", "\U0001f642", "../../etc/passwd", "{{ 10**10 }}", "Infinity", "true", [],
    {}, [[]], [0], [-1], [1e9], [None], ["x"], ["x", 1], {"x": 1}, {"content": 1}, {"type": "yarn"}, [{}], [{"a": []}],
    list(range(5000)), ["x"] * 5000, {str(i): i for i in range(300)}, DEEP,
)  # fmt: skip


def spoiled_json(value: Any, draw: Random) -> bytes:
    """The JSON of a value in which a few places hold something else, now and then with damaged bytes besides."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        value = _spoiled(value, draw)
    text = json.dumps(value)
    depth = draw.choice((90, 500, 200_000))
    data = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()
    kind = draw.random()
    if kind < 0.03:
        return b"\xef\xbb\xbf" + data
    if kind < 0.05:
        return text.encode("utf-16")
    return spoiled(data, draw) if kind < 0.15 else data


def _spoiled(value: Any, draw: Random) -> Any:
    places = list(_places(value))
    if not places or draw.random() < 0.01:
        return draw.choice(VALUES)
    inside, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.12:
        del inside[key]
    elif kind < 0.2 and isinstance(inside, dict):
        inside[draw.choice(("unknown", "", "x" * 300, "a\nb"))] = draw.choice(VALUES)
    elif kind < 0.25 and isinstance(inside, list):
        inside.extend(inside * draw.choice((1, 3)))
    elif kind < 0.35 and isinstance(inside[key], (int, float)) and abs(inside[key]) < 1e6:
        inside[key] = inside[key] * draw.choice((-1, 2, 3, 1000, 0.5, 0)) + draw.choice((-1, 0, 1))
    else:
        inside[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where a value is inside of another, up to a few thousand of them."""
    todo, found = [value], 0
    while todo and found < 5000:
        inside = todo.pop()
        keys = list(inside) if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
        for key in keys:
            yield inside, key
            found += 1
            if isinstance(inside[key], (dict, list)):
                todo.append(inside[key])


def spoiled(data: bytes, draw: Random) -> bytes:
    """Bytes with a few of them changed, cut, doubled, moved or put in."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        if not out:
            return bytes(draw.randbytes(draw.choice((0, 1, 100))))
        # The beginning of a file holds its headers, and the end those of a zip.
        near = draw.choice((len(out), min(len(out), 64), min(len(out), 2048)))
        at = draw.randrange(near)
        if draw.random() < 0.15:
            at = len(out) - 1 - at
        size = draw.choice((1, 1, 2, 4, 8, 64, 4096))
        kind = draw.randrange(9)
        if kind == 0:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            out[at : at + size] = bytes((draw.choice((0, 255)),)) * len(out[at : at + size])
        elif kind == 2:
            out[at : at + size] = draw.randbytes(len(out[at : at + size]))
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            out[at:at] = out[at : at + size]
        elif kind == 5:
            out[at:at] = draw.randbytes(size)
        elif kind == 6:
            other = draw.randrange(len(out))
            out[at : at + size], out[other : other + size] = out[other : other + size], out[at : at + size]
        elif kind == 7 and draw.random() < 0.3:
            del out[at:]
        else:  # another number where there is one
            number = draw.choice((0, 1, 127, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))
            width = draw.choice((2, 4, 8))
            out[at : at + width] = (number % 256**width).to_bytes(width, "little")
    return bytes(out)
