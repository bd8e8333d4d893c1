"""`matvec` in plain XLA: the oracle of the kernel, and what runs on CPU and older GPUs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.arithmetic import linear
from pallas_kernels.matvec.config import Product
from pallas_kernels.norm import Norm


def matvec(
    x: Float[Array, "B I"],
    w: Float[Array, "O I"],
    *,
    bias: Float[Array, " O"] | None,
    norm: Norm | None,
    norm_weight: Float[Array, " I"] | None,
    residual: Float[Array, "B O"] | None,
    residual_scale: float,
    addend: Float32[Array, "B I"] | None,
    dtype: jnp.dtype,
) -> Product:
    """See `matvec.api`."""
    x = x if addend is None else x + addend.astype(x.dtype)
    normed = x
    if norm is not None:
        assert norm_weight is not None
        normed = norm(x, norm_weight)
    out = linear(normed, w, bias, dtype=dtype)
    if residual is not None:
        out = residual + (out if residual_scale == 1 else out * jnp.asarray(residual_scale, out.dtype))
    return Product(out, normed, x)
