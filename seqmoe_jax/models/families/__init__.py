"""Model families. One file each: how its `config.json` describes a decoder, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqmoe_jax.models.families import glm4_moe, granitemoe, mixtral, olmoe, qwen_moe
from seqmoe_jax.models.families.common import Family
from seqmoe_jax.models.fields import Fields
from seqmoe_jax.models.spec import ModelSpec

# By `model_type` of config.json.
FAMILIES: Mapping[str, Family] = {
    "glm4_moe": glm4_moe.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2_moe": qwen_moe.QWEN2,
    "qwen3_moe": qwen_moe.QWEN3,
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Contents of a `config.json` -> `ModelSpec`. Raises `ConfigError` for what is unknown or unsupported."""
    fields = Fields(config)
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise fields.unsupported("model_type", family, tuple(sorted(FAMILIES)))
    spec = FAMILIES[family].spec(fields)
    spec.moe  # a dense model is refused here, not deep inside  # noqa: B018
    return spec
