"""How one expert lies in memory: the contract between whoever writes expert blocks and the kernels that read them.

An expert is one contiguous block of `block_bytes` bytes, so that moving it never needs to know its format. A
block is an array of `block_elems` unsigned integers; a host pool is `storage[E, n]` per layer, the slot cache
`storage[S, n]`. Integers, because backends rewrite whole arrays of floats they have no arithmetic for (XLA's CPU
backend updates a bf16 array by way of float32). Fields sit at byte offsets inside the block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Shaped

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_BLOCK = 128  # rows and columns that share one scale in FP8-block checkpoints
FP4 = np.dtype(ml_dtypes.float4_e2m1fn)
FP4_BLOCK = 32  # columns that share one scale in MXFP4
ScaleKind = Literal["block", "channel"]  # a float32 scale for 128 x 128 elements of a matrix, or for each row
ALIGNMENT = 128  # bytes; keeps 16-byte loads and whole cache lines for any field


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What stands between an expert's projections: `gate * sigmoid(slope * gate) * (up + shift)`, after the clamps
    `gate <= limit` and `-limit <= up <= limit` where there is a limit. By default `silu(gate) * up`."""

    limit: float | None = None
    slope: float = 1.0
    shift: float = 0.0


SWIGLU = Activation()


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor inside an expert block. `offset` is in bytes from the block's start."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Fields of an expert block. Storage is the unsigned integer as wide as the narrowest field's dtype; a wider field
    is put together from its parts (little endian) where it is read.

    `dtype` is that of the matrices. FP4 has no fields of its own dtype: two numbers share a byte. `scales` says of what
    there is a float32 scale beside them, to be multiplied: always for FP8, for wider dtypes where they hold FP8 values
    among others.
    """

    fields: tuple[Field, ...]
    block_bytes: int
    dtype: np.dtype
    scales: ScaleKind | None = None
    activation: Activation = SWIGLU

    @property
    def storage(self) -> np.dtype:
        """uint8 for FP8 and FP4, uint16 for bf16 and f16, uint32 for f32."""
        return np.dtype(f"uint{8 * min(field.dtype.itemsize for field in self.fields)}")

    @property
    def block_elems(self) -> int:
        """Elements of `storage` in one block: the n of `storage[S, n]`."""
        return self.block_bytes // self.storage.itemsize

    @property
    def hidden(self) -> int:
        """H, the inputs and outputs of the expert."""
        return self.field("down").shape[0]

    @property
    def width(self) -> int:
        """F, its hidden values."""
        return self.field("gate").shape[0]

    @property
    def biased(self) -> bool:
        return any(field.name == "gate_bias" for field in self.fields)

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def start(self, name: str) -> int:
        """First element of a field, counted in `storage` elements."""
        return self.field(name).offset // self.storage.itemsize

    def row_view(self, slots: Shaped[Array, "S n"], row: int) -> Shaped[Array, "S rows row"]:
        """The slots as rows of `row` elements, the stored length of a matrix's rows: a free view (`swiglu_layout`)."""
        if self.block_elems % row:
            raise ValueError(f"a block of {self.block_elems} elements is no whole number of rows of {row}")
        return slots.reshape(slots.shape[0], -1, row)

    def first_row(self, name: str) -> int:
        """Row at which a matrix starts in the view with rows of its own length."""
        start, row = self.start(name), self.field(name).shape[1]
        if start % row:
            raise ValueError(f"expert field {name!r} does not start at a whole row of {row} elements")
        return start // row

    def pack(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Expert tensors -> one block, `storage[n]`. Raises `ValueError` where a shape or dtype does not match."""
        block = np.zeros(self.block_bytes, np.uint8)
        for field in self.fields:
            value = tensors[field.name]
            if value.shape != field.shape or value.dtype != field.dtype:
                raise ValueError(
                    f"expert field {field.name!r}: expected {field.dtype}{list(field.shape)}, "
                    f"got {value.dtype}{list(value.shape)}"
                )
            block[field.offset : field.offset + field.nbytes] = np.ascontiguousarray(value).view(np.uint8).ravel()
        return block.view(self.storage)

    def unpack(self, blocks: Shaped[Array, "*batch n"], name: str) -> Shaped[Array, "..."]:
        """One field of a batch of blocks, `[*batch, *field.shape]` in the field's dtype (traceable)."""
        length = self.field(name).nbytes // self.storage.itemsize
        return self.typed(blocks[..., self.start(name) : self.start(name) + length], name)

    def typed(self, part: Shaped[Array, "*batch m"], name: str) -> Shaped[Array, "..."]:
        """The stored elements of one field as what they are."""
        field, batch = self.field(name), part.shape[:-1]
        if field.dtype.itemsize == self.storage.itemsize:
            return jax.lax.bitcast_convert_type(part, field.dtype).reshape(*batch, *field.shape)
        parts = part.reshape(*batch, *field.shape, field.dtype.itemsize // self.storage.itemsize)
        return jax.lax.bitcast_convert_type(parts, jnp.dtype(field.dtype))


def swiglu_layout(
    *,
    hidden: int,
    width: int,
    dtype: np.dtype | type,
    scales: ScaleKind | None = None,
    activation: Activation = SWIGLU,
    bias: np.dtype | None = None,
) -> ExpertLayout:
    """Block of a SwiGLU expert: `gate [F, H]`, `up [F, H]`, `down [H, F]`, orientations as in the checkpoint.

    With `scales` by block each matrix has a float32 scale per 128 x 128 block, `gate_scale [ceil(F/128), ceil(H/128)]`
    and so on, to be multiplied; by channel one per row, `gate_scale [F]`. FP8 (e4m3) always has, by block where nothing
    is said. FP4 (e2m1) is MXFP4: a byte has columns 2j (low half) and 2j + 1, so a matrix is
    `uint8 [rows, columns / 2]`, and each 32 columns of a row have a power of two to be multiplied by, stored as its
    exponent plus 127 (e8m0): `gate_scale uint8 [F, H / 32]`. With `bias`, its dtype, there are `gate_bias [F]`,
    `up_bias [F]` and `down_bias [H]`. Raises `ValueError` where FP4 rows are no whole
    blocks, or are to have other scales.

    Matrices start at multiples of both row lengths (as stored) and the block's length is one too, so
    `slots.reshape(S, -1, H)` and `slots.reshape(S, -1, F)` are free views in which a field starts at a whole row.
    """
    dtype = np.dtype(dtype)
    matrices = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    if dtype == FP4 and (hidden % FP4_BLOCK or width % FP4_BLOCK):
        raise ValueError(f"FP4 experts need H and F to be multiples of {FP4_BLOCK}, got H={hidden}, F={width}")
    if dtype == FP4 and scales:
        raise ValueError(f"FP4 experts have scales of their own, got scales by {scales}")
    scales = scales or ("block" if dtype == FP8 else None)
    packed = 2 if dtype == FP4 else 1  # numbers per element
    element = np.dtype(np.uint8) if dtype == FP4 else dtype
    shapes: list[tuple[str, tuple[int, ...], np.dtype]] = [
        (name, (rows, cols // packed), element) for name, (rows, cols) in matrices.items()
    ]
    if dtype == FP4:
        shapes += [(f"{name}_scale", (rows, cols // FP4_BLOCK), element) for name, (rows, cols) in matrices.items()]
    for name, (rows, cols) in matrices.items() if scales else ():
        grid = (math.ceil(rows / FP8_BLOCK), math.ceil(cols / FP8_BLOCK))
        shapes.append((f"{name}_scale", grid if scales == "block" else (rows,), np.dtype(np.float32)))
    if bias is not None:
        shapes += [(f"{name}_bias", (rows,), bias) for name, (rows, _) in matrices.items()]
    fields, offset = [], 0
    for name, shape, field_dtype in shapes:
        # Matrices are whole multiples of H and F elements: aligning them would break the views, and need not be done.
        step = 1 if name in matrices else ALIGNMENT
        offset = math.ceil(offset / step) * step
        fields.append(Field(name=name, offset=offset, shape=shape, dtype=field_dtype))
        offset += fields[-1].nbytes
    unit = math.lcm(hidden // packed * element.itemsize, width // packed * element.itemsize, ALIGNMENT)
    return ExpertLayout(
        fields=tuple(fields),
        block_bytes=math.ceil(offset / unit) * unit,
        dtype=dtype,
        scales=scales,
        activation=activation,
    )
