"""Matrices that are stored transposed, for products with one vector at a time.

XLA multiplies a vector by a matrix [in, out] in two launches on a GPU: it writes all products to memory, rounded to the
dtype of the matrix, and then adds them up. From the transposed matrix the same product is one reduction in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_pytree_node_class
class ByRows:
    """A matrix [in, out] that is stored as its transpose [out, in]. It may stand on the right of `@`."""

    def __init__(self, rows: Float[Array, "out in"]):
        self.rows = rows

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def astype(self, dtype: Any) -> ByRows:
        return ByRows(self.rows.astype(dtype))

    def __rmatmul__(self, x: Float[Array, "*B in"]) -> Float[Array, "*B out"]:
        return jnp.einsum("...i,oi->...o", x, self.rows)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.rows,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> ByRows:
        made = object.__new__(cls)
        (made.rows,) = children
        return made


def by_rows(weights: dict[str, Any]) -> dict[str, Any]:
    """The predictor's plain pytree in which every matrix that a vector is multiplied by is stored by rows."""
    # These have two dimensions but no vector is multiplied by them.
    tables = {"token_embed", "token_table", "conv", "odds_scale", "odds_bias", "popularity"}

    def convert(name: str, value: Any) -> Any:
        if name == "blocks":
            return [by_rows(block) for block in value]
        return ByRows(value.T) if value.ndim == 2 and name not in tables else value

    return {name: convert(name, value) for name, value in weights.items()}
