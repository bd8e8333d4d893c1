"""What kernels and their references must know of a norm. Norms themselves are the model's."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


@runtime_checkable
class Norm(Protocol):
    """A frozen description of an RMS norm; hashable."""

    def __call__(self, x: Float[Array, "*batch d"], weight: Float[Array, " d"]) -> Float[Array, "*batch d"]:
        """`x` normed over its last axis and weighted, in the dtype of `x`."""

    def scaled(
        self,
        x: Float32[Array, "..."],
        mean_square: Float32[Array, "..."],
        weight: Float[Array, "..."],
        dtype: jnp.dtype,
    ) -> Float[Array, "..."]:
        """`x`, of which the mean square is known, normed, weighted, and rounded to `dtype` as the norm rounds. Of
        operations that every lowering has."""
