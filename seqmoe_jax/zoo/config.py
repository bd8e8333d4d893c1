"""What a module's configuration says, as a `config.json` would."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.models.families import FAMILIES
from seqmoe_jax.zoo.layouts import Layout

ATTRIBUTES = ("config", "cfg")


def config_of(module: nnx.Module, layout: Layout, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `config.json`: those `given`, else the configuration's own, else the layout's.

    Raises `ConfigError` where nothing says which family the model is of.
    """
    own = _values(next((getattr(module, name) for name in ATTRIBUTES if hasattr(module, name)), {}))
    # Dtypes are what the arrays have, and quantisation of another library is none that a file would name.
    fields = {name: own[name] for name in own.keys() - {"dtype", "torch_dtype", "quantization_config"}}
    fields |= {ours: own[theirs] for ours, theirs in layout.config.items() if own.get(theirs) is not None}
    family = _family(type(module).__name__)
    fields = dict(layout.defaults) | ({"model_type": family} if family else {}) | fields | dict(given)
    if fields.get("model_type") not in FAMILIES:
        said = f"says {fields['model_type']!r}" if "model_type" in fields else "does not say"
        raise ConfigError(
            f"{type(module).__name__}: its configuration {said} which family it is of; give "
            f"config={{'model_type': ...}}, one of {', '.join(sorted(FAMILIES))}"
        )
    return fields


def _family(name: str) -> str | None:
    """The family that the name of a class begins with, as `GptOssForCausalLM` does."""
    found = [family for family in FAMILIES if name.lower().startswith(family.replace("_", ""))]
    return max(found, key=len, default=None)


def _values(config: Any) -> dict[str, Any]:
    """The values of a configuration object that a JSON file could have."""
    if isinstance(config, Mapping):
        values = dict(config)
    elif dataclasses.is_dataclass(config):
        values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    elif hasattr(config, "to_dict"):
        values = dict(config.to_dict())
    else:
        values = dict(getattr(config, "__dict__", {}))
    values.setdefault("model_type", getattr(config, "model_type", None))
    plain = {name: _plain(value) for name, value in values.items() if isinstance(name, str)}
    return {name: value for name, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return None if None in items else items
    if isinstance(value, Mapping):
        return {str(key): item for key, each in value.items() if (item := _plain(each)) is not None}
    return None
