"""RMS norms. They share a formula and differ in where they round, and in what the weight is centred on."""

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
    centre: 1 where the weight itself multiplies; 0 where `1 + weight` does (Qwen3-Next), always rounded late.
    """

    eps: float
    rounding: Literal["early", "late"] = "early"
    centre: Literal[0, 1] = 1

    def tensor(self, size: int) -> Tensor:
        return Tensor(shape=(size,), init="ones" if self.centre else "zeros")

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
        if not self.centre:
            return (normed * (1.0 + weight.astype(jnp.float32))).astype(dtype)
        if self.rounding == "late":
            return (normed * weight.astype(jnp.float32)).astype(dtype)
        return weight.astype(dtype) * normed.astype(dtype)
