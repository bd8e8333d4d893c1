"""A simulation's settings as the plain numbers that compiled code reads."""

from __future__ import annotations

from typing import NamedTuple

from seqmoe_jax.simulation.settings import Simulation
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace

LRU, LFU, SCORED, BELADY, BELADY_8, HISTORY = range(6)  # `Rules.policy`; SCORED is every policy that evicts by a score
NONE, SEQMOE, MOE_INFINITY, PROMOE = range(4)  # `Rules.scheduler`
_POLICIES = {"lru": LRU, "lfu": LFU, "belady": BELADY, "belady-8": BELADY_8, "history": HISTORY}
_SCHEDULERS = {"none": NONE, "seqmoe": SEQMOE, "moe-infinity": MOE_INFINITY, "promoe": PROMOE}


class Rules(NamedTuple):
    """What does not change during a simulation. Not explained here: the fields of `Simulation` of the same name."""

    layers: int
    skip: int
    policy: int
    keep: float  # weight of the retention score of an expert whose layer is still to come in this step
    trigger: int  # layer at which forecasts made in mid-step are there; L: never
    scheduler: int
    tasks_per_layer: int
    threshold: float
    horizon: int
    reach: float
    cost: float  # RHO
    alpha: float
    chunks: int
    compare: bool
    late: bool
    guard: bool
    protect: bool  # whether a landed prefetch stays until its layer has run, whatever its value


def rules_of(config: Simulation, trace: Trace, forecasts: Forecasts | None) -> Rules:
    trigger = None
    if forecasts is not None and config.needs_forecasts and (config.refine or config.early):
        trigger = forecasts.trigger
    compare = config.compare and config.evicts_by_forecast
    return Rules(
        layers=trace.layers,
        skip=config.skip,
        policy=_POLICIES.get(config.policy, SCORED),
        keep=config.discount if config.policy == "seqmoe-rollout" else config.keep,
        trigger=trace.layers if trigger is None else trigger,
        scheduler=_SCHEDULERS[config.prefetcher],
        tasks_per_layer=trace.active + config.extra_tasks,
        threshold=config.threshold,
        horizon=config.horizon if config.prefetches else 0,
        reach=config.reach,
        cost=config.transfer_cost,
        alpha=config.alpha,
        chunks=config.chunks,
        compare=compare,
        late=config.late,
        guard=config.guard and config.evicts_by_forecast,
        protect=not compare,
    )
