"""Masked loads, stores and counts of the Triton kernels. A mask of None stands for one that holds everywhere."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int, Shaped

Ref = Any  # Pallas has no public type for references.
Scalar = Int[Array, ""] | int

OUTSIDE = 1 << 30  # index of what is masked off


def bound(start: Scalar, block: int, size: int) -> Bool[Array, " block"] | None:
    """Which of `block` positions from `start` lie below `size`; None if all are sure to."""
    if isinstance(start, int):
        if start + block <= size:
            return None
    elif size % block == 0:
        return None
    return start + jnp.arange(block, dtype=jnp.int32) < size


def both(
    rows: Bool[Array, " R"] | None, cols: Bool[Array, " C"] | None, shape: tuple[int, int]
) -> Bool[Array, "R C"] | None:
    """The mask of a tile from those of its rows and columns."""
    masks = []
    if rows is not None:
        masks.append(jnp.broadcast_to(rows[:, None], shape))
    if cols is not None:
        masks.append(jnp.broadcast_to(cols[None, :], shape))
    if len(masks) == 2:
        return masks[0] & masks[1]
    return masks[0] if masks else None


def load(ref: Ref, mask: Bool[Array, "..."] | None) -> Shaped[Array, "..."]:
    """A load that reads zeros, and touches no memory, where the mask is false."""
    if mask is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def all_of(masks: list[Bool[Array, "..."] | None], shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
    """Where all masks hold that there are."""
    given = [mask for mask in masks if mask is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, given), shape) if given else None


def count(mask: Array) -> Int[Array, ""]:
    return jnp.sum(mask.astype(jnp.int32))


def gather(ref: Ref, index: Int[Array, " N"], mask: Array, other: int | float = -1) -> Array:
    """`ref[index]`, `other` where masked off."""
    return plgpu.load(ref.at[jnp.where(mask, index, 0)], mask=mask, other=other)


def scatter(ref: Ref, index: Int[Array, " N"], value: Array, mask: Array) -> None:
    """`ref[index] = value` where the mask holds; the others point outside, so that they hit nothing anywhere."""
    plgpu.store(ref.at[jnp.where(mask, index, OUTSIDE)], value, mask=mask)
