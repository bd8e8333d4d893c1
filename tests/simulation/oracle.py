"""Forecasts that are right as often as they are asked to be: a predictor's stand-in."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float16

from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace


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
