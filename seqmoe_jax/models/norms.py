"""RMS norms. They share a formula and differ in where they round, and in whether the weight is centred on zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from seqmoe_jax.models.tensors import Tensor


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """`x * rsqrt(mean(x^2) + eps)` in float32, times a weight.

    rounding: "early" rounds to the activations' dtype before the weight multiplies (Llama, Qwen, DeepSeek in
        transformers); "late" after (GPT-OSS).
    zero_centered: `1 + weight` multiplies instead of the weight itself (Qwen3-Next); then always rounded late.
    """

    eps: float
    rounding: Literal["early", "late"] = "early"
    zero_centered: bool = False

    def tensor(self, size: int) -> Tensor:
        return Tensor(shape=(size,), init="zeros" if self.zero_centered else "ones")

    def __call__(self, x: Float[Array, "*batch d"], weight: Float[Array, " d"]) -> Float[Array, "*batch d"]:
        x32 = x.astype(jnp.float32)
        return self.scaled(x32, jnp.mean(x32 * x32, axis=-1, keepdims=True), weight, x.dtype)

    def scaled(
        self,
        x: Float32[Array, "*batch d"],
        mean_square: Float32[Array, "..."],
        weight: Float[Array, "..."],
        dtype: jnp.dtype,
    ) -> Float[Array, "*batch d"]:
        """The norm of `x` of which the mean square is known, in `dtype`. Kernels use it too."""
        normed = x * lax.rsqrt(mean_square + self.eps)
        if self.zero_centered:
            return (normed * (1.0 + weight.astype(jnp.float32))).astype(dtype)
        if self.rounding == "late":
            return (normed * weight.astype(jnp.float32)).astype(dtype)
        return weight.astype(dtype) * normed.astype(dtype)
