"""What the Triton kernels share: views of the slots, loads with masks, values and scales of FP8 and FP4, biases."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped, UInt8

from pallas_kernels.fused_moe.config import Fp8Mode
from pallas_kernels.fused_moe.swiglu import fp4_values, powers_of_two
from pallas_kernels.layout import FP4, FP4_BLOCK, FP8, FP8_BLOCK, ExpertLayout

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


def _all(masks: list[Bool[Array, "..."] | None], shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
    """Where all masks hold that there are."""
    given = [mask for mask in masks if mask is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, given), shape) if given else None


def load_bias(
    slots_ref: Ref,
    slots: Int[Array, " N"],
    active: Bool[Array, " N"] | None,
    row: Int[Array, ""],
    *,
    layout: ExpertLayout,
    name: str,
    rows: int,
) -> Float32[Array, "rows N"]:
    """Elements `row : row + rows` of a bias of the experts in `slots`; zeros beyond it and where not `active`."""
    field = layout.field(f"{name}_bias")
    parts = field.dtype.itemsize // layout.storage.itemsize  # stored integers per element
    below = bound(row, rows, field.shape[0])
    shape = (rows, *slots.shape, parts)
    index = layout.start(field.name) + parts * (row + jnp.arange(rows, dtype=jnp.int32))
    index = jnp.broadcast_to(_along(index, 0, 3) + jnp.arange(parts, dtype=jnp.int32)[None, None], shape)
    masks = [None if below is None else _along(below, 0, 3), None if active is None else _along(active, 1, 3)]
    stored = load(slots_ref.at[jnp.broadcast_to(_along(slots, 1, 3), shape), index], _all(masks, shape))
    shifts = 8 * layout.storage.itemsize * jnp.arange(parts, dtype=jnp.uint32)[None, None, :]
    words = jnp.sum(stored.astype(jnp.uint32) << shifts, axis=2, dtype=jnp.uint32)
    words = words.astype(f"uint{8 * field.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(words, jnp.dtype(field.dtype)).astype(jnp.float32)


class Bits(NamedTuple):
    """What is loaded of a part, as stored."""

    values: Shaped[Array, "rows N ..."]
    scales: UInt8[Array, "..."] | None  # FP8: [N, blocks, 4], the bytes of a float32; FP4: [rows, N, blocks]


@dataclass(frozen=True, kw_only=True)
class Part:
    """`rows` x `cols` of one matrix, from (`row`, `col`) on, of N experts: how the decode kernels read any format.

    Loading is apart from using, so that a program may ask for everything first. The columns of FP8 and FP4 matrices
    have two dimensions, blocks of a common scale and positions in them; for FP8, `rows` lie in one row of blocks.
    A stored column of FP4 is a byte with two numbers, so it meets two elements of a vector.
    """

    layout: ExpertLayout
    name: str
    row: Int[Array, ""]
    col: int
    rows: int
    cols: int

    @property
    def columns(self) -> Int[Array, "..."]:
        """Index of every stored column."""
        packed = 2 if self.layout.dtype == FP4 else 1
        first, count = self.col // packed, self.cols // packed
        block = {FP8: FP8_BLOCK, FP4: FP4_BLOCK // packed}.get(self.layout.dtype)
        if block is None:
            return first + jnp.arange(count, dtype=jnp.int32)
        starts = first + block * jnp.arange(count // block, dtype=jnp.int32)
        return starts[:, None] + jnp.arange(block, dtype=jnp.int32)[None, :]

    @property
    def inside(self) -> Bool[Array, "..."] | None:
        """Which stored columns the matrix has; None for all."""
        width = self.layout.field(self.name).shape[1]
        end = (self.col + self.cols) // (2 if self.layout.dtype == FP4 else 1)
        return None if end <= width else self.columns < width

    def load(self, slots_ref: Ref, slots: Int[Array, " N"], active: Bool[Array, " N"] | None) -> Bits:
        """The part of the experts in `slots`; zeros beyond the matrix and, without a read, where not `active`."""
        height, width = self.layout.field(self.name).shape
        columns, inside, rank = self.columns, self.inside, self.columns.ndim
        rows = self.row + jnp.arange(self.rows, dtype=jnp.int32)
        shape = (self.rows, *slots.shape, *columns.shape)
        index = self.layout.start(self.name) + _along(rows * width, 0, 2 + rank) + columns[None, None]
        index = jnp.broadcast_to(index, shape)
        if rank == 2:
            # Bytes too are read eight at a time: a thread then has the columns that it has of a 16-bit vector.
            index = plgpu.max_contiguous(index, (1, 1, 1, 8))
        below = bound(self.row, self.rows, height)
        mask = _all(
            [
                None if below is None else _along(below, 0, 2 + rank),
                None if active is None else _along(active, 1, 2 + rank),
                None if inside is None else inside[None, None],
            ],
            shape,
        )
        where = slots_ref.at[jnp.broadcast_to(_along(slots, 1, 2 + rank), shape), index]
        values = load(where, mask)
        scales = {FP8: self._load_fp8_scales, FP4: self._load_fp4_scales}.get(self.layout.dtype)
        return Bits(values, scales and scales(slots_ref, slots, active))

    def _load_fp4_scales(
        self, slots_ref: Ref, slots: Int[Array, " N"], active: Bool[Array, " N"] | None
    ) -> UInt8[Array, "rows N blocks"]:
        """The scale of each block of each row."""
        field = self.layout.field(f"{self.name}_scale")
        first, count = self.col // FP4_BLOCK, self.cols // FP4_BLOCK
        rows, blocks = (jnp.arange(size, dtype=jnp.int32) for size in (self.rows, count))
        shape = (self.rows, *slots.shape, count)
        index = field.offset + _along((self.row + rows) * field.shape[1], 0, 3) + _along(first + blocks, 2, 3)
        below, inside = bound(self.row, self.rows, field.shape[0]), bound(first, count, field.shape[1])
        masks = [
            None if below is None else _along(below, 0, 3),
            None if active is None else _along(active, 1, 3),
            None if inside is None else _along(inside, 2, 3),
        ]
        where = slots_ref.at[jnp.broadcast_to(_along(slots, 1, 3), shape), jnp.broadcast_to(index, shape)]
        return load(where, _all(masks, shape))

    def _load_fp8_scales(
        self, slots_ref: Ref, slots: Int[Array, " N"], active: Bool[Array, " N"] | None
    ) -> UInt8[Array, "N blocks 4"]:
        """The bytes of the scale of each block: one 32-bit load a block."""
        field = self.layout.field(f"{self.name}_scale")
        first, count, per_row = self.col // FP8_BLOCK, self.cols // FP8_BLOCK, field.shape[1]
        block = first + jnp.arange(count, dtype=jnp.int32)
        offset = field.offset + 4 * (jax.lax.div(self.row, jnp.int32(FP8_BLOCK)) * per_row + block)
        shape = (*slots.shape, count, 4)
        index = jnp.broadcast_to(_along(offset, 1, 3) + jnp.arange(4, dtype=jnp.int32)[None, None], shape)
        inside = bound(first, count, per_row)
        masks = [
            None if active is None else _along(active, 0, 3),
            None if inside is None else _along(inside, 1, 3),
        ]
        return load(slots_ref.at[jnp.broadcast_to(_along(slots, 0, 3), shape), index], _all(masks, shape))

    def vectors(
        self, ref: Ref, rows: Int[Array, " N"], active: Bool[Array, " N"] | None
    ) -> tuple[Float32[Array, "N ..."], ...]:
        """The elements of `ref[rows]` that meet these columns, for FP4 the even ones and the odd ones; zeros where not
        `active`."""
        columns, inside = self.columns, self.inside
        rank, shape = 1 + columns.ndim, (*rows.shape, *columns.shape)
        masks = [None if active is None else _along(active, 0, rank), None if inside is None else inside[None]]
        mask, row = _all(masks, shape), jnp.broadcast_to(_along(rows, 0, rank), shape)
        which = (2 * columns, 2 * columns + 1) if self.layout.dtype == FP4 else (columns,)
        return tuple(load(ref.at[row, jnp.broadcast_to(w[None], shape)], mask).astype(jnp.float32) for w in which)

    def times(
        self,
        bits: Bits,
        vectors: tuple[Float32[Array, "N ..."], ...],
        factor: Float32[Array, " N"] | None,
        mode: Fp8Mode,
    ) -> Float32[Array, "rows N ..."]:
        """Each element times that of the vector (for FP4, the sum of the two of a byte), times `factor`.

        What can goes onto the vector: once for all rows. FP4 has scales per row: they go onto the sums of two.
        """
        if self.layout.dtype == FP4:
            assert bits.scales is not None
            if factor is not None:
                vectors = tuple(vector * _along(factor, 0, vector.ndim) for vector in vectors)
            both = fp4_values(bits.values) * vectors[0][None] + fp4_values(bits.values >> 4) * vectors[1][None]
            return both * powers_of_two(bits.scales)[:, :, :, None]
        (vector,) = vectors
        if bits.scales is None:
            vector = vector if factor is None else vector * _along(factor, 0, vector.ndim)
            return weight_values(bits.values, self.layout, self.name).astype(jnp.float32) * vector[None]
        shifts = 8 * jnp.arange(4, dtype=jnp.uint32)[None, None, :]
        words = jnp.sum(bits.scales.astype(jnp.uint32) << shifts, axis=2, dtype=jnp.uint32)
        scales = jax.lax.bitcast_convert_type(words, jnp.float32)
        scales = scales if factor is None else scales * factor[:, None]
        return fp8_values(bits.values, mode).astype(jnp.float32) * (vector * scales[:, :, None])[None]


def _along(vector: Shaped[Array, " N"], axis: int, rank: int) -> Shaped[Array, "..."]:
    """The vector as an array of `rank` dimensions, of size 1 but along `axis`."""
    return vector[tuple(slice(None) if i == axis else None for i in range(rank))]


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
