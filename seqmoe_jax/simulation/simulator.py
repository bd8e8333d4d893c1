"""What a cache policy and a prefetcher would be worth, from a trace alone.

One global pool of int(R * L * E) slots, a serial link, sequences back to back (the pool is kept from one to the next,
and starts empty). The time model is in `loop`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.simulation.loop import SimulationState, new_state, replay
from seqmoe_jax.simulation.rules import rules_of
from seqmoe_jax.simulation.settings import Simulation
from seqmoe_jax.simulation.signals import SignalSource, next_uses, prompt_uses
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace

BLOCK = 2048  # steps whose signals are in memory as float32 at a time


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What came out; counts are per step."""

    hit_rate: float  # routed experts that were resident when their layer started
    transfers_per_step: float  # all that the link moved, on demand and ahead
    unused_transfers_per_step: float  # prefetched, and evicted or dropped before any use
    share_of_full_load: float  # compute time / (compute + stall)
    link_bound: float  # the share that would be left if every transfer overlapped with compute
    predicted: float  # share of the steps in which the predictor ran
    slots: int
    steps: int  # counted
    hit_rate_per_layer: tuple[float, ...] = field(repr=False)

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def simulate(
    trace: Trace,
    config: Simulation,
    forecasts: Forecasts | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> SimulationResult:
    """Runs the decoded steps of the whole trace; `progress` is called with the number of steps done.

    Prompts are not simulated: prefill is not a sequence of steps. Policy `prefill-hot` and forecasts know them.
    Raises `ConfigError` where the trace is too short, the pool too small, or forecasts are needed that are not there;
    `TraceError` where they are for another trace.
    """
    _check(trace, config, forecasts)
    uses = prompt_uses(trace, config.hot_steps) if config.policy == "prefill-hot" else None
    decoded = trace.decoded()
    if not decoded.all():
        some = np.add.reduceat(decoded, trace.seq_offsets[:-1]) > 0
        uses = None if uses is None else uses[some]
        trace, forecasts = trace.without_prompts(), None if forecasts is None else forecasts.take(decoded)
    rules = rules_of(config, trace, forecasts)
    state = new_state(_slots(trace, config), trace.layers * trace.num_experts, rules)
    next_use = None
    if config.policy in ("belady", "belady-8"):
        next_use, first_use = next_uses(trace)
        state.uses.next[:] = first_use
        state.pool.value[:] = -first_use
    source = SignalSource(config=config, trace=trace, forecasts=forecasts, prompt_uses=uses, next_use=next_use)
    for start in range(0, trace.steps, BLOCK):
        stop = min(start + BLOCK, trace.steps)
        replay(trace.ids[start:stop].astype(np.int64), start, rules, source.rows(start, stop), state)
        progress(stop)
    return _result(trace, config, state)


def _check(trace: Trace, config: Simulation, forecasts: Forecasts | None) -> None:
    steps = int(trace.decoded().sum())
    if steps <= config.skip:
        raise ConfigError(
            f"the trace has {steps} steps and the first {config.skip} are not counted: use a longer trace or skip fewer"
        )
    if not config.needs_forecasts:
        return
    if forecasts is None:
        raise ConfigError(f"policy {config.policy} with prefetcher {config.prefetcher} needs forecasts")
    forecasts.check(trace)
    needed = {
        "rollout": config.policy == "seqmoe-rollout" or (config.horizon > 0 and config.prefetches),
        "retention": config.policy == "seqmoe",
        "refined": config.refine,
        "early": config.early,
    }
    for name in needed:
        if needed[name] and getattr(forecasts, name) is None:
            raise ConfigError(f"the forecasts {forecasts.name!r} have no {name}, which this simulation needs")
    if forecasts.rollout is not None and config.horizon > forecasts.rollout.shape[1]:
        raise ConfigError(f"horizon {config.horizon} is beyond the rollout of {forecasts.rollout.shape[1]} steps")


def _slots(trace: Trace, config: Simulation) -> int:
    keys, least = trace.layers * trace.num_experts, trace.active + config.prefetches
    slots = int(config.residency * keys + 1e-9)
    if slots < least:
        raise ConfigError(
            f"residency {config.residency} gives {slots} slots, too few for {trace.active} active experts: "
            f"expected at least {least / keys:.4f}"
        )
    return slots


def _result(trace: Trace, config: Simulation, state: SimulationState) -> SimulationResult:
    counters = state.counters
    steps = int(counters.steps[0])
    compute = steps * trace.layers
    transfers = float(counters.prefetched[0] + counters.demanded[0])
    return SimulationResult(
        hit_rate=float(counters.hits.sum() / counters.routed[0]),
        transfers_per_step=transfers / steps,
        unused_transfers_per_step=float(counters.unused[0] + state.pool.untouched.sum()) / steps,
        share_of_full_load=float(compute / counters.time[0]),
        link_bound=min(1.0, compute / max(transfers * config.transfer_cost, 1e-9)),
        predicted=_predicted(config, state),
        slots=state.pool.key.shape[0],
        steps=steps,
        hit_rate_per_layer=tuple(float(rate) for rate in counters.hits / (steps * trace.active)),
    )


def _predicted(config: Simulation, state: SimulationState) -> float:
    if config.guard and config.evicts_by_forecast:
        return float(state.trust.ran[0] / state.counters.steps[0])
    return float(config.needs_forecasts)
