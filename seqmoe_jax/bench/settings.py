"""What a benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from seqmoe_jax.options import EngineKeywords, EngineOptions


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared: a policy, an engine and how it plans, at a residency and a batch size."""

    name: str
    options: EngineOptions
    predicted: bool = False  # policy seqmoe with a predictor


# The ablation: each line adds to the one before it, or replaces its scheduler.
_WITHOUT_PREDICTOR: dict[str, EngineKeywords] = {
    "lru": dict(policy="lru"),
    "lfu": dict(policy="lfu"),
    "prefill-hot": dict(policy="prefill-hot"),
    "history": dict(),
}
_WITH_PREDICTOR: dict[str, EngineKeywords] = {
    "evict": dict(transfers="none"),
    "device_put": dict(transfers="device_put"),
    "callback": dict(transfers="callback"),
    "dma-infinity": dict(transfers="dma", scheduler="moe-infinity", refine=False),
    "dma-promoe": dict(transfers="dma", scheduler="promoe", refine=False),
    "dma-alg1": dict(transfers="dma", refine=False),
    "dma": dict(transfers="dma"),
}
VARIANTS: dict[str, Setting] = {
    name: Setting(name=name, options=EngineOptions(**options), predicted=name in _WITH_PREDICTOR)
    for name, options in {**_WITHOUT_PREDICTOR, **_WITH_PREDICTOR}.items()
}


def settings_of(names: Sequence[str], residencies: Sequence[float], batches: Sequence[int]) -> list[Setting]:
    """Every variant at every residency and batch size; at residency 1 full load, once."""
    full = Setting(name="full", options=EngineOptions(policy="full"))
    return [
        replace(setting, options=replace(setting.options, residency=residency, max_batch=batch))
        for batch in batches
        for residency in residencies
        for setting in ([full] if residency == 1 else [VARIANTS[name] for name in names])
    ]
