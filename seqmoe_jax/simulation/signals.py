"""What the policy and the prefetcher know at every step, as the float32 rows that compiled code reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float16, Float32, Int64

from seqmoe_jax.simulation.settings import Simulation
from seqmoe_jax.simulation.values import FAR
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace


class Signals(NamedTuple):
    """Rows of t steps; arrays of no rows where the simulation does not read them."""

    next: Float32[np.ndarray, "t keys"]
    retention: Float32[np.ndarray, "t keys"]
    refined: Float32[np.ndarray, "t keys"]
    early: Float32[np.ndarray, "t keys"]  # of the next step, at the trigger
    ahead: Float32[np.ndarray, "t horizon keys"]
    next_use: Int64[np.ndarray, "t L K"]  # position of the next use of each routed expert


@dataclass(frozen=True, kw_only=True)
class SignalSource:
    """All that the signals of a simulation are made of. `trace` has no prompts; `forecasts` are of its steps."""

    config: Simulation
    trace: Trace
    forecasts: Forecasts | None
    prompt_uses: Float32[np.ndarray, "N keys"] | None  # policy `prefill-hot`
    next_use: Int64[np.ndarray, "T L K"] | None  # policies `belady` and `belady-8`

    def rows(self, start: int, stop: int) -> Signals:
        """Those of steps [start, stop); nothing else is converted."""
        steps, keys = stop - start, self.trace.layers * self.trace.num_experts
        config, forecasts = self.config, self.forecasts
        none = np.zeros((0, keys), np.float32)
        following = refined = early = none
        ahead = np.zeros((0, 0, keys), np.float32)
        if forecasts is not None and config.needs_forecasts:
            following = refined = _rows(forecasts.next, start, stop)
            if config.refine:
                refined = _rows(forecasts.refined, start, stop)
            if config.early:
                # Read at the trigger of step t, about step t + 1; after the last step nothing comes.
                early = _rows(forecasts.early, start + 1, stop + 1)
                early = np.pad(early, ((0, steps - early.shape[0]), (0, 0)))
            if config.horizon and config.prefetches:
                assert forecasts.rollout is not None
                ahead = forecasts.rollout[start:stop, : config.horizon].astype(np.float32)
                ahead = ahead.reshape(steps, config.horizon, keys)
        elif config.policy == "prefill-hot":
            following = np.zeros((steps, keys), np.float32)
        return Signals(
            next=following,
            retention=self._retention(start, stop, none),
            refined=refined,
            early=early,
            ahead=ahead,
            next_use=np.zeros((0, 1, 1), np.int64) if self.next_use is None else self.next_use[start:stop],
        )

    def _retention(self, start: int, stop: int, none: Float32[np.ndarray, "0 keys"]) -> Float32[np.ndarray, "t keys"]:
        """The score that the policy keeps experts by."""
        if self.prompt_uses is not None:
            sequence = np.searchsorted(self.trace.seq_offsets, np.arange(start, stop), side="right") - 1
            return self.prompt_uses[sequence]
        if self.forecasts is None or not self.config.evicts_by_forecast:
            return none
        if self.config.policy == "seqmoe":
            return _rows(self.forecasts.retention, start, stop)
        assert self.forecasts.rollout is not None
        return cache_score(self.forecasts.rollout[start:stop], self.config.discount)


def _rows(array: Float16[np.ndarray, "T L E"] | None, start: int, stop: int) -> Float32[np.ndarray, "t keys"]:
    assert array is not None
    return array[start:stop].astype(np.float32).reshape(-1, array.shape[1] * array.shape[2])


def cache_score(rollout: Float16[np.ndarray, "t c L E"], discount: float) -> Float32[np.ndarray, "t keys"]:
    """The paper's CacheScore (7.1): the mean over the rollout's c steps, step j weighing discount**j."""
    steps = rollout.shape[1]
    weights = (discount ** np.arange(steps)).astype(np.float32)
    score: Float32[np.ndarray, "t L E"] = np.zeros((rollout.shape[0], *rollout.shape[2:]), np.float32)
    for j in range(steps):
        score += weights[j] * rollout[:, j]
    score /= weights.sum()
    return score.reshape(rollout.shape[0], -1)


def next_uses(trace: Trace) -> tuple[Int64[np.ndarray, "T L K"], Int64[np.ndarray, " keys"]]:
    """Position of the next use of every routed expert after the step, and of the first use of every key; `FAR` if
    there is none."""
    base = np.arange(trace.layers)[:, None] * trace.num_experts
    upcoming = np.full(trace.layers * trace.num_experts, FAR, np.int64)
    found = np.empty(trace.ids.shape, np.int64)
    positions = np.arange(trace.layers)[:, None]
    for step in range(trace.steps - 1, -1, -1):
        keys = base + trace.ids[step]
        found[step] = upcoming[keys]
        upcoming[keys] = step * trace.layers + positions
    return found, upcoming


def prompt_uses(trace: Trace, stand_in: int) -> Float32[np.ndarray, "N keys"]:
    """How often each sequence's prompt used each expert; its first `stand_in` steps stand in for a missing prompt."""
    counts = np.zeros((trace.sequences, trace.layers * trace.num_experts), np.float32)
    for i, (start, stop) in enumerate(trace.spans()):
        prompt = int(trace.prefill_lens[i]) if trace.prefill_lens is not None else 0
        steps = prompt or min(stand_in, stop - start)
        counts[i] = trace.activations(start, start + steps).sum(axis=0).reshape(-1)
    return counts
