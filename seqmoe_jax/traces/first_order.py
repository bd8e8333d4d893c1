"""Forecasts that need no training run: how often an expert followed another, as in Patterns behind Chaos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float16, Float32

from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace


@dataclass(frozen=True, kw_only=True)
class FirstOrder:
    """Per layer P(e' in step t | e in step t-1)."""

    transition: Float32[np.ndarray, "L E E"]  # [l, e, e']
    popularity: Float32[np.ndarray, "L E"]

    @classmethod
    def fit(cls, trace: Trace) -> FirstOrder:
        pairs = np.zeros((trace.layers, trace.num_experts, trace.num_experts), np.float64)
        uses = np.zeros((trace.layers, trace.num_experts), np.float64)
        total = np.zeros_like(uses)
        for active in _sequences(trace):
            now = active.astype(np.float32).transpose(1, 0, 2)
            pairs += np.matmul(now[:, :-1].transpose(0, 2, 1), now[:, 1:])
            uses += now[:, :-1].sum(axis=1)
            total += now.sum(axis=1)
        popularity = total / trace.steps
        # One pseudo-count: an expert that was never seen behaves as the average one.
        transition = (pairs + popularity[:, None, :]) / (uses[:, :, None] + 1)
        return cls(transition=transition.astype(np.float32), popularity=popularity.astype(np.float32))

    def forecasts(self, trace: Trace, *, rollout: int = 0, decay: float = 0.9) -> Forecasts:
        """`next` weighs the transitions of the active experts by the router; `rollout` repeats that on its own output;
        `retention` is `moving_average`."""
        steps, layers, experts = trace.steps, trace.layers, trace.num_experts
        following = np.empty((steps, layers, experts), np.float16)
        rolled = np.empty((steps, rollout, layers, experts), np.float16)
        for start, stop in trace.spans():
            said = np.concatenate([self.popularity[None], self._step(trace.weights(start, stop - 1))])
            following[start:stop] = said
            for j in range(rollout):
                said = self._step(said / said.sum(axis=2, keepdims=True))
                rolled[start:stop, j] = said
        return Forecasts(
            next=following,
            rollout=rolled if rollout else None,
            retention=moving_average(trace, self.popularity, decay=decay),
            name="first-order",
        )

    def _step(self, weights: Float32[np.ndarray, "t L E"]) -> Float32[np.ndarray, "t L E"]:
        said: Float32[np.ndarray, "L t E"] = np.minimum(np.matmul(weights.transpose(1, 0, 2), self.transition), 1)
        return said.transpose(1, 0, 2)


def moving_average(
    trace: Trace, prior: Float[np.ndarray, "L E"], *, decay: float = 0.9
) -> Float16[np.ndarray, "T L E"]:
    """How often each expert was used lately: row t knows the steps before t of its own sequence."""
    average = np.empty((trace.steps, trace.layers, trace.num_experts), np.float16)
    row = 0
    for active in _sequences(trace):
        state = np.asarray(prior, np.float32)
        for used in active:
            average[row] = state
            state = decay * state + (1 - decay) * used
            row += 1
    return average


def _sequences(trace: Trace) -> Iterator[Bool[np.ndarray, "t L E"]]:
    for start, stop in trace.spans():
        yield trace.activations(start, stop)
