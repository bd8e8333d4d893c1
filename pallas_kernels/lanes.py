"""Helpers of the Triton kernels that manage tables: one program whose vectors are lanes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

OUTSIDE = 1 << 30  # index of lanes that are masked off


def count(mask: Array) -> Int[Array, ""]:
    return jnp.sum(mask.astype(jnp.int32))


def gather(ref: Any, index: Int[Array, " N"], mask: Array, other: int | float = -1) -> Array:
    """`ref[index]`, `other` where masked off."""
    return plgpu.load(ref.at[jnp.where(mask, index, 0)], mask=mask, other=other)


def scatter(ref: Any, index: Int[Array, " N"], value: Array, mask: Array) -> None:
    """`ref[index] = value` where the mask holds; the others point outside, so that they hit nothing anywhere."""
    plgpu.store(ref.at[jnp.where(mask, index, OUTSIDE)], value, mask=mask)
