"""Arithmetic that every implementation of the expert kernels shares, so that all round at the same points."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.layout import FP8, FP8_BLOCK, ExpertLayout


def swiglu(gate: Float32[Array, "..."], up: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`silu(gate) * up` in float32, written out so that it is the same operations in every lowering."""
    return gate / (1.0 + jnp.exp(-gate)) * up


def hidden_dtype(x: Float[Array, "..."]) -> jnp.dtype:
    """Dtype that `swiglu` is rounded to before the down projection: bf16 for bf16 `x`, else float32."""
    return jnp.dtype(jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32)


def is_fp8(layout: ExpertLayout) -> bool:
    return layout.field("gate").dtype == FP8


def sizes(layout: ExpertLayout) -> tuple[int, int]:
    """(H, F) of the expert."""
    width, hidden = layout.field("gate").shape
    return hidden, width


def unpack_weight(block: Shaped[Array, " n"], layout: ExpertLayout, name: str) -> Float32[Array, "rows cols"]:
    """A matrix of one expert in float32; FP8 values times the scale of their 128 x 128 block."""
    weight = layout.unpack(block, name).astype(jnp.float32)
    if not is_fp8(layout):
        return weight
    rows, cols = weight.shape
    scale = layout.unpack(block, f"{name}_scale")
    # The last blocks may be ragged: repeat to whole blocks, then cut.
    scale = jnp.repeat(jnp.repeat(scale, FP8_BLOCK, axis=0)[:rows], FP8_BLOCK, axis=1)[:, :cols]
    return weight * scale
