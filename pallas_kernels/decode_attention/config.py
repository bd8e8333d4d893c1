"""What the attention kernels are told at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.norm import Norm


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Grouped-query attention of `count` queries over `kv` keys and values of size `dim`.

    norm: of queries and keys, over a head or over the "full" width of their projection; None: no norm.
    clip: queries, keys and values to +-clip, after a full norm and before one of heads.
    turned: dimensions `turn_from : turn_from + turned` are rotated, in pairs (i, i + turned / 2) if `turn_layout` is
        "half", else (2i, 2i + 1).
    """

    count: int
    kv: int
    dim: int
    scale: float
    norm: Norm | None
    norm_over: Literal["head", "full"]
    clip: float | None
    turned: int
    turn_from: int
    turn_layout: Literal["half", "pairs"]

    @property
    def unfit(self) -> str | None:
        """Why the kernel cannot do it, if so."""
        if self.dim < 16 or self.dim > 256 or self.dim & (self.dim - 1):
            return f"heads of {self.dim} (a power of two from 16 to 256 is needed)"
        return None


@dataclass(frozen=True, kw_only=True)
class Config:
    """`tile` positions of a sequence are read at once; at most `splits` programs share its positions, a whole number of
    tiles each. `warps` and `combine_warps` are those of the two kernels. All powers of two."""

    tile: int = 64
    splits: int = 64
    warps: int = 4
    combine_warps: int = 4


def default_config(dim: int, itemsize: int) -> Config:
    """Tiles of at most 16 KiB of keys, so that those of keys and values in flight fit the shared memory of any GPU."""
    return Config(tile=64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 512 else 16)
