"""What a cache policy and a prefetcher would be worth, from a trace alone.

One global pool of int(R * L * E) slots, a serial link, sequences back to back (the pool is kept from one to the next,
and starts empty). The time model is in `replay`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float16, Float32, Int64

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.simulation import link as links
from seqmoe_jax.simulation import loop
from seqmoe_jax.simulation.pool import new_pool
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace

SimulatedPolicy = Literal["lru", "lfu", "prefill-hot", "belady", "belady-8", "forecast", "forecast-direct"]
Prefetcher = Literal["none", "seqmoe", "moe-infinity", "promoe"]

_RULES: dict[str, int] = {"lru": loop.LRU, "lfu": loop.LFU, "belady": loop.BELADY, "belady-8": loop.BELADY_8}
_SCHEDULERS: dict[str, int] = {
    "none": links.NONE,
    "seqmoe": links.SEQMOE,
    "moe-infinity": links.MOE_INFINITY,
    "promoe": links.PROMOE,
}
_BLOCK = 2048  # steps whose signals are in memory as float32 at a time


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What to simulate. The second half goes beyond the paper; its defaults are the paper's method."""

    residency: float
    policy: SimulatedPolicy = "lru"
    prefetcher: Prefetcher = "none"
    transfer_cost: float = 1.0  # RHO: time of a transfer / compute time of a layer
    skip: int = 500  # first steps, not counted
    extra_tasks: int = 3  # tasks per layer beyond K
    threshold: float = 0.0  # least confidence of a task
    discount: float = 0.5  # lambda of the paper's CacheScore, policy `forecast`
    keep: float = 1.0  # weight of later use against use in this step, policy `forecast-direct`
    hot_steps: int = 32  # policy `prefill-hot`, where a trace has no prompt: this many first steps stand in for it
    alpha: float = 0.1  # of the budget's moving average

    early: bool = False  # forecast the next step's lower layers in mid-step: the paper's predictor at L/2
    refine: bool = False  # forecast this step's upper layers anew in mid-step
    chunks: int = 1  # parts of a transfer; a demand miss interrupts between them
    compare: bool = False  # a prefetch must be worth more than what it evicts
    margin: float = 0.0  # by this much
    late: bool = False  # transfers that cannot be complete in time count for the part that can
    horizon: int = 0  # steps beyond the running one that get tasks
    reach: float = 0.3  # least confidence of those

    def __post_init__(self) -> None:
        if not 0 < self.residency <= 1:
            raise ConfigError(f"residency must be in (0, 1], got {self.residency}")
        if not (self.transfer_cost > 0 and np.isfinite(self.transfer_cost)):
            raise ConfigError(f"transfer cost must be above 0, got {self.transfer_cost}")
        for name, known in (("policy", SimulatedPolicy), ("prefetcher", Prefetcher)):
            if getattr(self, name) not in get_args(known):
                expected = ", ".join(get_args(known))
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}: expected one of {expected}")
        for name, least in (("skip", 0), ("extra_tasks", 0), ("hot_steps", 1), ("chunks", 1), ("horizon", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out; counts are per step."""

    hit_rate: float  # routed experts that were resident when their layer started
    transfers_per_step: float  # all that the link moved, on demand and ahead
    unused_transfers_per_step: float  # prefetched, and evicted or dropped before any use
    share_of_full_load: float  # compute time / (compute + stall)
    link_bound: float  # the share that would be left if every transfer overlapped with compute
    slots: int
    steps: int  # counted
    hit_rate_per_layer: tuple[float, ...]

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def simulate(
    trace: Trace,
    config: Simulation,
    forecasts: Forecasts | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Runs the decoded steps of the whole trace; `progress` is called with the number of steps done.

    Prompts are not simulated: prefill is not a sequence of steps. Policy `prefill-hot` and forecasts know them.
    """
    _check(trace, config, forecasts)
    hot = _hot(trace, config.hot_steps) if config.policy == "prefill-hot" else None
    decoded = trace.decoded()
    if not decoded.all():
        some = np.add.reduceat(decoded, trace.seq_offsets[:-1]) > 0
        hot = None if hot is None else hot[some]
        trace, forecasts = trace.without_prompts(), None if forecasts is None else forecasts.take(decoded)
    keys, active = trace.layers * trace.num_experts, trace.active
    slots = int(config.residency * keys + 1e-9)
    if slots < active + (config.prefetcher != "none"):
        least = (active + (config.prefetcher != "none")) / keys
        raise ConfigError(
            f"residency {config.residency} gives {slots} slots, too few for {active} active experts: "
            f"expected at least {least:.4f}"
        )
    cost = config.transfer_cost
    per_layer = active + config.extra_tasks
    pool = new_pool(slots, keys)
    link = links.new_link(per_layer * trace.layers * (2 + config.horizon), cost)
    moved = links.Moved(prefetched=np.zeros(1), unused=np.zeros(1), demanded=np.zeros(1))
    tally = loop.Tally(
        hits=np.zeros(trace.layers, np.int64),
        routed=np.zeros(1, np.int64),
        time=np.zeros(1),
        steps=np.zeros(1, np.int64),
        uses=np.zeros(keys, np.int64),
        last_use=np.zeros(keys, np.int64),
        next_use=np.zeros(keys, np.int64),
    )
    trigger = trace.layers  # never
    if (config.refine or config.early) and forecasts is not None and forecasts.trigger is not None:
        trigger = forecasts.trigger
    rules = loop.Rules(
        policy=_RULES.get(config.policy, loop.SCORED),
        keep=config.discount if config.policy == "forecast" else config.keep,
        tasks_per_layer=per_layer,
        threshold=config.threshold,
        trigger=trigger,
        horizon=config.horizon if config.prefetcher != "none" else 0,
        reach=config.reach,
    )
    scored = config.policy in ("forecast", "forecast-direct")
    link_config = links.LinkConfig(
        scheduler=_SCHEDULERS[config.prefetcher],
        cost=cost,
        alpha=config.alpha,
        chunks=config.chunks,
        margin=config.margin,
        compare=config.compare and scored,
        late=config.late,
        protect=not (config.compare and scored),
        layers=trace.layers,
    )
    if rules.policy in (loop.BELADY, loop.BELADY_8):
        next_use, first_use = _next_use(trace)
        tally.next_use[:] = first_use
        pool.value[:] = -first_use
    else:
        next_use = np.zeros((0, 1, 1), np.int64)
    for start in range(0, trace.steps, _BLOCK):
        stop = min(start + _BLOCK, trace.steps)
        signals = _signals(trace, config, forecasts, hot, next_use, start, stop)
        ids = trace.ids[start:stop].astype(np.int64)
        loop.replay(ids, start, config.skip, rules, link_config, signals, pool, link, moved, tally)
        if progress is not None:
            progress(stop)
    return _result(trace, config, slots, moved, tally, pool)


def _check(trace: Trace, config: Simulation, forecasts: Forecasts | None) -> None:
    steps = int(trace.decoded().sum())
    if steps <= config.skip:
        raise ConfigError(
            f"the trace has {steps} steps and the first {config.skip} are not counted: use a longer trace or skip fewer"
        )
    needs = config.prefetcher != "none" or config.policy in ("forecast", "forecast-direct")
    if not needs:
        return
    if forecasts is None:
        raise ConfigError(f"policy {config.policy} with prefetcher {config.prefetcher} needs forecasts")
    forecasts.check(trace)
    wanted: list[tuple[str, bool]] = [
        ("rollout", config.policy == "forecast" or (config.horizon > 0 and config.prefetcher != "none")),
        ("retention", config.policy == "forecast-direct"),
        ("refined", config.refine),
        ("early", config.early),
    ]
    for name, needed in wanted:
        if needed and getattr(forecasts, name) is None:
            raise ConfigError(f"the forecasts {forecasts.name!r} have no {name}, which this simulation needs")
    if forecasts.rollout is not None and config.horizon > forecasts.rollout.shape[1]:
        raise ConfigError(f"horizon {config.horizon} is beyond the rollout of {forecasts.rollout.shape[1]} steps")


def _next_use(trace: Trace) -> tuple[Int64[np.ndarray, "T L K"], Int64[np.ndarray, " keys"]]:
    """Position of the next use of every routed expert after the step, and of the first use of every key; `loop.FAR`
    if there is none."""
    base = np.arange(trace.layers)[:, None] * trace.num_experts
    upcoming = np.full(trace.layers * trace.num_experts, loop.FAR, np.int64)
    found = np.empty(trace.ids.shape, np.int64)
    positions = np.arange(trace.layers)[:, None]
    for step in range(trace.steps - 1, -1, -1):
        keys = base + trace.ids[step]
        found[step] = upcoming[keys]
        upcoming[keys] = step * trace.layers + positions
    return found, upcoming


def _hot(trace: Trace, hot_steps: int) -> Float32[np.ndarray, "N keys"]:
    """How often each sequence's prompt used each expert; its first steps stand in for a prompt that is not there."""
    counts = np.zeros((trace.sequences, trace.layers * trace.num_experts), np.float32)
    for i, (start, stop) in enumerate(trace.spans()):
        prompt = int(trace.prefill_lens[i]) if trace.prefill_lens is not None else 0
        steps = prompt or min(hot_steps, stop - start)
        counts[i] = trace.activations(start, start + steps).sum(axis=0).reshape(-1)
    return counts


def _signals(trace, config, forecasts, hot, next_use, start: int, stop: int) -> loop.Signals:
    """The float32 rows of steps [start, stop) that this simulation reads; nothing else is converted."""
    keys = trace.layers * trace.num_experts
    none = np.zeros((0, keys), np.float32)
    probability = retention = refined = early = none
    ahead = np.zeros((0, 0, keys), np.float32)
    if forecasts is not None and (config.prefetcher != "none" or config.policy.startswith("forecast")):
        probability = _rows(forecasts.next, start, stop)
        if config.refine or config.early:
            refined = _rows(forecasts.refined, start, stop) if config.refine else probability
        if config.early:
            # Read at the trigger of step t, about step t + 1; after the last step nothing comes.
            early = _rows(forecasts.early, start + 1, stop + 1)
            early = np.pad(early, ((0, stop - start - early.shape[0]), (0, 0)))
        if config.horizon and config.prefetcher != "none":
            ahead = forecasts.rollout[start:stop, : config.horizon].astype(np.float32)
            ahead = ahead.reshape(stop - start, config.horizon, keys)
    if config.policy == "forecast":
        retention = cache_score(forecasts.rollout[start:stop], config.discount)
    elif config.policy == "forecast-direct":
        retention = _rows(forecasts.retention, start, stop)
    elif config.policy == "prefill-hot":
        sequence = np.searchsorted(trace.seq_offsets, np.arange(start, stop), side="right") - 1
        retention = hot[sequence]
    if config.policy == "prefill-hot":
        probability = probability if probability.shape[0] else np.zeros((stop - start, keys), np.float32)
    return loop.Signals(
        next=probability,
        retention=np.ascontiguousarray(retention),
        refined=refined,
        early=early,
        ahead=ahead,
        next_use=next_use[start:stop],
    )


def _rows(array: Float16[np.ndarray, "T L E"], start: int, stop: int) -> Float32[np.ndarray, "t keys"]:
    return array[start:stop].astype(np.float32).reshape(-1, array.shape[1] * array.shape[2])


def cache_score(rollout: Float16[np.ndarray, "t c L E"], discount: float) -> Float32[np.ndarray, "t keys"]:
    """The paper's CacheScore (7.1): the mean over the rollout's c steps, step j weighing discount**j."""
    steps = rollout.shape[1]
    weights = (discount ** np.arange(steps)).astype(np.float32)
    score = np.zeros((rollout.shape[0], *rollout.shape[2:]), np.float32)
    for j in range(steps):
        score += weights[j] * rollout[:, j]
    return (score / weights.sum()).reshape(rollout.shape[0], -1)


def _result(trace: Trace, config: Simulation, slots: int, moved, tally, pool) -> Result:
    steps = int(tally.steps[0])
    compute = steps * trace.layers
    transfers = float(moved.prefetched[0] + moved.demanded[0])
    per_layer = tally.hits / (steps * trace.active)
    return Result(
        hit_rate=float(tally.hits.sum() / tally.routed[0]),
        transfers_per_step=transfers / steps,
        unused_transfers_per_step=float(moved.unused[0] + pool.untouched.sum()) / steps,
        share_of_full_load=float(compute / tally.time[0]),
        link_bound=min(1.0, compute / max(transfers * config.transfer_cost, 1e-9)),
        slots=slots,
        steps=steps,
        hit_rate_per_layer=tuple(float(rate) for rate in per_layer),
    )
