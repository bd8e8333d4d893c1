"""Whether a predictor pays for a model: simulations with it beside those without, on sequences that it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from seqmoe_jax.errors import TraceError
from seqmoe_jax.simulation.settings import Simulation, like_engine
from seqmoe_jax.simulation.simulator import simulate
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace

SKIP = 500  # first steps, not counted; of a short trace a quarter
WITHOUT, WITH = ("lru", "history"), ("evict", "prefetch")  # settings that need no predictor, and those that do
Key = tuple[str, float, float]  # setting, residency, transfer cost


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What one setting gives at a residency and a transfer cost."""

    setting: str
    residency: float
    transfer_cost: float
    hit_rate: float
    share_of_full_load: float

    @property
    def key(self) -> Key:
        return self.setting, self.residency, self.transfer_cost


def settings(residencies: Sequence[float], transfer_costs: Sequence[float], steps: int) -> dict[Key, Simulation]:
    """All that is simulated: plain LRU, the engine without a predictor, eviction by it, and prefetching as well."""
    chosen: dict[Key, Simulation] = {}
    for residency, cost in product(residencies, transfer_costs):
        plain = Simulation(residency=residency, transfer_cost=cost, skip=min(SKIP, steps // 4))
        chosen["lru", residency, cost] = plain
        chosen["history", residency, cost] = replace(plain, policy="history")
        chosen["evict", residency, cost] = evict = replace(plain, policy="seqmoe")
        chosen["prefetch", residency, cost] = like_engine(replace(evict, prefetcher="seqmoe"))
    return chosen


def find_worth(
    trace: Trace,
    forecasts: Callable[[], Forecasts],
    residencies: Sequence[float],
    transfer_costs: Sequence[float],
    *,
    known: Iterable[Worth] = (),
    found: Callable[[list[Worth]], None] = lambda rows: None,
) -> list[Worth]:
    """Simulates every setting on `trace` that is not `known`; `found` gets all there are after each of them.

    `forecasts` are made once, where one of those needs them. Raises `TraceError` where the trace has too few steps.
    """
    steps = int(trace.decoded().sum())
    if steps < 8:
        raise TraceError(f"expected some decoded steps to simulate, got {steps}: give more prompts, or longer answers")
    chosen = settings(residencies, transfer_costs, steps)
    rows = [row for row in known if row.key in chosen]
    done, made = {row.key for row in rows}, None
    for key, config in chosen.items():
        if key in done:
            continue
        if config.needs_forecasts and made is None:
            made = forecasts()
        result = simulate(trace, config, made)
        setting, residency, cost = key
        rows.append(
            Worth(
                setting=setting, residency=residency, transfer_cost=cost,
                hit_rate=round(result.hit_rate, 4), share_of_full_load=round(result.share_of_full_load, 4),
            )
        )  # fmt: skip
        found(rows)
    return rows


def gain(rows: Sequence[Worth], residency: float, transfer_cost: float) -> float:
    """Share of full load with the predictor, over the best without it."""
    best: dict[bool, float] = {}
    for row in rows:
        if (row.residency, row.transfer_cost) == (residency, transfer_cost):
            with_it = row.setting in WITH
            best[with_it] = max(best.get(with_it, 0.0), row.share_of_full_load)
    return best[True] / best[False]


def pays(rows: Sequence[Worth]) -> bool:
    """Whether the predictor gains at every residency and transfer cost that was simulated."""
    return all(gain(rows, residency, cost) > 1 for residency, cost in {row.key[1:] for row in rows})


def table(rows: Sequence[Worth]) -> str:
    """Share of full load and hit rate of every setting, and what the predictor gains."""
    columns = list(dict.fromkeys(row.key[1:] for row in rows))
    names = [f"{100 * residency:g} %, RHO {cost:g}" for residency, cost in columns]
    by_key: dict[Key, Any] = {row.key: row for row in rows}
    lines = ["share of full load (hit rate)".ljust(32) + "".join(f"{name:>16}" for name in names)]
    for setting in (*WITHOUT, *WITH):
        cells = (by_key[setting, *column] for column in columns)
        lines.append(
            setting.ljust(32) + "".join(f"{row.share_of_full_load:>8.3f} ({row.hit_rate:.3f})" for row in cells)
        )
    lines.append("with it / best without".ljust(32) + "".join(f"{gain(rows, *column):>16.3f}" for column in columns))
    return "\n".join(lines)
