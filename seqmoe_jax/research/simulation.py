"""`simulate`: what a policy and a prefetcher would be worth on a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import ConfigError, TraceError
from seqmoe_jax.simulation.settings import Simulation, beyond_paper
from seqmoe_jax.simulation.simulator import SimulationResult
from seqmoe_jax.simulation.simulator import simulate as run
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace

ROLLOUT = 7  # steps beyond the coming one that policy `seqmoe-rollout` scores by: 8 in all (paper, 9.1)
SKIP = 500  # first steps that are not counted, of a trace that has more than twice as many


def simulate(
    trace: Trace,
    residency: float,
    policy: str = "lru",
    prefetcher: str = "none",
    *,
    predictor: str | Path | Forecasts | None = None,
    split: str | None = None,
    model: str | None = None,
    beyond: bool = False,
    skip: int | None = None,
    **settings: Any,
) -> SimulationResult:
    """Hit rate, transfers and share of full-load speed of one policy and prefetcher, from a trace alone.

    Args:
      trace: of at least `skip` decoded steps.
      residency: slots as a share of all experts, in (0, 1].
      policy: what is evicted: "lru", "lfu", "prefill-hot", "history", "seqmoe", "seqmoe-rollout", or with the future
        known "belady" and "belady-8".
      prefetcher: what is moved ahead: "none", "moe-infinity", "promoe" or "seqmoe".
      predictor: whose forecasts policy `seqmoe` and the prefetchers use: a directory, "auto" (the one that ships for
        the model), "first-order" (statistics of split train), or `Forecasts`.
      split: only these sequences, such as "test".
      model: the model that the trace is of. Default: what the trace says.
      beyond: all settings beyond the paper that gain, for this transfer cost.
      skip: first steps that are not counted. Default: 500, or half of a shorter trace.
      settings: further fields of `Simulation`, of which `transfer_cost` (RHO: time of a transfer over the compute time
        of a layer, 1.0) matters most.

    Raises `ConfigError`, `TraceError` or `PredictorError`.
    """
    known = {field.name for field in fields(Simulation)}
    if unknown := sorted(settings.keys() - known):
        raise ConfigError(f"simulate has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    part = _part(trace, split)
    config = _checked(residency=residency, policy=policy, prefetcher=prefetcher, skip=_skip(part, skip), **settings)
    forecasts = predictor if isinstance(predictor, Forecasts) else None
    if predictor is not None and forecasts is None:
        rollout = ROLLOUT if policy == "seqmoe-rollout" else max(config.horizon, int(beyond))
        forecasts = forecasts_by(str(predictor), trace, part, model=model, rollout=rollout)
    if beyond:
        config = replace(beyond_paper(config, forecasts), **settings)
    return run(part, config, forecasts)


def hit_rates(
    trace: Trace,
    *,
    residencies: Sequence[float],
    policies: Sequence[str],
    predictor: str | Path | None = None,
    split: str | None = None,
    model: str | None = None,
    skip: int | None = None,
    progress: Callable[[int, int], None] = lambda done, points: None,
) -> dict[str, list[float]]:
    """Hit rates of caching by demand alone: for each policy one at each residency.

    A `predictor` adds policy `seqmoe`. The other options are those of `simulate`.
    """
    part, forecasts, policies = _part(trace, split), None, list(policies)
    if predictor is not None:
        forecasts = forecasts_by(str(predictor), trace, part, model=model, rollout=0)
        policies.insert(0, "seqmoe")
    curves: dict[str, list[float]] = {policy: [] for policy in policies}
    points = [(policy, residency) for policy in policies for residency in residencies]
    for done, (policy, residency) in enumerate(points, 1):
        config = _checked(residency=residency, policy=policy, skip=_skip(part, skip))
        curves[policy].append(run(part, config, forecasts).hit_rate)
        progress(done, len(points))
    return curves


def forecasts_by(predictor: str, whole: Trace, trace: Trace, *, model: str | None, rollout: int) -> Forecasts:
    """What a predictor says of `trace`, a part of `whole`, and of `rollout` steps after each."""
    if predictor == "first-order":
        from seqmoe_jax.traces.first_order import FirstOrder

        return FirstOrder.fit(whole.select("train")).forecasts(trace, rollout=rollout)
    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.evaluation.export import forecasts_of

    directory = store.require_predictor(predictor, model or trace.model, **trace.sizes)
    return forecasts_of(*store.load(directory), trace, rollout=rollout, name=predictor)


def _part(trace: Trace, split: str | None) -> Trace:
    if not isinstance(trace, Trace):
        raise TraceError(f"expected a Trace, got {type(trace).__name__}; a file is read by Trace.load")
    return trace if split is None else trace.select(split)


def _skip(trace: Trace, skip: int | None) -> int:
    return min(SKIP, int(trace.decoded().sum()) // 2) if skip is None else skip


def _checked(**settings: Any) -> Simulation:
    """Raises `ConfigError` for a value of a wrong type, too."""
    wanted: Mapping[str, Any] = {each.name: each.default for each in fields(Simulation)} | {"residency": 0.5}
    for name, value in settings.items():
        kind = type(wanted[name])
        right = isinstance(value, int | float if kind is float else kind)
        if not right or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{name} must be {kind.__name__}, got {value!r}")
    return Simulation(**settings)
