"""What a benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from seqmoe_jax.options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared: a policy, an engine and how it plans, at a residency and a batch size."""

    name: str
    options: EngineOptions
    predicted: bool = False  # policy seqmoe with a predictor


# The ablation: each line adds to the one before it, or replaces its scheduler.
VARIANTS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(name="lru", options=EngineOptions(policy="lru")),
        Setting(name="lfu", options=EngineOptions(policy="lfu")),
        Setting(name="prefill-hot", options=EngineOptions(policy="prefill-hot")),
        Setting(name="history", options=EngineOptions()),
        Setting(name="evict", options=EngineOptions(transfers="none"), predicted=True),
        Setting(name="device_put", options=EngineOptions(transfers="device_put"), predicted=True),
        Setting(name="callback", options=EngineOptions(transfers="callback"), predicted=True),
        Setting(
            name="dma-infinity",
            options=EngineOptions(transfers="dma", scheduler="moe-infinity", refine=False),
            predicted=True,
        ),
        Setting(
            name="dma-promoe", options=EngineOptions(transfers="dma", scheduler="promoe", refine=False), predicted=True
        ),
        Setting(name="dma-alg1", options=EngineOptions(transfers="dma", refine=False), predicted=True),
        Setting(name="dma", options=EngineOptions(transfers="dma"), predicted=True),
        Setting(name="dma-2-steps", options=EngineOptions(transfers="dma", steps_ahead=2), predicted=True),
        Setting(name="dma-3-steps", options=EngineOptions(transfers="dma", steps_ahead=3), predicted=True),
    )
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
