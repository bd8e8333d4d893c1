"""The forecast inside the decode step: what it reads of a step, and what eviction and planning read of it.

Without a predictor a forecast comes from the past alone (`history`). Shapes: L layers, E experts, K active,
B sequences, key = layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from seqmoe_jax.forecast import inference as plain
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.models.routers import hash_experts

SCORE_UNIT = 2.0**24  # slot scores are int32; worths below 2 keep 24 bits
PENDING = 1.0  # weight of the retention of an expert whose layer is still to come: half cost .018 of hit rate at 25 %


class Forecast(NamedTuple):
    """What is expected of each expert.

    probability: of being routed in the coming step.
    retention: the discounted use after that (paper 7.1).
    """

    probability: Float32[Array, " keys"]
    retention: Float32[Array, " keys"]


def no_forecast(keys: int) -> Forecast:
    """Nothing is known of any expert. Two buffers of their own, so that both can be donated."""
    return Forecast(jnp.zeros(keys, jnp.float32), jnp.zeros(keys, jnp.float32))


def worth(forecast: Forecast) -> Int32[Array, "2 keys"]:
    """Slot scores before and after an expert's layer has run in the coming step (`slot_update`'s `key_score`)."""
    probability, retention = forecast
    return (jnp.stack([probability + PENDING * retention, retention]) * SCORE_UNIT).astype(jnp.int32)


def from_history(retention: Float32[Array, " keys"]) -> Forecast:
    """The forecast without a predictor. It gives no probability for the coming step, so an expert is worth the same
    before and after its layer has run."""
    return Forecast(jnp.zeros_like(retention), retention)


def known_routing(
    probability: Float32[Array, "L E"],
    tables: Mapping[int, Int32[Array, "V K"]],
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> Float32[Array, "L E"]:
    """Probabilities in which the rows of hash-routed layers are exact: 1 where one of the coming tokens goes, else 0.

    `tables`: by MoE layer (`ModelWeights.hash_tables`). `active`: sequences that go on.
    """
    experts = probability.shape[1]
    for layer, table in tables.items():
        ids = jnp.where(active[:, None], hash_experts(tokens, table), experts)
        probability = probability.at[layer].set(jnp.zeros(experts).at[ids.reshape(-1)].set(1.0, mode="drop"))
    return probability


def features(
    ids: Int[Array, "l B K"], weights: Float[Array, "l B K"], *, layers: int, experts: int
) -> Float32[Array, "B keys"]:
    """The routing of the first l of L layers as the predictor reads it (paper 5.2); zero for layers still to come and
    for sequences that have ended (ids of -1)."""
    known, batch, _ = ids.shape
    share = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9)
    rows = jnp.arange(batch)[None, :, None]
    layer = jnp.arange(known)[:, None, None]
    dense = jnp.zeros((batch, layers, experts), jnp.float32)
    dense = dense.at[rows, layer, jnp.where(ids >= 0, ids, experts)].set(share.astype(jnp.float32), mode="drop")
    return dense.reshape(batch, layers * experts)


def mean_over(values: Float[Array, "B keys"], active: Bool[Array, " B"]) -> Float32[Array, " keys"]:
    """The mean over the sequences that go on (paper 6.1, 7.1)."""
    # Selected, not multiplied by zero: what a sequence ended with may be no number.
    return jnp.where(active[:, None], values, 0.0).sum(0) / jnp.maximum(active.sum().astype(jnp.float32), 1.0)


def together(first: Forecast, sequences: Int[Array, ""], second: Forecast, more: Int[Array, ""]) -> Forecast:
    """The mean over `sequences` of the first forecast and `more` of the second; the second where there are none."""
    share = more.astype(jnp.float32) / jnp.maximum(sequences + more, 1).astype(jnp.float32)
    share = jnp.where(sequences > 0, share, 1.0)
    # Selected where there are no others: what they were forecast has no part in it, whatever it is.
    return Forecast(*(jnp.where(share == 1, b, a + share * (b - a)) for a, b in zip(first, second, strict=True)))


def foresee(
    config: PredictorConfig,
    predictor: dict[str, Any],
    state: dict[str, Any],
    routing: Float[Array, "B keys"],
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
    *,
    ahead: int = 1,
) -> tuple[dict[str, Any], Forecast, Float32[Array, "L E"]]:
    """The state after a step, the forecast for the coming one, and the probabilities of the step `ahead` steps on, by
    which transfers are planned.

    Beyond the coming step they are the predictor's rollout (paper 5.3), which leaves the state as it is.
    """
    state, following, retention = plain.step(
        config, predictor, state, routing.astype(predictor["in_proj"].dtype), tokens
    )
    shape = tokens.shape[0], -1
    coming, kept = (mean_over(values.reshape(shape), active) for values in (following, retention))
    chance = coming
    if ahead > 1:
        chance = mean_over(plain.rollout(config, predictor, state, ahead)[:, ahead - 1].reshape(shape), active)
    return state, Forecast(coming, kept), chance.reshape(config.layers, config.experts)


def refine(
    config: PredictorConfig,
    predictor: dict[str, Any],
    state: dict[str, Any],
    known: Float[Array, "B keys"],
    active: Bool[Array, " B"],
) -> Float32[Array, "L E"]:
    """Probabilities of the layers still to come in the running step, from the routing of those that have run."""
    again = plain.refine(config, predictor, state, known.astype(predictor["in_proj"].dtype))
    return mean_over(again.reshape(known.shape), active).reshape(config.layers, config.experts)
