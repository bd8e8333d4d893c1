"""Typed reading of a model's JSON configuration (`config.json`): every fault is one line that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqmoe_jax.errors import ConfigError

_MISSING = object()


class Fields:
    """A view of a JSON object that checks types as it is read. Raises `ConfigError`."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self.values, self.where = values, where

    def _get(self, name: str, kinds: tuple[type, ...], default: Any, aliases: tuple[str, ...]) -> Any:
        for key in (name, *aliases):
            value = self.values.get(key)
            if value is None:
                continue
            # bool is an int in Python, but never a size or a number in a configuration.
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"{self.where}: field {key!r} must be {expected}, got {value!r}")
            return value
        if default is _MISSING:
            raise ConfigError(f"{self.where}: field {name!r} is missing; is this a Hugging Face model directory?")
        return default

    def size(self, name: str, default: Any = _MISSING, aliases: tuple[str, ...] = ()) -> Any:
        """A positive integer, or the default."""
        value = self._get(name, (int,), default, aliases)
        if value is not None and value <= 0:
            raise ConfigError(f"{self.where}: field {name!r} must be positive, got {value}")
        return value

    def count(self, name: str, default: Any = _MISSING) -> int:
        """An integer from 0."""
        value: int = self._get(name, (int,), default, ())
        if value < 0:
            raise ConfigError(f"{self.where}: field {name!r} must not be negative, got {value}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A float, or None where that is the default."""
        value = self._get(name, (int, float), default, ())
        return None if value is None else float(value)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value: bool = self._get(name, (bool,), default, ())
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        value: str = self._get(name, (str,), default, ())
        return value

    def ints(self, name: str, default: Any = _MISSING) -> tuple[int, ...]:
        value = self._get(name, (list, tuple), default, ())
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise ConfigError(f"{self.where}: field {name!r} must be a list of integers, got {value!r}")
        return tuple(value)

    def texts(self, name: str, default: Any = _MISSING) -> tuple[str, ...]:
        value = self._get(name, (list, tuple), default, ())
        if not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.where}: field {name!r} must be a list of strings, got {value!r}")
        return tuple(value)

    def unsupported(self, name: str, value: Any, supported: tuple[Any, ...]) -> ConfigError:
        """The error for a field whose value is understood but not supported."""
        listed = ", ".join(map(repr, supported))
        return ConfigError(f"{self.where}: {name} {value!r} is not supported; supported: {listed}")

    def group(self, name: str) -> Fields:
        """A nested object; an absent one reads as empty."""
        return Fields(self._get(name, (dict,), {}, ()), f"{self.where}: {name}")
