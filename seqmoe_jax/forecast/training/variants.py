"""Predictors made from a trained one: without tokens, with one retention score."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import NO_TOKEN


def without_token(config: PredictorConfig, weights: Mapping[str, Any]) -> tuple[PredictorConfig, dict[str, Any]]:
    """A predictor that was trained with all tokens blanked, as one of inputs `activations`: the same function."""
    token = ("token_embed", "token_proj", "echo_proj", "echo_bias")
    kept = {name: value for name, value in weights.items() if name not in token}
    constant = np.asarray(weights["token_embed"])[NO_TOKEN] @ np.asarray(weights["token_proj"])
    kept["in_bias"] = np.asarray(weights["in_bias"]) + constant
    return dataclasses.replace(config, inputs="activations", vocabulary=0, token_rows=0, echo=0), kept


def one_retention(
    config: PredictorConfig, weights: Mapping[str, Any], index: int
) -> tuple[PredictorConfig, dict[str, Any]]:
    """The predictor with only its retention score `index`: a third of the head's bytes where there were three."""
    shape = (len(config.retention), config.keys)
    kept = dict(weights)
    head = np.asarray(weights["retention_head"])
    kept["retention_head"] = head.reshape(head.shape[0], *shape)[:, index]
    kept["retention_bias"] = np.asarray(weights["retention_bias"]).reshape(shape)[index]
    return dataclasses.replace(config, retention=(config.retention[index],)), kept
