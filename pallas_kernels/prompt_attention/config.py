"""What sizes the kernel covers, and its block shapes."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.backend import compute_capability


@dataclass(frozen=True, kw_only=True)
class PromptAttentionConfig:
    """A program makes `queries` positions of one head, and reads `keys` positions at a time. Powers of two from 16."""

    queries: int = 128
    keys: int = 64
    warps: int = 4
    stages: int = 3


def parts_of(size: int) -> tuple[int, ...]:
    """A size as a sum of powers of two, the largest first: what tiles of registers can hold."""
    return tuple(1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1)


def unfit_sizes(key_size: int, value_size: int | None) -> str | None:
    """Why the kernel cannot do it, if so."""
    if value_size is None or value_size & (value_size - 1) or not 16 <= value_size <= 512:
        return f"values of {value_size} (a power of two from 16 to 512 is needed)"
    parts = parts_of(key_size)
    if len(parts) > 2 or parts[-1] < 16 or key_size > 1024:
        return f"keys of {key_size} (one power of two or the sum of two is needed, each at least 16)"
    return None


def default_config(key_size: int, value_size: int, itemsize: int) -> PromptAttentionConfig:
    """Blocks whose tiles fit registers and shared memory: 227 KiB of it on data-center GPUs, 99 KiB on others."""
    large = compute_capability() == 9.0
    if itemsize == 4:
        small = value_size <= 128
        return PromptAttentionConfig(queries=32 if small else 16, keys=32 if small else 16, warps=4, stages=2)
    if key_size > 256:
        size = (32, 64) if large else (16, 16)
        return PromptAttentionConfig(queries=size[0], keys=size[1], warps=4, stages=2)
    if key_size > 128:
        size, warps = ((128, 64), 8) if large else ((64, 32), 4)
        return PromptAttentionConfig(queries=size[0], keys=size[1], warps=warps, stages=2)
    if key_size <= 64 and large:
        return PromptAttentionConfig(queries=128, keys=64, warps=8, stages=3)
    return PromptAttentionConfig(queries=128, keys=64, warps=4, stages=2)
