"""Presets: `config.json` files of real models, for runs with random weights."""

from __future__ import annotations

from pathlib import Path

from seqmoe_jax.errors import ConfigError

# In a wheel they lie inside the package; in a source tree beside it.
_PLACES = (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")


def preset_names() -> list[str]:
    return sorted({path.stem for place in _PLACES if place.is_dir() for path in place.glob("*.json")})


def preset_path(name: str) -> Path:
    """The file of a preset. Raises `ConfigError` with the names there are."""
    for place in _PLACES:
        if (place / f"{name}.json").is_file():
            return place / f"{name}.json"
    raise ConfigError(f"unknown preset {name!r}: expected one of {', '.join(preset_names())}")
