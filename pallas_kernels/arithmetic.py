"""Arithmetic in plain XLA that references and models share: products summed in float32, a softmax with sinks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def einsum(formula: str, *operands: Array) -> Float32[Array, "..."]:
    """Products of activations' dtype, summed in float32."""
    # Without this a GPU multiplies float32 in TF32, which has 10 bits of mantissa.
    precision = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(formula, *operands, precision=precision, preferred_element_type=jnp.float32)


def linear(
    x: Float[Array, "*batch i"],
    w: Float[Array, "o i"],
    bias: Float[Array, " o"] | None = None,
    *,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "*batch o"]:
    """x W^T + b, the orientation of checkpoints; rounded once, to the dtype of `x` by default."""
    y = einsum("...i,oi->...o", x, w)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(dtype or x.dtype)


def softmax(
    scores: Float32[Array, "B *heads T C"], sinks: Float[Array, "*heads"] | None = None
) -> Float32[Array, "B *heads T C"]:
    """Softmax over the last axis; where there are sinks, one more score per head takes its share away."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(jnp.float32)[..., None, None]
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    powers = jnp.exp(scores - peak)
    return powers / (powers.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak))
