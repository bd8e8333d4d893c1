"""What the Triton kernels share: views of the slots, loads with masks, FP8 values and their scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped, UInt8

from pallas_kernels.fused_moe.config import Fp8Mode
from pallas_kernels.layout import FP8, ExpertLayout

Ref = Any  # Pallas has no public type for references.
Scalar = Int[Array, ""] | int


def check_addressable(slots: Shaped[Array, "S n"]) -> None:
    """Raises `ValueError` for slot arrays that JAX's Triton lowering would address wrongly.

    It counts offsets in elements, as signed 32-bit numbers unless the array has more than 2**32 BYTES.
    One-byte arrays between 2 and 4 GiB fall in between: their upper half would be read from below the array.
    """
    elements, nbytes = slots.size, slots.size * slots.dtype.itemsize
    if elements > 2**31 and nbytes <= 2**32:
        fewer = 2**31 // slots.shape[1]
        more = 2**32 // slots.shape[1] + 1
        raise ValueError(
            f"{slots.shape[0]} slots of {slots.shape[1]} {slots.dtype} cannot be addressed by "
            f"by the Triton kernels (one-byte arrays between 2 and 4 GiB): use at most {fewer} or "
            f"at least {more} slots"
        )


def row_view(slots: Shaped[Array, "S n"], layout: ExpertLayout, row: int) -> Shaped[Array, "S rows row"]:
    """The slots as rows of H or of F elements, a free view (see `swiglu_layout`)."""
    if layout.block_elems % row:
        raise ValueError(f"a block of {layout.block_elems} elements is no whole number of rows of {row}")
    return slots.reshape(slots.shape[0], -1, row)


def first_row(layout: ExpertLayout, name: str) -> int:
    """Row at which a matrix starts in the view with rows of its own length."""
    start, row = layout.start(name), layout.field(name).shape[1]
    if start % row:
        raise ValueError(f"expert field {name!r} does not start at a whole row of {row} elements")
    return start // row


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


def span(start: Scalar, block: int, size: int) -> Any:
    """`block` positions from `start`. Pallas rejects static slices beyond `size`, also under a mask."""
    if isinstance(start, int) and start + block > size:
        start = jnp.int32(start)
    return pl.ds(start, block)


def load(ref: Ref, mask: Bool[Array, "..."] | None) -> Shaped[Array, "..."]:
    """A load that reads zeros, and touches no memory, where the mask is false."""
    if mask is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def fp8_values(tile: UInt8[Array, "..."], mode: Fp8Mode) -> Float[Array, "..."]:
    """e4m3 bytes as floats, exactly. `bits` takes the two NaN codes, which weights never hold, for 480."""
    if mode == "convert":
        return jax.lax.bitcast_convert_type(tile, jnp.dtype(FP8))
    # e4m3 is a float16 of a smaller bias: exponent and mantissa in place, the value is 2**8 too small.
    wide = tile.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type(((wide & 0x80) << 8) | ((wide & 0x7F) << 7), jnp.float16)
    return half.astype(jnp.float32) * 256.0


def weight_values(tile: Shaped[Array, "..."], layout: ExpertLayout, name: str) -> Float[Array, "..."]:
    """Stored integers as the floats they are (not for FP8)."""
    return jax.lax.bitcast_convert_type(tile, jnp.dtype(layout.field(name).dtype))


def load_scales(
    bytes_ref: Ref,
    slot: Scalar,
    layout: ExpertLayout,
    name: str,
    row_block: Scalar,
    first: Scalar,
    count: int,
) -> Float32[Array, " count"]:
    """Scales of `count` column blocks from `first` on, of one row of blocks; zeros beyond the last.

    The float32s lie in an array of bytes: four loads, put together little endian.
    """
    field = layout.field(f"{name}_scale")
    per_row = field.shape[1]
    index = jnp.arange(count, dtype=jnp.int32) + first
    mask = bound(first, count, per_row)
    offset = field.offset + 4 * (row_block * per_row + index)
    word = jnp.zeros((count,), jnp.uint32)
    for byte in range(4):
        part = load(bytes_ref.at[slot, offset + byte], mask).astype(jnp.uint32)
        word = word | (part << (8 * byte))
    return jax.lax.bitcast_convert_type(word, jnp.float32)


def load_scale(
    bytes_ref: Ref, slot: Scalar, layout: ExpertLayout, name: str, row_block: Scalar, col_block: Scalar
) -> Float32[Array, ""]:
    """One scale, by four byte loads."""
    field = layout.field(f"{name}_scale")
    offset = field.offset + 4 * (row_block * field.shape[1] + col_block)
    word = bytes_ref[slot, offset].astype(jnp.uint32)
    for byte in range(1, 4):
        word = word | (bytes_ref[slot, offset + byte].astype(jnp.uint32) << (8 * byte))
    return jax.lax.bitcast_convert_type(word, jnp.float32)
