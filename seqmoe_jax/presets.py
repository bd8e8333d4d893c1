"""Presets: `config.json` files of real models, for runs with random weights."""

from __future__ import annotations

import difflib
from pathlib import Path

from seqmoe_jax.errors import ConfigError

# In a wheel they lie inside the package; in a source tree beside it.
_PLACES = (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")


def preset_names() -> list[str]:
    return sorted({path.stem for place in _PLACES if place.is_dir() for path in place.glob("*.json")})


def preset_path(name: str) -> Path:
    """The file of a preset. Raises `ConfigError` with the names there are."""
    names = preset_names()
    if name not in names:  # also where a path leads to some other file
        raise ConfigError(f"unknown preset {name!r}: expected one of {', '.join(names)}{did_you_mean(name)}")
    return next(place / f"{name}.json" for place in _PLACES if (place / f"{name}.json").is_file())


def did_you_mean(model: str) -> str:
    """What somebody may have meant who wrote a model that is not there, to end a sentence with; empty if nothing."""
    names = preset_names()
    if model in names:
        return f"; {model} is a preset: add --random-weights (random_weights=True)"
    close = difflib.get_close_matches(model.lower(), [*names, "demo"], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
