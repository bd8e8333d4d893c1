"""What a kernel must know of a norm: how a vector follows from its mean square. Norms themselves are the model's."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


@runtime_checkable
class Norm(Protocol):
    """A frozen description of an RMS norm; hashable."""

    def scaled(
        self,
        x: Float32[Array, "..."],
        mean_square: Float32[Array, "..."],
        weight: Float[Array, "..."],
        dtype: jnp.dtype,
    ) -> Float[Array, "..."]:
        """`x` normed, weighted, and rounded to `dtype` as the norm rounds; operations that every lowering has."""
