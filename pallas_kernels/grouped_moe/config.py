"""Tile shapes of the prefill kernels and the rule that picks them."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.backend import compute_capability
from pallas_kernels.fused_moe.config import Fp8Mode, fp8_mode
from pallas_kernels.layout import FP4, FP8, FP8_BLOCK, ExpertLayout


@dataclass(frozen=True, kw_only=True)
class GroupedMoEConfig:
    """Tiles of the two GPU kernels, powers of two from 16: a program makes M rows times `*_cols` outputs.

    It goes through the contracted dimension in steps of `depth`, which is 128 where scales are by block: one step, one
    scale.
    """

    up_cols: int = 64
    down_cols: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 3
    fp8: Fp8Mode = "convert"

    def __post_init__(self) -> None:
        for name in ("up_cols", "down_cols", "depth"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"grouped_moe config: {name} must be a power of two from 16, got {value}")

    def check(self, layout: ExpertLayout) -> None:
        """Raises `ValueError` where the tiles do not fit FP8 scale blocks."""
        if layout.dtype == FP4 and self.depth < 32:
            raise ValueError(f"grouped_moe config: FP4 experts need a depth from 32, got {self.depth}")
        fits = self.depth == FP8_BLOCK and not (FP8_BLOCK % self.up_cols or FP8_BLOCK % self.down_cols)
        if layout.scales == "block" and not fits:
            raise ValueError(
                f"grouped_moe config: scales by block need depth {FP8_BLOCK} and columns dividing it, got depth "
                f"{self.depth}, up_cols {self.up_cols}, down_cols {self.down_cols}"
            )


def default_config(layout: ExpertLayout) -> GroupedMoEConfig:
    """Tiles of 64 (32 for float32 experts, for registers), smaller for small experts.

    On Hopper of 128 columns: swept on an H200 for blocks of 64 rows of bf16, FP8 and FP4 experts.
    """
    hidden, width = layout.hidden, layout.width
    if compute_capability() == 9.0 and layout.dtype.itemsize <= 2 and min(hidden, width) >= 128:
        wide = 128 if layout.dtype in (FP8, FP4) or layout.scales == "block" else 64
        return GroupedMoEConfig(up_cols=128, down_cols=128, depth=wide, stages=2 if layout.dtype == FP8 else 3)
    most = 32 if layout.dtype.itemsize == 4 else 64

    def fit(size: int) -> int:
        return max(16, min(most, 1 << (size - 1).bit_length()))

    return GroupedMoEConfig(
        up_cols=fit(width),
        down_cols=fit(hidden),
        depth=FP8_BLOCK
        if layout.dtype == FP8 or layout.scales == "block"
        else max(32 if layout.dtype == FP4 else 16, min(fit(width), fit(hidden))),
        fp8=fp8_mode(),
    )
