"""What a predictor has to beat: popularity, repeating the last step, first-order transitions (Patterns-MoE)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmoe_jax.traces.first_order import FirstOrder
from seqmoe_jax.traces.format import Trace

# Scores of the step that is h >= 1 steps after the last known one, whose features are given.
Scores = Callable[[Float[Array, "*B keys"], int], Float[Array, "*B L E"]]


def baselines(trace: Trace) -> dict[str, Scores]:
    """All baselines, fitted on a trace (the training split)."""
    fitted = FirstOrder.fit(trace)
    popularity, transition = jnp.asarray(fitted.popularity), jnp.asarray(fitted.transition)

    def routing(features: Float[Array, "*B keys"]) -> Float[Array, "*B L E"]:
        return features.astype(jnp.float32).reshape(*features.shape[:-1], *popularity.shape)

    def by_popularity(features: Float[Array, "*B keys"], ahead: int) -> Float[Array, "*B L E"]:
        return jnp.broadcast_to(popularity, (*features.shape[:-1], *popularity.shape))

    def by_repetition(features: Float[Array, "*B keys"], ahead: int) -> Float[Array, "*B L E"]:
        return routing(features) + 1e-3 * popularity

    def by_transition(features: Float[Array, "*B keys"], ahead: int) -> Float[Array, "*B L E"]:
        scores = routing(features)
        for _ in range(ahead):
            share = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-6)
            scores = jnp.einsum("...le,lef->...lf", share, transition)
        return scores

    return {"popularity": by_popularity, "repeat-last": by_repetition, "first-order": by_transition}
