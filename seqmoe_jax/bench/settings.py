"""What a benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared: a policy, an engine and how it plans, at a residency and a batch size."""

    name: str
    policy: str
    residency: float
    batch: int = 1
    predicted: bool = False  # policy seqmoe with a predictor
    options: dict[str, Any] = field(default_factory=dict)  # of `TokenEngine`


# The ablation: each line adds to the one before it, or replaces its scheduler.
VARIANTS: dict[str, dict[str, Any]] = {
    "lru": dict(policy="lru"),
    "lfu": dict(policy="lfu"),
    "prefill-hot": dict(policy="prefill-hot"),
    "history": dict(policy="seqmoe"),
    "evict": dict(policy="seqmoe", predicted=True, options=dict(transfers="none")),
    "device_put": dict(policy="seqmoe", predicted=True, options=dict(transfers="device_put")),
    "callback": dict(policy="seqmoe", predicted=True, options=dict(transfers="callback")),
    "dma-infinity": dict(
        policy="seqmoe", predicted=True, options=dict(transfers="dma", scheduler="moe-infinity", refine=False)
    ),
    "dma-promoe": dict(
        policy="seqmoe", predicted=True, options=dict(transfers="dma", scheduler="promoe", refine=False)
    ),
    "dma-alg1": dict(policy="seqmoe", predicted=True, options=dict(transfers="dma", refine=False)),
    "dma": dict(policy="seqmoe", predicted=True, options=dict(transfers="dma")),
    "dma-2-steps": dict(policy="seqmoe", predicted=True, options=dict(transfers="dma", steps_ahead=2)),
    "dma-3-steps": dict(policy="seqmoe", predicted=True, options=dict(transfers="dma", steps_ahead=3)),
}


def settings_of(names: Sequence[str], residencies: Sequence[float], batches: Sequence[int]) -> list[Setting]:
    """Every variant at every residency and batch size; at residency 1 full load, once."""
    found = []
    for batch in batches:
        for residency in residencies:
            if residency == 1:
                found.append(Setting(name="full", policy="full", residency=1.0, batch=batch))
                continue
            found += [Setting(name=name, residency=residency, batch=batch, **VARIANTS[name]) for name in names]
    return found
