"""Tiles of an expert's matrices, scales and biases, in any format, as the Triton kernels load and use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float32, Int, Shaped, UInt8

from pallas_kernels.fused_moe.config import Fp8Mode
from pallas_kernels.fused_moe.dequantize import fp4_units, fp8_unit, fp8_units, weight_values
from pallas_kernels.fused_moe.swiglu import FP4_UNIT, powers_of_two
from pallas_kernels.layout import FP4, FP4_BLOCK, FP8, FP8_BLOCK, ExpertLayout
from pallas_kernels.masks import Ref, Scalar, all_of, bound, load

FP4_WORD = 4  # bytes of FP4 that a thread reads at once; they meet the 16 bytes that it reads of a 16-bit vector


def load_by_row(
    slots_ref: Ref,
    slots: Int[Array, " N"],
    active: Bool[Array, " N"] | None,
    row: Int[Array, ""],
    *,
    layout: ExpertLayout,
    name: str,
    rows: int,
) -> Float32[Array, "rows N"]:
    """Elements `row : row + rows` of a field with one number per row of a matrix (biases, scales by channel) of the
    experts in `slots`; zeros beyond it and where not `active`."""
    field = layout.field(name)
    parts = field.dtype.itemsize // layout.storage.itemsize  # stored integers per element
    below = bound(row, rows, field.shape[0])
    shape = (rows, *slots.shape, parts)
    index = layout.start(field.name) + parts * (row + jnp.arange(rows, dtype=jnp.int32))
    index = jnp.broadcast_to(_along(index, 0, 3) + jnp.arange(parts, dtype=jnp.int32)[None, None], shape)
    masks = [None if below is None else _along(below, 0, 3), None if active is None else _along(active, 1, 3)]
    stored = load(slots_ref.at[jnp.broadcast_to(_along(slots, 1, 3), shape), index], all_of(masks, shape))
    shifts = 8 * layout.storage.itemsize * jnp.arange(parts, dtype=jnp.uint32)[None, None, :]
    words = jnp.sum(stored.astype(jnp.uint32) << shifts, axis=2, dtype=jnp.uint32)
    words = words.astype(f"uint{8 * field.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(words, jnp.dtype(field.dtype)).astype(jnp.float32)


class Bits(NamedTuple):
    """What is loaded of a part, as stored."""

    values: Shaped[Array, "rows N ..."]
    # By block: [N, blocks, parts], the parts of a float32; FP4: [rows, N, blocks, words], the same for all words of one
    scales: Shaped[Array, "..."] | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """`rows` x `cols` of one matrix, from (`row`, `col`) on, of N experts: how the decode kernels read any format.

    Loading is apart from using, so that a program may ask for everything first. The columns of FP8 and of scales by
    block have two dimensions, blocks and positions in them, and `rows` lie in one row of blocks. Those of FP4 have
    three: blocks, words of four bytes, and bytes, each of which has two numbers and meets two elements of a vector.
    ScaleKind by channel are of whole rows, so whoever sums a row multiplies it.
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
        if self.layout.dtype == FP4:
            return _numbered(self.col // 2, (self.cols // FP4_BLOCK, FP4_BLOCK // 2 // FP4_WORD, FP4_WORD))
        if self.layout.dtype == FP8 or self.layout.scales == "block":
            return _numbered(self.col, (self.cols // FP8_BLOCK, FP8_BLOCK))
        return _numbered(self.col, (self.cols,))

    @property
    def elements(self) -> Int[Array, "..."]:
        """Index of every element of a vector that meets the columns."""
        if self.layout.dtype != FP4:
            return self.columns
        return _numbered(self.col, (self.cols // FP4_BLOCK, FP4_BLOCK // 2 // FP4_WORD, 2 * FP4_WORD))

    def inside(self, index: Int[Array, "..."], *, per_column: int = 1) -> Bool[Array, "..."] | None:
        """Which of the columns, or elements if a column meets several, the matrix has; None for all."""
        width, numbers = self.layout.field(self.name).shape[1], 2 if self.layout.dtype == FP4 else 1
        return None if self.col + self.cols <= numbers * width else index < per_column * width

    def load(self, slots_ref: Ref, slots: Int[Array, " N"], active: Bool[Array, " N"] | None) -> Bits:
        """The part of the experts in `slots`; zeros beyond the matrix and, without a read, where not `active`."""
        height, width = self.layout.field(self.name).shape
        columns = self.columns
        inside, rank = self.inside(columns), columns.ndim
        rows = self.row + jnp.arange(self.rows, dtype=jnp.int32)
        shape = (self.rows, *slots.shape, *columns.shape)
        index = self.layout.start(self.name) + _along(rows * width, 0, 2 + rank) + columns[None, None]
        index = jnp.broadcast_to(index, shape)
        if rank > 1:
            # So that a thread has the columns that meet what it has of a 16-bit vector, which is eight elements.
            index = plgpu.max_contiguous(index, (*[1] * (rank + 1), FP4_WORD if self.layout.dtype == FP4 else 8))
        below = bound(self.row, self.rows, height)
        mask = all_of(
            [
                None if below is None else _along(below, 0, 2 + rank),
                None if active is None else _along(active, 1, 2 + rank),
                None if inside is None else inside[None, None],
            ],
            shape,
        )
        where = slots_ref.at[jnp.broadcast_to(_along(slots, 1, 2 + rank), shape), index]
        values = load(where, mask)
        if self.layout.scales == "block":
            return Bits(values, self._load_block_scales(slots_ref, slots, active))
        return Bits(values, self._load_fp4_scales(slots_ref, slots, active) if self.layout.dtype == FP4 else None)

    def _load_fp4_scales(
        self, slots_ref: Ref, slots: Int[Array, " N"], active: Bool[Array, " N"] | None
    ) -> UInt8[Array, "rows N blocks words"]:
        """The scale of each block of each row, for every word of the block: where it is multiplied it need not move."""
        field = self.layout.field(f"{self.name}_scale")
        first, count = self.col // FP4_BLOCK, self.cols // FP4_BLOCK
        rows, blocks = (jnp.arange(size, dtype=jnp.int32) for size in (self.rows, count))
        shape = (self.rows, *slots.shape, count, FP4_BLOCK // 2 // FP4_WORD)
        index = field.offset + _along((self.row + rows) * field.shape[1], 0, 4) + _along(first + blocks, 2, 4)
        index = plgpu.max_contiguous(jnp.broadcast_to(index, shape), (1, 1, 1, 1))
        below, inside = bound(self.row, self.rows, field.shape[0]), bound(first, count, field.shape[1])
        masks = [
            None if below is None else _along(below, 0, 4),
            None if active is None else _along(active, 1, 4),
            None if inside is None else _along(inside, 2, 4),
        ]
        where = slots_ref.at[jnp.broadcast_to(_along(slots, 1, 4), shape), index]
        return load(where, all_of(masks, shape))

    def _load_block_scales(
        self, slots_ref: Ref, slots: Int[Array, " N"], active: Bool[Array, " N"] | None
    ) -> Shaped[Array, "N blocks parts"]:
        """The parts, as stored, of the scale of each block: one 32-bit load a block."""
        field, parts = self.layout.field(f"{self.name}_scale"), 4 // self.layout.storage.itemsize
        first, count, per_row = self.col // FP8_BLOCK, self.cols // FP8_BLOCK, field.shape[1]
        block = first + jnp.arange(count, dtype=jnp.int32)
        offset = parts * (jax.lax.div(self.row, jnp.int32(FP8_BLOCK)) * per_row + block)
        offset += self.layout.start(field.name)
        shape = (*slots.shape, count, parts)
        index = jnp.broadcast_to(_along(offset, 1, 3) + jnp.arange(parts, dtype=jnp.int32)[None, None], shape)
        inside = bound(first, count, per_row)
        masks = [
            None if active is None else _along(active, 0, 3),
            None if inside is None else _along(inside, 1, 3),
        ]
        return load(slots_ref.at[jnp.broadcast_to(_along(slots, 0, 3), shape), index], all_of(masks, shape))

    def vector(self, ref: Ref, rows: Int[Array, " N"], active: Bool[Array, " N"] | None) -> Float32[Array, "N ..."]:
        """The elements of `ref[rows]` that meet these columns; zeros where not `active`."""
        elements = self.elements
        inside = self.inside(elements, per_column=2 if self.layout.dtype == FP4 else 1)
        rank, shape = 1 + elements.ndim, (*rows.shape, *elements.shape)
        masks = [None if active is None else _along(active, 0, rank), None if inside is None else inside[None]]
        where = ref.at[jnp.broadcast_to(_along(rows, 0, rank), shape), jnp.broadcast_to(elements[None], shape)]
        return load(where, all_of(masks, shape)).astype(jnp.float32)

    def times(
        self,
        bits: Bits,
        vector: Float32[Array, "N ..."],
        factor: Float32[Array, " N"] | None,
        *,
        mode: Fp8Mode,
        inline: bool,
    ) -> Float32[Array, "rows N ..."]:
        """Each element times that of the vector, times `factor`; for FP4 the sums of every word.

        What can goes onto the vector: once for all rows. FP4 has scales per row: they go onto the sums.
        """
        if self.layout.dtype == FP4:
            assert bits.scales is not None
            values = fp4_units(bits.values, inline=inline).reshape(*bits.scales.shape, -1)
            unit = FP4_UNIT if factor is None else FP4_UNIT * _along(factor, 1, 4)
            return jnp.sum(values * vector[None], axis=-1) * (powers_of_two(bits.scales) * unit)
        if self.layout.dtype == FP8:
            values, unit = fp8_units(bits.values, mode, inline=inline), fp8_unit(mode)
        else:
            values, unit = weight_values(bits.values, self.layout, self.name), 1.0
        if bits.scales is not None:
            itemsize = self.layout.storage.itemsize
            shifts = 8 * itemsize * jnp.arange(4 // itemsize, dtype=jnp.uint32)[None, None, :]
            words = jnp.sum(bits.scales.astype(jnp.uint32) << shifts, axis=2, dtype=jnp.uint32)
            scales = jax.lax.bitcast_convert_type(words, jnp.float32)
            vector = vector * (scales * (unit if factor is None else unit * factor[:, None]))[:, :, None]
        elif factor is not None:
            vector = vector * _along(factor if unit == 1 else unit * factor, 0, vector.ndim)
        elif unit != 1:
            vector = vector * unit
        return values.astype(jnp.float32) * vector[None]


def _numbered(first: int, shape: tuple[int, ...]) -> Int[Array, "..."]:
    """`first`, `first` + 1, ... in an array of this shape."""
    index, stride = jnp.int32(first), 1
    for axis, size in reversed(list(enumerate(shape))):
        index = index + stride * _along(jnp.arange(size, dtype=jnp.int32), axis, len(shape))
        stride *= size
    return index


def _along(vector: Shaped[Array, " N"], axis: int, rank: int) -> Shaped[Array, "..."]:
    """The vector as an array of `rank` dimensions, of size 1 but along `axis`."""
    return vector[tuple(slice(None) if i == axis else None for i in range(rank))]


def load_scale(
    slots_ref: Ref, slot: Scalar, layout: ExpertLayout, name: str, row_block: Scalar, col_block: Scalar
) -> Float32[Array, ""]:
    """One scale by block, by a load of each of its parts."""
    field, itemsize = layout.field(f"{name}_scale"), layout.storage.itemsize
    offset = layout.start(field.name) + 4 // itemsize * (row_block * field.shape[1] + col_block)
    word = slots_ref[slot, offset].astype(jnp.uint32)
    for part in range(1, 4 // itemsize):
        word = word | (slots_ref[slot, offset + part].astype(jnp.uint32) << (8 * itemsize * part))
    return jax.lax.bitcast_convert_type(word, jnp.float32)
