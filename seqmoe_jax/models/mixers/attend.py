"""What the kinds of softmax attention share: queries a block at a time, and the softmax with a sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

QUERY_BLOCK = 256  # queries scored at once in prefill: bounds the score matrix to [B, N, 256, C]


def in_query_blocks(attend: Callable[..., Float[Array, "B t *out"]], *queries: Any) -> Float[Array, "B T *out"]:
    """`attend` over blocks of axis 1 of `queries` (pytrees of `[B, T, ...]`: the queries and what goes with each)."""
    length = jax.tree.leaves(queries)[0].shape[1]
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return attend(*queries)

    def split(array: Float[Array, "B T *item"]) -> Float[Array, "n B t *item"]:
        return array.reshape(array.shape[0], -1, QUERY_BLOCK, *array.shape[2:]).swapaxes(0, 1)

    out = lax.map(lambda block: attend(*block), jax.tree.map(split, queries)).swapaxes(0, 1)
    return out.reshape(out.shape[0], length, *out.shape[3:])


def softmax(
    scores: Float32[Array, "B *heads T C"], sinks: Float[Array, "*heads"] | None = None
) -> Float32[Array, "B *heads T C"]:
    """Softmax over the last axis. With sinks, one more score per head takes part in it and its weight is dropped."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(jnp.float32)[..., None, None]
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    powers = jnp.exp(scores - peak)
    return powers / (powers.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak))
