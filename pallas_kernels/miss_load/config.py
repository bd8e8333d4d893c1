"""How the kernel divides what it copies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MissLoadConfig:
    """How one expert is divided."""

    programs: int = 16  # per expert
    piece_bytes: int = 16384  # what a program has in flight at a time; a power of two
    num_warps: int = 8
