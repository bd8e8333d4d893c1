"""What the operation is told at compile time, what the kernels cover, and their block shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.norm import Norm


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Grouped-query attention of `num_heads` queries over `num_kv_heads` keys and values of size `head_dim`.

    norm: of queries and keys, over a head or over the "full" width of their projection; None: no norm.
    clip: queries, keys and values to +-clip, after a full norm and before one of heads.
    rotary_dim: so many dimensions from `rotary_offset` on are rotated, in pairs (i, i + rotary_dim / 2) if
        `rotary_layout` is "half", else (2i, 2i + 1).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm: Norm | None
    norm_over: Literal["head", "full"]
    clip: float | None
    rotary_dim: int
    rotary_offset: int
    rotary_layout: Literal["half", "pairs"]


def unfit_heads(heads: Heads) -> str | None:
    """Why the kernel cannot do it, if so."""
    if heads.head_dim in (16, 32, 64, 128, 256):
        return None
    return f"heads of {heads.head_dim} (a power of two from 16 to 256 is needed)"


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionConfig:
    """`tile` positions of a sequence are read at once; at most `splits` programs share its positions, a whole number of
    tiles each. `warps` and `combine_warps` are those of the two kernels. All powers of two."""

    tile: int = 64
    splits: int = 64
    warps: int = 4
    combine_warps: int = 4


def default_config(head_dim: int, itemsize: int) -> DecodeAttentionConfig:
    """Tiles of at most 16 KiB of keys, so that those of keys and values in flight fit the shared memory of any GPU."""
    return DecodeAttentionConfig(tile=64 if head_dim * itemsize <= 256 else 32 if head_dim * itemsize <= 512 else 16)
