"""Linear maps as every part of a layer uses them: sums are float32, results have the activations' dtype."""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int


def _precision(x: Array) -> lax.Precision:
    # Without this a GPU multiplies float32 in TF32, which has 10 bits of mantissa.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def einsum(formula: str, *operands: Array) -> Float32[Array, "..."]:
    """Products of activations' dtype, summed in float32."""
    return jnp.einsum(formula, *operands, precision=_precision(operands[0]), preferred_element_type=jnp.float32)


def linear(
    x: Float[Array, "*batch i"], w: Float[Array, "o i"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "*batch o"]:
    """x W^T + b, the orientation of checkpoints; rounded once."""
    y = einsum("...i,oi->...o", x, w)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


State = TypeVar("State")  # a pytree of arrays


def write_barrier(state: State) -> State:
    """A cache or ring that was just written to, before anything reads it.

    Without the barrier XLA writes once for the state and once more inside what reads it, and copies the state for that.
    """
    written: State = lax.optimization_barrier(state)  # type: ignore[no-untyped-call]
    return written


def mask_inactive(ids: Int[Array, "T K"], active: Bool[Array, " T"]) -> Int[Array, "T K"]:
    """-1 for tokens that are padding or whose sequence has ended: they route nowhere and load nothing."""
    return jnp.where(active[:, None], ids, -1)
