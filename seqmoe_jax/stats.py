"""What a generation did, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from seqmoe_jax.display import percent, size, table
from seqmoe_jax.experts.cache import HITS, MISSES, ROUTED
from seqmoe_jax.prefetch.engine import TransferCounts


@dataclass(kw_only=True, repr=False)
class Stats:
    """What a generation did. Rates are of the decode phase; counts and bytes are of the whole call, prefill included.

    `hit_rate`: distinct experts found resident / distinct experts routed, over layers and decode steps.
    `experts_awaited`: of those not resident, the ones whose prefetch was under way and was waited for.
    `experts_loaded`: loaded on demand. `experts_prefetched`: landed ahead of their use, used or not, while decoding.
    `bytes_moved`: all of these, and the parts of transfers that were given up. `..._decoding`: without the prompt's.
    `forecast`: what policy seqmoe scores experts by: a predictor's name, "history" (discounted frequency of use), or
    "none" for other policies. `transfers`: the engine that prefetches, or "none".
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    tokens_per_second: float = 0.0
    ttft_s: float = 0.0
    compile_s: float = 0.0
    hit_rate: float = 0.0
    prefill_hit_rate: float = 0.0
    experts_routed: int = 0
    experts_loaded: int = 0
    experts_awaited: int = 0
    experts_prefetched: int = 0
    experts_loaded_decoding: int = 0
    bytes_moved: int = 0
    bytes_moved_decoding: int = 0
    residency: float = 0.0
    slots: int = 0
    policy: str = ""
    forecast: str = "none"
    transfers: str = "none"
    backend: str = ""
    kernels: str = ""

    def count(self, prefill: Counts, decode: Counts, moved: TransferCounts, block: int) -> None:
        """Sets what follows from the counts of both phases and what a transfer engine `moved`. `block`: bytes of an
        expert."""
        total = prefill.total + decode.total
        self.hit_rate, self.prefill_hit_rate = decode.hit_rate, prefill.hit_rate
        self.experts_routed, self.experts_loaded = int(total[ROUTED]), int(total[MISSES])
        self.experts_loaded_decoding = int(decode.total[MISSES])
        self.experts_awaited = int(decode.total[ROUTED] - decode.total[HITS] - decode.total[MISSES])
        self.experts_prefetched = moved.landed
        self.bytes_moved = self.experts_loaded * block + moved.bytes
        self.bytes_moved_decoding = self.experts_loaded_decoding * block + moved.bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        return (
            f"Stats({self.new_tokens} new tokens, {self.tokens_per_second:.1f} tok/s, first after {self.ttft_s:.2f} s, "
            f"residency {percent(self.residency)}, hit rate {percent(self.hit_rate)}, {size(self.bytes_moved)} moved)"
        )

    def _repr_html_(self) -> str:
        rows = {
            "new tokens": f"{self.new_tokens} after {self.prompt_tokens}",
            "speed": f"{self.tokens_per_second:.1f} tokens per second",
            "first token": f"after {self.ttft_s:.2f} s, and {self.compile_s:.1f} s of compiling",
            "hit rate": f"{percent(self.hit_rate)} (the prompt's {percent(self.prefill_hit_rate)})",
            "experts": f"{self.experts_routed:,} routed, {self.experts_loaded:,} loaded on demand, "
            f"{self.experts_prefetched:,} prefetched",
            "moved": size(self.bytes_moved),
            "policy": f"{self.policy}, forecast {self.forecast}, transfers {self.transfers}",
            "on": f"{self.backend}, kernels {self.kernels}",
        }
        return table("Generation", rows, bar=(f"residency ({self.slots} slots)", self.residency))


class Counts:
    """Routed, hits and misses of one phase, summed on the host where they cannot overflow."""

    def __init__(self) -> None:
        self.total = np.zeros(3, np.int64)

    def add(self, counts: np.ndarray) -> None:
        self.total += counts

    @property
    def hit_rate(self) -> float:
        return float(self.total[HITS] / self.total[ROUTED]) if self.total[ROUTED] else 1.0
