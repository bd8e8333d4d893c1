"""Arithmetic that every implementation of the expert kernels shares, so that all round at the same points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Float32, Shaped, UInt8

from pallas_kernels.layout import FP4, FP4_BLOCK, FP8_BLOCK, Activation, ExpertLayout


def activate(gate: Float32[Array, "..."], up: Float32[Array, "..."], activation: Activation) -> Float32[Array, "..."]:
    """The activation in float32, written out so that it is the same operations in every lowering."""
    if activation.limit is not None:
        gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    slope = gate if activation.slope == 1 else activation.slope * gate
    return gate / (1.0 + jnp.exp(-slope)) * (up if activation.shift == 0 else up + activation.shift)


def hidden_dtype(x: Float[Array, "..."]) -> jnp.dtype:
    """Dtype that the hidden values are rounded to before the down projection: bf16 for bf16 `x`, else float32."""
    return jnp.dtype(jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32)


FP4_UNIT = 2.0**14


def fp4_halves(codes: UInt8[Array, "..."]) -> Float16[Array, "..."]:
    """e2m1 codes (the low four bits; what is above them is ignored) as floats of 1 / `FP4_UNIT` of their value."""
    # e2m1 is a float16 of a smaller bias: exponent and mantissa in place, the value is 2**14 too small.
    wide = codes.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(((wide & 8) << 12) | ((wide & 7) << 9), jnp.float16)


def fp4_values(codes: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """e2m1 codes as floats, exactly."""
    return fp4_halves(codes).astype(jnp.float32) * FP4_UNIT


def powers_of_two(exponents: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """e8m0 bytes as floats; 2**-127 becomes zero, and 255 (which is no number) infinity."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


def unpack_weight(block: Shaped[Array, " n"], layout: ExpertLayout, name: str) -> Float32[Array, "rows cols"]:
    """A matrix of one expert in float32, scales applied."""
    stored = layout.unpack(block, name)
    if layout.dtype == FP4:
        values = jnp.stack([fp4_values(stored), fp4_values(stored >> 4)], axis=-1).reshape(stored.shape[0], -1)
        scale = powers_of_two(layout.unpack(block, f"{name}_scale"))
        return values * jnp.repeat(scale, FP4_BLOCK, axis=1)
    weight = stored.astype(jnp.float32)
    if layout.scales is None:
        return weight
    rows, cols = weight.shape
    scale = layout.unpack(block, f"{name}_scale")
    if layout.scales == "channel":
        return weight * scale[:, None]
    # The last blocks may be ragged: repeat to whole blocks, then cut.
    scale = jnp.repeat(jnp.repeat(scale, FP8_BLOCK, axis=0)[:rows], FP8_BLOCK, axis=1)[:, :cols]
    return weight * scale
