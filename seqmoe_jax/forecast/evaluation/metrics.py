"""Recall: the share of routed experts among the forecast's likeliest k' per layer, k' from K to K + 4."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch, Steps, window
from seqmoe_jax.forecast.predictor import BESIDE, Outputs, Predictor

EXTRA = 5  # k' runs over K, K + 1, ..., K + 4


class Hits(NamedTuple):
    """Routed experts found by k' and layer, and the number of steps looked at."""

    found: Float[Array, "X L"]
    steps: Float[Array, ""]

    def recall(self, active: int) -> np.ndarray:
        """Recall [X, L]."""
        return np.asarray(self.found) / max(float(self.steps) * active, 1.0)

    def __add__(self, other: Hits) -> Hits:  # type: ignore[override]
        return Hits(self.found + other.found, self.steps + other.steps)


def hits(scores: Float[Array, "*B L E"], target: Float[Array, "*B L E"], valid: Bool[Array, "*B"], active: int) -> Hits:
    """Counts over the valid steps; `target` is positive where routed."""
    widest = min(active + EXTRA - 1, scores.shape[-1])
    chosen = jax.lax.top_k(scores, widest)[1]
    right = jnp.take_along_axis(target > 0, chosen, axis=-1) & valid[..., None, None]
    axes = tuple(range(right.ndim - 2))
    found = jnp.cumsum(right.sum(axes).astype(jnp.float32), axis=-1)  # [L, widest]
    columns = np.minimum(np.arange(active - 1, active + EXTRA - 1), widest - 1)
    return Hits(found[:, columns].T, valid.sum().astype(jnp.float32))


def batches(steps: Steps, config: PredictorConfig, size: int | None = None) -> Iterator[Batch]:
    """Whole sequences in batches of one shape, longest first; short batches are filled up with nothing."""
    starts, ends = np.asarray(steps.starts), np.asarray(steps.ends)
    starts, ends = starts[ends > starts], ends[ends > starts]
    # Recurrent evaluation costs the same for many sequences as for few where there is an accelerator.
    size = size or (16 if jax.default_backend() == "cpu" else 96)
    size = min(size, len(starts))
    order = np.argsort(starts - ends, kind="stable")
    longest = int((ends - starts).max())
    length = -(-longest // 64) * 64
    for first in range(0, len(order), size):
        part = order[first : first + size]
        begin = np.zeros(size, np.int32)
        stop = np.zeros(size, np.int32)
        begin[: len(part)], stop[: len(part)] = starts[part], ends[part]
        yield cut(steps, jnp.asarray(begin), jnp.asarray(stop), length, config)


@functools.partial(jax.jit, static_argnames=("length", "config"))
def cut(steps: Steps, begin: Array, stop: Array, length: int, config: PredictorConfig) -> Batch:
    return window(steps, begin, stop, length, config)


@functools.lru_cache
def graph_of(config: PredictorConfig) -> Any:
    """The static part of a `Predictor`, without making its weights."""
    return nnx.split(nnx.eval_shape(lambda: Predictor(config, rngs=nnx.Rngs(0))), nnx.Param)[0]


def params_of(config: PredictorConfig, weights: dict[str, Any]) -> Any:
    """The trainable state that holds these weights."""
    model = Predictor(config, rngs=nnx.Rngs(0))
    model.load({name: value for name, value in weights.items() if name not in BESIDE})
    return nnx.state(model, nnx.Param)


@functools.partial(jax.jit, static_argnames=("config", "bfloat16"))
def forecast(config: PredictorConfig, params: Any, batch: Batch, bfloat16: bool = False) -> Outputs:
    model = nnx.merge(graph_of(config), params)
    return model(batch.inputs, valid=batch.valid, dtype=jnp.bfloat16 if bfloat16 else jnp.float32)[0]


@functools.partial(jax.jit, static_argnames=("config", "trigger"))
def refined(config: PredictorConfig, params: Any, batch: Batch, outputs: Outputs, trigger: int) -> Array:
    """Logits refined at a trigger layer, with the routing of the layers below it known."""
    model = nnx.merge(graph_of(config), params)
    below = jnp.arange(config.keys) < trigger * config.experts
    return model.refine(outputs.hidden, outputs.next, jnp.where(below, batch.target, 0))


def recall_of(
    config: PredictorConfig, params: Any, steps: Steps, *, trigger: int | None = None, bfloat16: bool = False
) -> tuple[Hits, Hits]:
    """Hits of the next-step forecast and of the refined one (meaningful from the trigger layer on)."""
    trigger = config.layers // 2 if trigger is None else trigger
    plain = after = None
    for batch in batches(steps, config):
        outputs = forecast(config, params, batch, bfloat16)
        target = batch.target.reshape(outputs.next.shape)
        mask = batch.scored
        found = hits_jit(outputs.next, target, mask, config.active)
        again = hits_jit(refined(config, params, batch, outputs, trigger), target, mask, config.active)
        plain = found if plain is None else plain + found
        after = again if after is None else after + again
    assert plain is not None
    assert after is not None
    return plain, after


hits_jit = jax.jit(hits, static_argnames=("active",))


def validate(config: PredictorConfig, params: Any, steps: Steps, bfloat16: bool = False) -> dict[str, float]:
    """Recall at K + 3: of the next step, and of the layers above L/2 once refined there (as if L/2 were not known)."""
    plain, after = recall_of(config, params, steps, bfloat16=bfloat16)
    above = slice(config.layers // 2 + 1, None) if config.layers > 2 else slice(-1, None)
    return {
        "next": float(plain.recall(config.active)[3].mean()),
        "refined": float(after.recall(config.active)[3][above].mean()),
        "unrefined": float(plain.recall(config.active)[3][above].mean()),
    }
