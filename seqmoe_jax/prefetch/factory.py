"""Which transfer engine a model, its policy and the backend allow, and making it."""

from __future__ import annotations

import math

import jax
from jaxtyping import Array, Shaped

from pallas_kernels.plan_tasks import PlanConfig
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.cache import CacheConfig
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefetch.engine import EngineConfig, TransferEngine, resolve_engine, typical_transfer_cost

TASKS = (3, 16)  # prefetch tasks open at a time, at least and at most; each takes a slot from the cache


def make_transfers(
    options: EngineOptions,
    pools: tuple[Shaped[Array, "E n"], ...],
    device: jax.Device,
    cache: CacheConfig,
    *,
    predicted: bool,
    needed: int,
) -> tuple[PlanConfig | None, TransferEngine | None]:
    """The planning and the engine; None where nothing is prefetched.

    `predicted`: there is a forecast to plan by. `needed`: the most slots that a layer of a step can use.
    Raises `ConfigError` for an engine that cannot work.
    """
    name, tasks = options.transfers, options.tasks
    if not predicted:
        if name not in ("auto", "none") and cache.slots < cache.layers * cache.experts:
            raise ConfigError(f"transfers {name!r} need policy seqmoe and a predictor; load with predictor=...")
        return None, None
    name = resolve_engine(name, cache.implementation)
    if name == "none":
        return None, None
    expert_bytes = cache.layout.block_bytes
    if tasks is None:
        fit = cache.layers / typical_transfer_cost(expert_bytes)
        tasks = min(max(math.ceil(fit) + 1, TASKS[0]), TASKS[1])
    plan = PlanConfig(
        layers=cache.layers, experts=cache.experts, tasks=tasks, threshold=options.threshold,
        keep=min(2 * needed, cache.experts),
    )  # fmt: skip
    config = EngineConfig(plan=plan, expert_bytes=expert_bytes, slots=cache.slots, scheduler=options.scheduler)
    return plan, _make_engine(name, pools, device, config)


def _make_engine(
    name: str, pools: tuple[Shaped[Array, "E n"], ...], device: jax.Device, config: EngineConfig
) -> TransferEngine:
    # Imported where they are used: both import numba.
    if name == "dma":
        from seqmoe_jax.prefetch.dma import Dma

        return Dma(pools, device, config)
    from seqmoe_jax.prefetch.device_put import DevicePut

    return DevicePut(pools, device, config, callback=name == "callback")
