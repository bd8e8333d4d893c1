"""Model families. One file each: how its `config.json` describes a decoder, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families import (
    deepseek,
    deepseek_v4,
    glm4_moe,
    gpt_oss,
    granitemoe,
    mixtral,
    olmoe,
    qwen_moe,
    qwen_next,
)
from seqmoe_jax.models.families.common import Family
from seqmoe_jax.models.families.ranges import MOST_KEYS, RANGES
from seqmoe_jax.models.families.unquantised import with_unquantised
from seqmoe_jax.models.spec import ModelSpec

# By `model_type` of config.json.
FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "deepseek_v4": deepseek_v4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": deepseek.GLM4_LITE,
    "gpt_oss": gpt_oss.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2_moe": qwen_moe.QWEN2,
    "qwen3_5_moe": qwen_next.QWEN3_5,
    "qwen3_5_moe_text": qwen_next.QWEN3_5,
    "qwen3_moe": qwen_moe.QWEN3,
    "qwen3_next": qwen_next.NEXT,
}


def left_out(config: Mapping[str, Any]) -> str:
    """The end of an error about what a `config.json` calls for: fields that it does not give, and for which the model
    type's defaults were taken."""
    names = FAMILIES[str(config["model_type"])].left_out(Fields(config))
    return f" (config.json says nothing of {', '.join(sorted(names))})" if names else ""


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Contents of a `config.json` -> `ModelSpec`. Raises `ConfigError` for what is unknown or unsupported."""
    fields = Fields(config, ranges=RANGES)
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise fields.unsupported("model_type", family, tuple(sorted(FAMILIES)))
    spec = with_unquantised(FAMILIES[family].read(fields), FAMILIES[family].names.experts)
    try:
        keys = spec.num_keys
    except ConfigError as error:  # a dense model is refused here, not deep inside
        raise ConfigError(f"{error}{left_out(config)}") from None
    if keys > MOST_KEYS:
        raise ConfigError(f"{fields.where}: expected at most {MOST_KEYS} experts in all layers, got {keys}")
    return spec
