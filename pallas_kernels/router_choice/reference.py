"""`router_choice` in plain XLA: the oracle of the kernel; the model's routers score and weigh by it too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pallas_kernels.router_choice.config import Choice, Recorded, Score


def router_choice(
    logits: Float32[Array, "B E"],
    active: Bool[Array, " B"],
    *,
    choice: Choice,
    bias: Float[Array, " E"] | None,
    correction: Float32[Array, " E"] | None,
    recorded: Recorded | None,
) -> tuple[Int32[Array, "B K"], Float32[Array, "B K"]]:
    """See `router_choice.api`."""
    scores = scores_of(logits, bias, choice.score)
    _, ids = lax.top_k(scores if correction is None else scores + correction, choice.top_k)
    weights = weights_of(scores, ids, choice)
    if recorded is not None:
        # Depends on the choice, so that its work is done and timed.
        ids = jnp.where(ids < logits.shape[1], recorded.ids[recorded.row, recorded.layer], ids)
        weights = jnp.broadcast_to(recorded.weights[recorded.row, recorded.layer], ids.shape)
    return jnp.where(active[:, None], ids, -1), weights


def scores_of(logits: Float32[Array, "T E"], bias: Float[Array, " E"] | None, score: Score) -> Float32[Array, "T E"]:
    """What experts are chosen and weighed by."""
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    match score:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case "sqrt-softplus":
            return jnp.sqrt(jax.nn.softplus(logits))
        case "chosen-softmax":
            return logits


def weights_of(scores: Float32[Array, "T E"], ids: Int[Array, "T K"], choice: Choice) -> Float32[Array, "T K"]:
    """The weights of the chosen experts."""
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if choice.score == "chosen-softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    if choice.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + choice.eps)
    weights = weights * choice.scale
    return weights if choice.rounded_to is None else weights.astype(choice.rounded_to).astype(jnp.float32)
