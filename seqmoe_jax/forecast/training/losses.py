"""The single losses that a predictor is trained on: KL, margin ranking, retention (paper 5.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmoe_jax.forecast.features import NEVER


def weighted_mean(x: Float[Array, "*S"], weight: Float[Array, "*S"]) -> Float[Array, ""]:
    """The mean of `x` over what `weight`, 1 or 0, admits."""
    return (x * weight).sum() / jnp.maximum(weight.sum(), 1.0)


def divergence(
    logits: Float[Array, "*B L E"], target: Float[Array, "*B L E"], flatten: float = 0.0
) -> Float[Array, "*B L"]:
    """KL(target || softmax(logits)) per layer, up to the target's entropy.

    `flatten` is the share of the uniform distribution over the routed experts in the target. An expert is fetched
    whatever its weight is, so part of the loss counts routed experts alike.
    """
    routed = (target > 0).astype(jnp.float32)
    alike = routed / jnp.maximum(routed.sum(-1, keepdims=True), 1.0)
    goal = (1 - flatten) * target.astype(jnp.float32) + flatten * alike
    return -(goal * jax.nn.log_softmax(logits, axis=-1)).sum(-1)


def ranking(
    logits: Float[Array, "*B L E"], target: Float[Array, "*B L E"], active: int, margin: float
) -> Float[Array, "*B L"]:
    """Hinge loss of routed against unrouted experts, of which only those within `margin` of a routed one count."""
    routed = jnp.take_along_axis(logits, jax.lax.top_k(target, active)[1], axis=-1)
    gap = jax.nn.relu(margin - routed[..., :, None] + logits[..., None, :])
    return (gap * (target <= 0)[..., None, :]).sum((-1, -2)) / active


def retention_target(until: Float[Array, "*B keys"], discount: float) -> Float[Array, "*B keys"]:
    """Retention scores as `PredictorConfig` defines them; `until` is the number of steps to the next use."""
    return jnp.where(until < NEVER, discount ** (until - 1), 0.0)


def cross_entropy(logits: Float[Array, "*B"], target: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Binary cross-entropy against targets in [0, 1]."""
    return jax.nn.softplus(logits) - target * logits
