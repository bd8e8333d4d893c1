"""What the predictor is trained on: KL, margin ranking, retention (paper 5.4).

Shapes: `logits` and `target` are [..., L, E]; `weight` [...] masks positions (and [..., L] layers where said).
Every loss is a mean over what the weight admits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmoe_jax.forecast.config import Retention


def weighted_mean(x: Float[Array, "*S"], weight: Float[Array, "*S"]) -> Float[Array, ""]:
    return (x * weight).sum() / jnp.maximum(weight.sum(), 1.0)


def divergence(
    logits: Float[Array, "*B L E"], target: Float[Array, "*B L E"], flatten: float | Array = 0.0
) -> Float[Array, "*B L"]:
    """KL(target || softmax(logits)) per layer, up to the target's entropy.

    `flatten` mixes the activation distribution with the uniform one over the same experts: what is fetched is the
    expert, whatever its weight, so part of the loss counts experts alike.
    """
    routed = (target > 0).astype(jnp.float32)
    alike = routed / jnp.maximum(routed.sum(-1, keepdims=True), 1.0)
    goal = (1 - flatten) * target.astype(jnp.float32) + flatten * alike
    return -(goal * jax.nn.log_softmax(logits, axis=-1)).sum(-1)


def ranking(
    logits: Float[Array, "*B L E"], target: Float[Array, "*B L E"], active: int, margin: float | Array
) -> Float[Array, "*B L"]:
    """Hinge of routed against unrouted experts: only negatives within `margin` of a routed one, hard ones, count."""
    routed = jnp.take_along_axis(logits, jax.lax.top_k(target, active)[1], axis=-1)
    gap = jax.nn.relu(margin - routed[..., :, None] + logits[..., None, :])
    return (gap * (target <= 0)[..., None, :]).sum((-1, -2)) / active


def retention_target(
    until: Float[Array, "*B T keys"], active: Float[Array, "*B T keys"], kinds: tuple[Retention, ...]
) -> Float[Array, "*B T R keys"]:
    """Targets in [0, 1] at each step of a window: `until` counts steps to the next use after it (255: none)."""
    goals = []
    for retention in kinds:
        if retention.kind == "next":
            goals.append(jnp.where(until < 255, retention.discount ** (until - 1), 0.0))
        else:
            steps = jnp.arange(active.shape[-2])
            ahead = steps[None, :] - steps[:, None] - 1
            weight = jnp.where(ahead >= 0, (1 - retention.discount) * retention.discount ** jnp.maximum(ahead, 0), 0.0)
            goals.append(jnp.einsum("ts,...sk->...tk", weight.astype(active.dtype), active).astype(jnp.float32))
    return jnp.stack(goals, axis=-2)


def cross_entropy(logits: Float[Array, "*B"], target: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Binary cross-entropy against targets in [0, 1]."""
    return jax.nn.softplus(logits) - target * logits
