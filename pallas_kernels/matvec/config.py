"""What the operation returns, what the kernel covers, its block shapes and the rule that picks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float

MAX_BATCH = 8  # vectors that a program holds beside its rows of the matrix


class Product(NamedTuple):
    """What `matvec` returns."""

    out: Float[Array, "B O"]
    normed: Float[Array, "B I"]
    """What met the matrix."""
    x: Float[Array, "B I"]
    """That before its norm, with the addend."""


def unfit_batch(batch: int) -> str | None:
    """Why the kernel cannot take so many vectors, if so."""
    return None if 1 <= batch <= MAX_BATCH else f"{batch} vectors (1 to {MAX_BATCH} are needed)"


@dataclass(frozen=True, kw_only=True)
class MatvecConfig:
    """A program makes `rows` outputs of every vector in `warps` warps, reading whole rows at once, in pieces of at most
    `cols` columns. All powers of two."""

    rows: int = 2
    cols: int = 2048
    warps: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"matvec config: {name} must be a power of two, got {value}")


def default_config(width: int, itemsize: int) -> MatvecConfig:
    """Block shapes for rows of `width` elements: programs of 16 KiB, 128 bytes of them in flight a thread.

    Four warps for what one could hold: a program also norms its vectors, and with a fourth of their elements a thread
    keeps everything in registers for any batch. The rule follows from the matrix alone, never from the batch: a
    vector's result does not depend on its neighbours.
    """
    cols = 1 << min(11, max(4, (width - 1).bit_length()))
    rows = 4 if width * itemsize <= 4096 else 2
    warps = -(-rows * width * itemsize // (32 * 128))
    return MatvecConfig(rows=rows, cols=cols, warps=min(8, 1 << (warps - 1).bit_length()))
