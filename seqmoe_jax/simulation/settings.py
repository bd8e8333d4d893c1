"""What is simulated (`Simulation`), and the settings beyond the paper that measured best for a link (`beyond_paper`).

Those were chosen on an eighth of the training split of a gpt-oss-20b trace (24 layers, 32 experts, 4 active) with
linear forecasts, at RHO 0.72 to 6 and residency 0.25 and 0.45. Residency made no difference to the choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from seqmoe_jax.errors import ConfigError

if TYPE_CHECKING:
    from seqmoe_jax.traces.forecasts import Forecasts

SimulatedPolicy = Literal["lru", "lfu", "prefill-hot", "history", "seqmoe", "seqmoe-rollout", "belady-8", "belady"]
"""What is evicted. `lru`, `lfu`, `prefill-hot` and `seqmoe` are the engine's policies of the same names; `history` is
its `seqmoe` without a predictor.

`seqmoe` keeps experts by their retention score; `seqmoe-rollout` scores them by the paper's rollout instead (7.1).
`belady` evicts what is used last, which nothing can beat by demand alone; `belady-8` knows 8 steps.
"""
Prefetcher = Literal["none", "moe-infinity", "promoe", "seqmoe"]
"""What chooses the next transfer: nothing, the two baselines of the paper (3.2), or Algorithm 1."""

CHUNKS = 16  # 64 gained .002 more; a chunk should stay large enough for the link to run at full speed
HISTORY_DECAY = 0.95  # per step, of policy `history`, as in the engine
EXTRA_TASKS = 6  # per layer beyond K, where the paper has 3: Algorithm 1 takes the surest of them anyway


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What to simulate. The second half goes beyond the paper; its defaults are the paper's method.

    Raises `ConfigError` for a value out of range.
    """

    residency: float
    policy: SimulatedPolicy = "lru"
    prefetcher: Prefetcher = "none"
    transfer_cost: float = 1.0  # RHO: time of a transfer / compute time of a layer
    skip: int = 500  # first steps, not counted
    extra_tasks: int = 3  # tasks per layer beyond K
    threshold: float = 0.0  # least confidence of a task
    discount: float = 0.5  # lambda of the paper's CacheScore, policy `seqmoe-rollout`
    keep: float = 1.0  # weight of later use against use in this step, policy `seqmoe`
    hot_steps: int = 32  # policy `prefill-hot`, where a trace has no prompt: this many first steps stand in for it
    alpha: float = 0.1  # of the budget's moving average

    early: bool = False  # forecast the next step's lower layers in mid-step: the paper's predictor at L/2
    refine: bool = False  # forecast this step's upper layers anew in mid-step
    chunks: int = 1  # parts of a transfer; a demand miss interrupts between them
    compare: bool = False  # a prefetch must be worth more than what it evicts
    late: bool = False  # transfers that cannot be complete in time count for the part that can
    guard: bool = False  # a predictor is followed as far as it proves right (`trust`), with policies that forecast
    horizon: int = 0  # steps beyond the running one that get tasks
    reach: float = 0.3  # least confidence of those

    def __post_init__(self) -> None:
        if not 0 < self.residency <= 1:
            raise ConfigError(f"residency must be in (0, 1], got {self.residency}")
        if not (self.transfer_cost > 0 and math.isfinite(self.transfer_cost)):
            raise ConfigError(f"transfer cost must be above 0, got {self.transfer_cost}")
        for name, known in (("policy", SimulatedPolicy), ("prefetcher", Prefetcher)):
            if getattr(self, name) not in get_args(known):
                expected = ", ".join(get_args(known))
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}: expected one of {expected}")
        for name, least in (("skip", 0), ("extra_tasks", 0), ("hot_steps", 1), ("chunks", 1), ("horizon", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def evicts_by_forecast(self) -> bool:
        return self.policy in ("seqmoe", "seqmoe-rollout")

    @property
    def prefetches(self) -> bool:
        return self.prefetcher != "none"

    @property
    def needs_forecasts(self) -> bool:
        return self.evicts_by_forecast or self.prefetches


def beyond_paper(config: Simulation, forecasts: Forecasts | None = None, *, chunks: int = CHUNKS) -> Simulation:
    """`config` with everything on that its forecasts allow, set for its transfer cost.

    `chunks` is 1 for an engine that cannot interrupt a transfer.
    """
    early = forecasts is not None and forecasts.early is not None
    return replace(
        config,
        early=early,
        refine=forecasts is not None and forecasts.refined is not None,
        # Next to an early forecast of the next step, an older one adds nothing.
        horizon=int(not early and forecasts is not None and forecasts.rollout is not None),
        chunks=chunks,
        compare=True,
        keep=0.5,
        late=True,
        extra_tasks=EXTRA_TASKS,
        threshold=threshold_for(config.transfer_cost, chunks),
    )


def like_engine(config: Simulation) -> Simulation:
    """`config` with what the engine does beyond the paper where it prefetches, as near as the simulator comes."""
    return replace(config, refine=True, chunks=CHUNKS, compare=True, late=True, threshold=0.2)


def threshold_for(transfer_cost: float, chunks: int = CHUNKS) -> float:
    """Least confidence of a task.

    It must be higher where a transfer cannot be interrupted, because a miss then waits for the whole transfer.
    """
    if transfer_cost < 1:
        return 0.1
    if chunks > 1:
        return 0.2
    return 0.3 if transfer_cost < 2.5 else 0.5
