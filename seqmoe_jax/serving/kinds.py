"""A field of a request: what may be in it, in words for docs and errors and as what reads a value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from seqmoe_jax.fields import shown
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.refusal import Refusal

Does = Literal["applied", "accepted", "refused"]
Endpoint = Literal["both", "chat", "completions"]


def named(path: str) -> str:
    """A field's name as an error shows it."""
    return path if len(path) <= 100 and path.isprintable() else shown(path)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a field may hold: `words` say it; `take` returns the value as it is used, or None where it is something
    else."""

    words: str
    take: Callable[[Any], Any]

    def read(self, path: str, value: Any) -> Any:
        """The value of the field `path`. Raises `Refusal`."""
        taken = self.take(value)
        if taken is None:
            raise Refusal(f"{named(path)} must be {self.words}, got {shown(value)}", param=named(path))
        return taken


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)  # bool is an int in Python, but not in JSON


def integer(least: int, most: int, words: str = "") -> Kind:
    def take(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None

    return Kind(words=words or f"an integer from {least} to {most}", take=take)


def number(least: float | int, most: float | int, words: str = "", *, without: float | int = math.nan) -> Kind:
    def take(value: Any) -> float | None:
        # Compared before it becomes a float: 10**400 would not. NaN is within nothing.
        return float(value) if _is_number(value) and least <= value <= most and value != without else None

    return Kind(words=words or f"a number from {least:g} to {most:g}", take=take)


FLAG = Kind(words="true or false", take=lambda value: value if isinstance(value, bool) else None)
OBJECT = Kind(words="an object", take=lambda value: value if isinstance(value, dict) else None)
LIST = Kind(words="a list", take=lambda value: value if isinstance(value, list) and value else None)


ITEMS = Kind(words="a list", take=lambda value: value if isinstance(value, list) else None)  # or of none


def one_of(*values: str, why: str) -> Kind:
    def take(value: Any) -> str | None:
        return value if isinstance(value, str) and value in values else None

    return Kind(words=f"{' or '.join(json.dumps(value) for value in values)} ({why})", take=take)


TOKENS = Kind(
    words="a list of token ids",
    take=lambda value: value if isinstance(value, list) and all(type(item) is int for item in value) else None,
)
ANY_TEXT = Kind(words="text", take=lambda value: value if isinstance(value, str) and value else None)


def text(most: int) -> Kind:
    def take(value: Any) -> str | None:
        return value if isinstance(value, str) and len(value) <= most else None

    return Kind(words=f"text of at most {most} characters", take=take)


def stops(limits: Limits = Limits()) -> Kind:  # noqa: B008  frozen
    """A stop string or a list of them."""

    def take(value: Any) -> list[str] | None:
        given = [value] if isinstance(value, str) else value
        few = isinstance(given, list) and len(given) <= limits.stops
        return given if few and all(isinstance(s, str) and 0 < len(s) <= limits.stop_length for s in given) else None

    return Kind(
        words=f"a string or a list of at most {limits.stops}, each of 1 to {limits.stop_length} characters", take=take
    )


def prompts(limits: Limits = Limits()) -> Kind:  # noqa: B008  frozen
    """A text, token ids, or a list of either, as a list. What is in each is the business of who reads it."""

    def take(value: Any) -> list[str | list[int]] | None:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            return None
        several = all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value)
        each = value if several else [value]
        if several and len(each) > limits.prompts:
            return None
        alike = all(isinstance(one, str) or all(type(token) is int for token in one) for one in each)
        return each if alike else None

    return Kind(words=f"text, a list of token ids, or a list of at most {limits.prompts} of either", take=take)


def template_options(reserved: frozenset[str]) -> Kind:
    """Options of a chat template: what is not `reserved`, by names that a template can read."""

    def take(value: Any) -> dict[str, Any] | None:
        valid = isinstance(value, dict) and all(
            name.isidentifier() and len(name) <= 100 and name not in reserved for name in value
        )
        return value if valid else None

    return Kind(words=f"an object of names that a template reads, but not {', '.join(sorted(reserved))}", take=take)


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field. `kind` is what an applied one may hold, `neutral` the values of a refused one that ask for nothing.
    `says`: what it does, why it cannot matter, or what to do instead."""

    name: str
    does: Does
    says: str
    endpoint: Endpoint = "both"
    kind: Kind = OBJECT
    neutral: tuple[Any, ...] = ()

    def value(self, path: str, given: Any) -> Any:
        """What was given as it is used; None where there is nothing to use. Raises `Refusal`."""
        if self.does == "applied":
            return self.kind.read(path, given)
        if self.does == "refused" and not any(_same(given, neutral) for neutral in self.neutral):
            raise Refusal(
                f"{named(path)} is not supported, got {shown(given)}: {self.says}; {self.way_out}", param=path
            )
        return None

    @property
    def way_out(self) -> str:
        """What a client whose field is refused can do."""
        listed = " or ".join(json.dumps(value) for value in self.neutral)
        return f"leave it out or send {listed}" if listed else "leave it out"


def _same(given: Any, neutral: Any) -> bool:
    return isinstance(given, bool) == isinstance(neutral, bool) and given == neutral  # True is 1 in Python
