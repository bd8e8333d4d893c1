"""How to prefetch for a given link, beyond the paper: what measured best on held-out training sequences.

Chosen on an eighth of the training split of a gpt-oss-20b trace (24 layers, 32 experts, 4 active) with linear
forecasts, at RHO 0.72 to 6 and residency 0.25 and 0.45. Residency made no difference to the choice.
"""

from __future__ import annotations

from dataclasses import replace

from seqmoe_jax.simulation.simulator import Simulation
from seqmoe_jax.traces.forecasts import Forecasts

CHUNKS = 16  # 64 gained .002 more; a chunk should stay large enough for the link to run at full speed
EXTRA_TASKS = 6  # per layer beyond K, where the paper has 3: Algorithm 1 takes the surest of them anyway


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


def threshold_for(transfer_cost: float, chunks: int = CHUNKS) -> float:
    """Least confidence of a task. Where a transfer cannot be interrupted it must be surer: a miss waits for all of
    it."""
    if transfer_cost < 1:
        return 0.1
    if chunks > 1:
        return 0.2
    return 0.3 if transfer_cost < 2.5 else 0.5
