"""Block shapes of the decode kernels and the rule that picks them from an expert's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.backend import compute_capability
from pallas_kernels.layout import FP4, FP4_BLOCK, FP8, FP8_BLOCK, ExpertLayout

Fp8Mode = Literal["convert", "bits"]


@dataclass(frozen=True, kw_only=True)
class FusedMoEConfig:
    """Block shapes of the two GPU kernels; all powers of two.

    A program of the first kernel makes `up_rows` of the F hidden values of one route, in tiles of `up_cols` of H; one
    of the second makes `down_rows` of a token's H outputs, in tiles of all its routes and `down_cols` of F. Every
    thread adds up tiles element by element, so tiles say what it multiplies at a time, not what it asks for: that is
    everything. For FP8 experts, and others with scales by block, rows divide 128 and columns are multiples of it; for
    FP4 columns are multiples of 32. `fp8` says how e4m3 becomes float32: by the hardware's conversion (compute
    capability 8.9 or newer) or by moving the bits into a float16.
    """

    up_rows: int = 2
    up_cols: int = 2048
    up_warps: int = 1
    down_rows: int = 4
    down_cols: int = 256
    down_warps: int = 4
    fp8: Fp8Mode = "convert"

    def __post_init__(self) -> None:
        for name in ("up_rows", "up_cols", "up_warps", "down_rows", "down_cols", "down_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"fused_moe config: {name} must be a power of two, got {value}")

    def check(self, layout: ExpertLayout) -> None:
        """Raises `ValueError` where the block shapes do not fit the blocks that share a scale."""
        for name in ("up", "down"):
            rows, cols = getattr(self, f"{name}_rows"), getattr(self, f"{name}_cols")
            if layout.dtype == FP4 and cols % FP4_BLOCK:
                raise ValueError(f"fused_moe config: FP4 experts need {name}_cols a multiple of 32, got {cols}")
            if (layout.dtype == FP8 or layout.scales == "block") and (FP8_BLOCK % rows or cols % FP8_BLOCK):
                raise ValueError(
                    f"fused_moe config: {layout.dtype} experts with scales need {name}_rows dividing {FP8_BLOCK} and "
                    f"{name}_cols a multiple of it, got {rows} and {cols}"
                )


def chunk(size: int, *, most: int, least: int = 128) -> int:
    """The largest power of two up to `most` that pads `size` by at most an eighth; never below `least`."""
    block = most
    while block > least and math.ceil(size / block) * block - size > size // 8:
        block //= 2
    return block


def fp8_mode() -> Fp8Mode:
    """The hardware conversion unless this process's GPU is known to lack it."""
    return "bits" if 0 < compute_capability() < 8.9 else "convert"


def default_config(layout: ExpertLayout, per_token: int) -> FusedMoEConfig:
    """Block shapes from the shape of an expert and their number per token.

    A thread asks for some 400 bytes of weights at once, 100 of an FP8 down projection. One warp takes whole rows of
    gate and up, so nothing is exchanged between warps; four or eight share some rows of down, each some of the routes.
    """
    hidden, width = layout.hidden, layout.width
    itemsize = 2 if layout.dtype == FP4 else layout.dtype.itemsize  # FP4 takes as many registers as bf16
    least = FP8_BLOCK if layout.scales else FP4_BLOCK if layout.dtype == FP4 else 16
    # FP8 and FP4 cost more arithmetic than memory in large tiles, whose products are not added on the way.
    narrow = layout.dtype in (FP8, FP4)
    up_cols = chunk(hidden, most=512 if narrow else 2048, least=max(least, min(128, hidden)))
    down_cols = chunk(width, most=512 if layout.dtype == FP4 else 256, least=max(least, min(128, width)))
    # Powers of two, also where H or F below 128 is none.
    up_cols, down_cols = (1 << (cols - 1).bit_length() for cols in (up_cols, down_cols))
    routes = 1 << (per_token - 1).bit_length()
    return FusedMoEConfig(
        up_rows=power_below(16384 / (2 * hidden * itemsize), most=8),
        up_cols=up_cols,
        up_warps=1,
        down_rows=power_below(min(hidden / 512, 49152 / (routes * width * itemsize)), most=16),
        down_cols=down_cols,
        down_warps=8 if layout.dtype == FP8 else 4,
        fp8=fp8_mode(),
    )


def power_below(value: float, *, most: int) -> int:
    """The largest power of two up to `value` and `most`; at least 1."""
    return min(most, 1 << max(0, math.floor(math.log2(value))))
