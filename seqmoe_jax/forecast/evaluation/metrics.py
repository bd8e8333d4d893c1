"""Recall: the share of routed experts among the forecast's likeliest k' per layer, k' from K to K + 4."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch, Steps, batches
from seqmoe_jax.forecast.predictor import Outputs, graph_of

EXTRA = 5  # k' runs over K, K + 1, ..., K + 4
TOP = 3  # index of k' = K + 3, which single figures of recall are of


class Hits(NamedTuple):
    """Routed experts found by k' (X of them) and layer, and the number of steps looked at."""

    found: Float[Array, "X L"]
    steps: Float[Array, ""]

    def recall(self, active: int) -> Float[np.ndarray, "X L"]:
        return np.asarray(self.found) / max(float(self.steps) * active, 1.0)


def no_hits(config: PredictorConfig) -> Hits:
    return Hits(jnp.zeros((EXTRA, config.layers)), jnp.zeros(()))


@functools.partial(jax.jit, static_argnames="active")
def add_hits(
    hits: Hits, scores: Float[Array, "*B L E"], target: Float[Array, "*B keys"], valid: Bool[Array, "*B"], active: int
) -> Hits:
    """Counts over the valid steps, added to `hits`; `target` is positive where routed."""
    widest = min(active + EXTRA - 1, scores.shape[-1])
    chosen = jax.lax.top_k(scores, widest)[1]
    right = jnp.take_along_axis(target.reshape(scores.shape) > 0, chosen, axis=-1) & valid[..., None, None]
    axes = tuple(range(right.ndim - 2))
    found = jnp.cumsum(right.sum(axes).astype(jnp.float32), axis=-1)  # [L, widest]
    columns = np.minimum(np.arange(active - 1, active + EXTRA - 1), widest - 1)
    return Hits(hits.found + found[:, columns].T, hits.steps + valid.sum().astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("config", "bfloat16"))
def forecast(config: PredictorConfig, params: Any, batch: Batch, bfloat16: bool = False) -> Outputs:
    """What the module says at every position of a batch; `params` is its NNX state."""
    outputs: Outputs = nnx.merge(graph_of(config), params)(
        batch.inputs, valid=batch.valid, dtype=jnp.bfloat16 if bfloat16 else jnp.float32
    )
    return outputs


@functools.partial(jax.jit, static_argnames=("config", "trigger"))
def refined(
    config: PredictorConfig, params: Any, batch: Batch, outputs: Outputs, trigger: int
) -> Float[Array, "B T L E"]:
    """Logits refined at a trigger layer, with the routing of the layers below it known."""
    below = jnp.arange(config.keys) < trigger * config.experts
    known = jnp.where(below, batch.target, 0)
    logits: Array = nnx.merge(graph_of(config), params).refine(outputs.hidden, outputs.next, known)
    return logits


def validate(config: PredictorConfig, params: Any, steps: Steps, *, bfloat16: bool = False) -> tuple[float, float]:
    """Recall at K + 3 of the next step, and of the layers above L/2 once refined there."""
    trigger = config.layers // 2
    following = again = no_hits(config)
    for batch in batches(steps, config):
        outputs = forecast(config, params, batch, bfloat16)
        following = add_hits(following, outputs.next, batch.target, batch.scored, config.active)
        logits = refined(config, params, batch, outputs, trigger)
        again = add_hits(again, logits, batch.target, batch.scored, config.active)
    above = slice(min(trigger + 1, config.layers - 1), None)
    recalls = following.recall(config.active)[TOP], again.recall(config.active)[TOP, above]
    return float(recalls[0].mean()), float(recalls[1].mean())
