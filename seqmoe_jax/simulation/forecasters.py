"""Forecasts that need no training run: statistics of the past, first order transitions, an oracle with noise.

They are baselines, and stand in for a predictor where the simulator is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float16, Float32

from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace


@dataclass(frozen=True, kw_only=True)
class FirstOrder:
    """Per layer P(e' in step t | e in step t-1), as in Patterns behind Chaos (Patterns-MoE)."""

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
        # One pseudo-count: an expert never seen goes on as the average one.
        transition = (pairs + popularity[:, None, :]) / (uses[:, :, None] + 1)
        return cls(transition=transition.astype(np.float32), popularity=popularity.astype(np.float32))

    def forecasts(self, trace: Trace, *, rollout: int = 0, decay: float = 0.9) -> Forecasts:
        """`next` weighs the transitions of the active experts by their probability; `rollout` repeats that on its own
        output; `retention` is `moving_average`."""
        steps, layers, experts = trace.steps, trace.layers, trace.num_experts
        following = np.empty((steps, layers, experts), np.float16)
        rolled = np.empty((steps, rollout, layers, experts), np.float16)
        for start, stop in trace.spans():
            weights = mixture(trace, start, stop - 1)
            said = np.concatenate([self.popularity[None], self._step(weights)])
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
        said = np.matmul(weights.transpose(1, 0, 2), self.transition)
        return np.minimum(said, 1).transpose(1, 0, 2)


def mixture(trace: Trace, start: int, stop: int) -> Float32[np.ndarray, "t L E"]:
    """Steps [start, stop): the router's weights over the activated experts, 0 elsewhere (paper 5.2)."""
    weights = np.zeros((stop - start, trace.layers, trace.num_experts), np.float32)
    share = trace.probs_u8[start:stop].astype(np.float32)
    share /= np.maximum(share.sum(axis=2, keepdims=True), 1)
    np.put_along_axis(weights, trace.ids[start:stop].astype(np.int64), share, axis=2)
    return weights


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


def noisy_oracle(
    trace: Trace,
    *,
    flip: float,
    rollout: int = 0,
    trigger: int | None = None,
    refined_flip: float | None = None,
    decay: float = 0.85,
    seed: int = 0,
) -> Forecasts:
    """Knows the trace, but takes a share `flip` of the activated experts for others of their layer.

    With `trigger`, the refined forecast errs in `refined_flip` of them, and the early one in `flip`.
    """
    rng = np.random.default_rng(seed)
    active = trace.activations()
    following = _blur(active, flip, trace.active, rng)
    later = np.zeros((trace.steps, trace.layers, trace.num_experts), np.float32)
    rolled = np.zeros((trace.steps, rollout, trace.layers, trace.num_experts), np.float16)
    for start, stop in trace.spans():
        state = np.zeros(later.shape[1:], np.float32)
        for step in range(stop - 1, start - 1, -1):
            later[step] = state
            state = decay * state + (1 - decay) * active[step]
        for j in range(min(rollout, stop - start - 1)):
            rolled[start : stop - 1 - j, j] = following[start + 1 + j : stop]
    mid_step = {}
    if trigger is not None:
        wrong = flip / 2 if refined_flip is None else refined_flip
        mid_step = {"refined": _blur(active, wrong, trace.active, rng), "early": following}
    return Forecasts(
        next=following,
        retention=later.astype(np.float16),
        rollout=rolled if rollout else None,
        trigger=trigger,
        name=f"oracle-{flip:g}",
        **mid_step,
    )


def _blur(
    active: Bool[np.ndarray, "T L E"], flip: float, count: int, rng: np.random.Generator
) -> Float16[np.ndarray, "T L E"]:
    """Activations with a share `flip` of mistakes, as probabilities that own up to that share."""
    hidden = active & (rng.random(active.shape) < flip)
    others = active.shape[2] - count
    invented = ~active & (rng.random(active.shape) < flip * count / max(others, 1))
    said = (active & ~hidden) | invented
    rest = flip * count / max(others, 1)
    return np.where(said, 1 - flip, rest).astype(np.float16)


def _sequences(trace: Trace) -> Iterator[Bool[np.ndarray, "t L E"]]:
    for start, stop in trace.spans():
        yield trace.activations(start, stop)
