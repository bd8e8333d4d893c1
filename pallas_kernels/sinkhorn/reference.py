"""Sinkhorn and Knopp's iteration in plain JAX: the meaning of the kernel."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float32


def sinkhorn(logits: Float32[Array, "N S S"], *, iterations: int, eps: float) -> Float32[Array, "N S S"]:
    """See `sinkhorn.api`."""

    def columns(c: Float32[Array, "N S S"]) -> Float32[Array, "N S S"]:
        return c / (c.sum(axis=-2, keepdims=True) + eps)

    def both(_: Any, c: Float32[Array, "N S S"]) -> Float32[Array, "N S S"]:
        return columns(c / (c.sum(axis=-1, keepdims=True) + eps))

    return lax.fori_loop(0, iterations - 1, both, columns(jax.nn.softmax(logits, axis=-1) + eps))
