"""Block shapes of the decode kernels and the rule that picks them from an expert's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax

from pallas_kernels.fused_moe.swiglu import is_fp8, sizes
from pallas_kernels.layout import FP8_BLOCK, ExpertLayout

Fp8Mode = Literal["convert", "bits"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block shapes of the two GPU kernels; all powers of two.

    A program of the first kernel makes `up_rows` of the F hidden values of one route, reading `up_cols` of H
    at a time; one of the second makes `down_rows` of the H outputs, reading `down_cols` of F at a time. For
    FP8 experts rows divide 128 and columns are multiples of it. `fp8` says how e4m3 becomes float32: by the
    hardware's conversion (compute capability 8.9 or newer) or by moving the bits into a float16.
    """

    up_rows: int = 2
    up_cols: int = 2048
    up_warps: int = 1
    down_rows: int = 2
    down_cols: int = 512
    down_warps: int = 4
    fp8: Fp8Mode = "convert"
    launches: Literal[1, 2] = 2
    stream: bool = False

    def __post_init__(self) -> None:
        for name in ("up_rows", "up_cols", "up_warps", "down_rows", "down_cols", "down_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"fused_moe config: {name} must be a power of two, got {value}")

    def check(self, layout: ExpertLayout) -> None:
        """Raises `ValueError` where the block shapes do not fit FP8 scale blocks."""
        if not is_fp8(layout):
            return
        for name in ("up", "down"):
            rows, cols = getattr(self, f"{name}_rows"), getattr(self, f"{name}_cols")
            if FP8_BLOCK % rows or cols % FP8_BLOCK:
                raise ValueError(
                    f"fused_moe config: FP8 experts need {name}_rows dividing {FP8_BLOCK} and {name}_cols a "
                    f"multiple of it, got {rows} and {cols}"
                )


def chunk(size: int, *, most: int, least: int = 128) -> int:
    """The largest power of two up to `most` that pads `size` by at most an eighth; never below `least`."""
    block = most
    while block > least and math.ceil(size / block) * block - size > size // 8:
        block //= 2
    return block


def fp8_mode() -> Fp8Mode:
    """The hardware conversion unless this process's GPU is known to lack it."""
    if jax.default_backend() != "gpu":
        return "convert"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return "bits" if capability is not None and float(capability) < 8.9 else "convert"


def default_config(layout: ExpertLayout) -> Config:
    """Block shapes from the expert's shape, after a sweep at H=2048, F=1536 bf16 on an H200.

    Best there: 2 rows and whole H in one warp (each thread has 512 bytes of gate and up in flight), then 2
    rows and 512 of F in 4 warps (one 16-byte load a thread). Other shapes and dtypes keep those bytes per
    thread.
    """
    hidden, width = sizes(layout)
    itemsize = layout.field("gate").dtype.itemsize
    least = FP8_BLOCK if is_fp8(layout) else 16
    up_cols = chunk(hidden, most=max(least, min(2048, 8192 // itemsize)), least=max(least, min(128, hidden)))
    down_cols = chunk(width, most=max(least, 512), least=max(least, min(128, width)))
    # Powers of two, also where H or F below 128 is none.
    up_cols, down_cols = (1 << (cols - 1).bit_length() for cols in (up_cols, down_cols))
    down_rows = min(16, max(2, 2048 // (down_cols * itemsize)))
    return Config(
        up_rows=max(1, min(2, 8192 // (up_cols * itemsize))),
        up_cols=up_cols,
        up_warps=1,
        down_rows=down_rows,
        down_cols=down_cols,
        down_warps=min(4, max(1, down_rows * down_cols * itemsize // 512)),
        fp8=fp8_mode(),
    )
