"""What the kinds of softmax attention share: queries a block at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Shaped

QUERY_BLOCK = 256  # queries scored at once in prefill: bounds the score matrix to [B, N, 256, C]


def in_query_blocks(attend: Callable[..., Float[Array, "B t *out"]], *queries: Any) -> Float[Array, "B T *out"]:
    """`attend` over blocks of axis 1 of `queries` (pytrees of `[B, T, ...]`: the queries and what goes with each)."""
    length = jax.tree.leaves(queries)[0].shape[1]
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return attend(*queries)

    def split(array: Shaped[Array, "B T *item"]) -> Shaped[Array, "n B t *item"]:
        return array.reshape(array.shape[0], -1, QUERY_BLOCK, *array.shape[2:]).swapaxes(0, 1)

    out = lax.map(lambda block: attend(*block), jax.tree.map(split, queries)).swapaxes(0, 1)
    return out.reshape(out.shape[0], length, *out.shape[3:])
