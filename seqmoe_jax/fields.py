"""Typed and ranged reading of JSON objects: every fault is one line that names the field."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from seqmoe_jax.errors import ConfigError, SeqMoEError

Number = float | int
Range = tuple[Number, Number]  # least and most, both allowed
SIZES: Range = (1, 1 << 20)  # of what has no range of its own: a width, a number of heads
COUNTS: Range = (0, 1 << 20)
NUMBERS: Range = (-1e30, 1e30)  # float32 holds them
MOST_ITEMS = 4096
MOST_TEXT = 1024
_MISSING = object()
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "an object"}
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and cut where it is long or deep."""
    try:
        return _short.repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of thousands of digits"


class Fields:
    """A view of a JSON object that checks types and ranges as it is read. Raises `error`.

    `where` is what errors begin with. A field that is null is absent. `ranges` are those of fields by name, in whatever
    object they are.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        *,
        ranges: Mapping[str, Range] | None = None,
        error: type[SeqMoEError] = ConfigError,
    ):
        self.values, self.where, self.ranges, self.error = values, where, ranges or {}, error

    def of(self, values: Mapping[str, Any], where: str) -> Fields:
        """Another object that is read in the same way."""
        return Fields(values, where, ranges=self.ranges, error=self.error)

    def group(self, name: str) -> Fields:
        """A nested object; an absent one reads as empty."""
        return self.of(self._get(name, dict, {})[1], f"{self.where}: {name}")

    def fault(self, name: str, expected: str, value: object) -> SeqMoEError:
        """The error for a field that is not what was expected."""
        return self.error(f"{self.where}: field {shown(name)} must be {expected}, got {shown(value)}")

    def unsupported(self, name: str, value: Any, supported: tuple[Any, ...]) -> SeqMoEError:
        """The error for a field whose value is understood but not supported."""
        listed = ", ".join(map(repr, supported))
        return self.error(f"{self.where}: {name} {shown(value)} is not supported; supported: {listed}")

    def only(self, *known: str) -> None:
        """Raises for a field of another name."""
        for name in self.values:
            if name not in known:
                raise self.error(f"{self.where}: unknown field {shown(name)}; known are {', '.join(known)}")

    def _get(self, name: str, kind: type, default: Any, aliases: tuple[str, ...] = ()) -> tuple[str, Any]:
        """The name by which the field is there, and its value or the default."""
        for key in (name, *aliases):
            value = self.values.get(key)
            if value is None:
                continue
            # bool is an int in Python, but never a number in JSON; 1 and 1.0 are both numbers.
            numeric = isinstance(value, (int, float) if kind is float else kind)
            if not numeric or (isinstance(value, bool) and kind is not bool):
                raise self.fault(key, _WORDS[kind], value)
            return key, value
        if default is _MISSING:
            raise self.error(f"{self.where}: field {name!r} is missing")
        return name, default

    def _ranged(self, name: str, kind: type, default: Any, within: Range, aliases: tuple[str, ...] = ()) -> Any:
        key, value = self._get(name, kind, default, aliases)
        least, most = self.ranges.get(name, within)
        # Compared before it becomes a float, which 10**400 would not. NaN is within nothing.
        if value is not None and not least <= value <= most:
            raise self.fault(key, f"{_WORDS[kind]} from {least:g} to {most:.10g}", value)
        return value if value is None else kind(value)

    def size(self, name: str, default: Any = _MISSING, aliases: tuple[str, ...] = ()) -> Any:
        """A positive integer, or the default."""
        return self._ranged(name, int, default, SIZES, aliases)

    def count(self, name: str, default: Any = _MISSING) -> Any:
        """An integer from 0, or the default."""
        return self._ranged(name, int, default, COUNTS)

    def integer(self, name: str, default: Any = _MISSING, *, least: int, most: int) -> Any:
        """An integer from `least` to `most`, or the default."""
        return self._ranged(name, int, default, (least, most))

    def number(
        self, name: str, default: Any = _MISSING, *, least: Number = NUMBERS[0], most: Number = NUMBERS[1]
    ) -> Any:
        """A finite float from `least` to `most`, or the default."""
        return self._ranged(name, float, default, (least, most))

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value: bool = self._get(name, bool, default)[1]
        return value

    def text(self, name: str, default: Any = _MISSING, *, least: int = 0, most: int = MOST_TEXT) -> Any:
        """Text of so many characters, or the default."""
        key, value = self._get(name, str, default)
        if value is not None and not least <= len(value) <= most:
            raise self.fault(key, f"text of {least} to {most} characters", value)
        return value

    def _items(self, name: str, kind: type, default: Any, most: int, plural: str) -> tuple[Any, ...]:
        # Defaults are tuples of what is right already.
        kinds = (int, float) if kind is float else kind
        if (value := self._get(name, list, default)[1]) is default:
            return value
        right = all(isinstance(item, kinds) and not isinstance(item, bool) for item in value)
        if len(value) > most or not right:
            raise self.fault(name, f"a list of at most {most} {plural}" if right else f"a list of {plural}", value)
        return tuple(value)

    def ints(self, name: str, default: Any = _MISSING, *, within: Range = COUNTS, most: int = MOST_ITEMS) -> Any:
        """A list of integers `within` a range, at most so many, as a tuple; or the default."""
        return self._each_within(name, self._items(name, int, default, most, "integers"), "integers", within)

    def numbers(self, name: str, default: Any = _MISSING, *, within: Range = NUMBERS, most: int = MOST_ITEMS) -> Any:
        """A list of finite floats `within` a range, at most so many, as a tuple; or the default."""
        return self._each_within(name, self._items(name, float, default, most, "numbers"), "numbers", within)

    def _each_within(self, name: str, values: Any, plural: str, within: Range) -> Any:
        least, most = self.ranges.get(name, within)
        for item in values or ():
            if not least <= item <= most:
                raise self.fault(name, f"{plural} from {least:g} to {most:.10g}", item)
        return values

    def texts(self, name: str, default: Any = _MISSING, *, most: int = MOST_ITEMS) -> Any:
        """A list of texts, at most so many, as a tuple; or the default."""
        return self._items(name, str, default, most, "strings")
