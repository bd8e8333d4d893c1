"""What rendering a template may take: seconds of its thread, and bytes of what it makes.

Nothing here knows Jinja. An operation first asks whether the most that it could make is within what is left, then
counts what it made. So that nothing small stands for something endless, every list and object that is made is measured
with all that is in it.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SECONDS = 5.0  # of processor time: real templates take milliseconds
BYTES = 256 << 20
BYTES_PER_INPUT = 16  # more for what is given: templates copy it some times
MOST_BITS = 4096  # of an integer
MOST_NUMBER = 100_000  # given to a function that repeats something
_GROWTH = 12  # most bytes of text that come of one byte of a value: escapes
# Functions that hand on what they were given, or a part of it, or say something short about it.
_HANDING_ON = frozenset((
    "attr", "count", "default", "d", "dictsort", "first", "get", "groupby", "index", "items", "keys", "last",
    "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr",
    "slice", "sort", "unique", "values", "batch", "copy", "startswith", "endswith", "find", "rfind", "rindex",
))  # fmt: skip


class Exhausted(Exception):
    """A template asks for more than it may have."""


@dataclass
class _Budget:
    left: int
    deadline: float


class _Running(threading.local):
    budget: _Budget | None = None


_running = _Running()


@contextmanager
def rendering(values: Any) -> Iterator[None]:
    """One rendering of `values` in this thread. One inside another has its own bytes, and the time of the outer one."""
    before = _running.budget
    deadline = time.thread_time() + SECONDS if before is None else before.deadline
    _running.budget = _Budget(BYTES + BYTES_PER_INPUT * _measure(values, float("inf")), deadline)
    try:
        yield
    finally:
        _running.budget = before


def spend(count: int) -> None:
    """Counts bytes, and looks at the clock. Raises `Exhausted`."""
    budget = _running.budget
    if budget is None:
        return
    budget.left -= count
    if budget.left < 0:
        raise Exhausted(f"it makes more than {BYTES >> 20} MB of text")
    if time.thread_time() > budget.deadline:
        raise Exhausted(f"it takes more than {SECONDS:g} seconds")


def made(value: Any) -> Any:
    """Counts what an operation made. Raises `Exhausted`."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise Exhausted("it computes numbers of thousands of digits")
    spend(sys.getsizeof(value))
    if isinstance(value, (list, tuple, dict, set)):
        size(value)
    return value


def size(value: Any) -> int:
    """Bytes of a value with all that is in it. Raises `Exhausted` for more than what is left."""
    budget = _running.budget
    return _measure(value, float("inf") if budget is None else budget.left)


def _measure(value: Any, most: float | int) -> int:
    if isinstance(value, str):
        return len(value)
    total, open_ = 0, [value]
    while open_:
        item = open_.pop()
        if isinstance(item, str):
            total += 16 + len(item)
        elif isinstance(item, Mapping):
            total += 64
            open_ += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += 64
            open_ += item
        else:
            total += 16
        if total > most or 8 * len(open_) > most:
            raise Exhausted(f"it makes more than {BYTES >> 20} MB of text")
    return total


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises `Exhausted` if a binary operator could make too much."""
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, (str, bytes, list, tuple)):
                _check(size(value) * max(times, 0))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
            raise Exhausted("it computes numbers of thousands of digits")
    elif operator == "%" and isinstance(left, str):
        check_format(left, right, "%")
    elif operator == "+" and not isinstance(left, (int, float)):
        _check(sys.getsizeof(left) + sys.getsizeof(right))


def check_format(form: str, values: Any, mark: str) -> None:
    """Raises `Exhausted` if formatting could make too much: each field may have all of the values, and a width."""
    if re.search(r"\d{4}", form) or "*" in form or re.search(r"\{[^{}]*\{", form.replace("{{", "")):
        raise Exhausted("it formats with a width that is not supported")
    _check(len(form) + form.count(mark) * (1000 + _GROWTH * size(values)))


def check_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The positional arguments of a filter, method or function, whose first one is the value.

    What can be gone through only once is a list afterwards, where it must be measured. Raises `Exhausted` if the call
    could make too much.
    """
    given = (*args[1:], *kwargs.values())
    numbers = [abs(value) for value in given if isinstance(value, int)]
    if max(numbers, default=0) > MOST_NUMBER and name not in ("default", "d", "get"):
        raise Exhausted(f"it gives {name or 'a function'} a number above {MOST_NUMBER}")
    spend(0)
    if name in _HANDING_ON or not args:
        return args
    value = args[0]
    if not isinstance(value, (str, Mapping, int, float)) and isinstance(value, Iterable) and name in ("join", "sum"):
        args = (value := list(value), *args[1:])
    texts = [str(each) for each in given if isinstance(each, str)]
    if name == "replace" and isinstance(value, str) and texts:
        _check(len(value) + value.count(texts[0]) * len(texts[-1]))
    elif name == "join":
        parts = given[0] if isinstance(value, str) and given else value  # the method has them the other way round
        between = len(value) if isinstance(value, str) else max(map(len, texts), default=0)
        parts = parts if isinstance(parts, (list, tuple, str, Mapping)) else ()
        _check(size(parts) + between * len(parts))
    elif name == "indent":
        width = max([*numbers, *map(len, texts), 4])
        _check(len(str(value)) + width * (1 + str(value).count("\n")))
    elif name == "sum":
        if any(not isinstance(each, (int, float, str)) for each in (*given, *value[:1])):
            raise Exhausted("it sums what are no numbers")
    elif name == "format":
        check_format(str(value), (given,), "%")
    else:
        _check(_GROWTH * size((value, *given)) * (1 + min(max(numbers, default=0), 100) * (name == "tojson")))
    return args


def _check(most: int) -> None:
    budget = _running.budget
    if budget is not None and most > budget.left:
        raise Exhausted(f"it makes more than {BYTES >> 20} MB of text")
