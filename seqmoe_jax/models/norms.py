"""RMS norms. They share a formula and differ in where they round, and in what the weight is centred on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmoe_jax.models.tensors import Tensor


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """`x * rsqrt(mean(x^2) + eps)` in float32, times a weight.

    rounding: "early" rounds to the activations' dtype before the weight multiplies (Llama, Qwen, DeepSeek in
        transformers); "late" after (GPT-OSS).
    centre: 1 where the weight itself multiplies; 0 where `1 + weight` does (Qwen3-Next), always rounded late.
    """

    eps: float
    rounding: Literal["early", "late"] = "early"
    centre: Literal[0, 1] = 1

    def tensor(self, size: int) -> Tensor:
        return Tensor(shape=(size,), init="ones" if self.centre else "zeros")

    def __call__(self, x: Float[Array, "*batch d"], weight: Float[Array, " d"]) -> Float[Array, "*batch d"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        if not self.centre:
            return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
        if self.rounding == "late":
            return (normed * weight.astype(jnp.float32)).astype(x.dtype)
        return weight.astype(x.dtype) * normed.astype(x.dtype)
