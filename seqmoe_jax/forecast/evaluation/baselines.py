"""What a predictor has to beat: popularity, repeat-last, first order (Patterns-MoE)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Steps
from seqmoe_jax.forecast.evaluation.metrics import batches

# Scores of a step h steps ahead of the last known one, from its features [..., L*E] and h >= 1.
Scores = Callable[[Float[Array, "*B keys"], int], Float[Array, "*B L E"]]


def popularity(steps: Steps, config: PredictorConfig) -> Float[Array, "L E"]:
    """How often each expert is routed."""
    return jnp.mean(steps.features > 0, axis=0, dtype=jnp.float32).reshape(config.layers, config.experts)


def transitions(steps: Steps, config: PredictorConfig) -> Float[Array, "L E E"]:
    """Per layer P(e' routed in the next step | e routed in this one)."""
    shape = (config.layers, config.experts)
    counts, given = jnp.zeros((*shape, config.experts)), jnp.zeros(shape)
    for batch in batches(steps, config):
        more, mass = _count(batch.inputs.features, batch.target, shape)
        counts, given = counts + more, given + mass
    return counts / jnp.maximum(given[..., None], 1e-6)


@functools.partial(jax.jit, static_argnames="shape")
def _count(before: Array, after: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    now = (before.reshape(-1, *shape) > 0).astype(jnp.float32)
    then = (after.reshape(-1, *shape) > 0).astype(jnp.float32)
    return jnp.einsum("nle,nlf->lef", now, then), now.sum(0)


def baselines(steps: Steps, config: PredictorConfig) -> dict[str, Scores]:
    """All baselines, fitted on `steps` (the training split)."""
    popular = popularity(steps, config)
    matrix = transitions(steps, config)
    shape = (config.layers, config.experts)

    def by_popularity(features: Array, ahead: int) -> Array:
        return jnp.broadcast_to(popular, (*features.shape[:-1], *shape))

    def by_repetition(features: Array, ahead: int) -> Array:
        return features.astype(jnp.float32).reshape(*features.shape[:-1], *shape) + 1e-3 * popular

    def by_transition(features: Array, ahead: int) -> Array:
        scores = features.astype(jnp.float32).reshape(*features.shape[:-1], *shape)
        for _ in range(ahead):
            scores = jnp.einsum("...le,lef->...lf", scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-6), matrix)
        return scores

    return {"popularity": by_popularity, "repeat-last": by_repetition, "first-order": by_transition}
