"""How to prefetch for a given link, beyond the paper: what measured best on held-out training sequences.

Chosen on an eighth of the training split of a gpt-oss-20b trace (24 layers, 32 experts, 4 active) with linear
forecasts, at RHO 0.72 to 6 and residency 0.25 and 0.45. Residency made no difference to the choice.
"""

from __future__ import annotations

from dataclasses import replace

from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.simulator import Simulation

CHUNKS = 16  # 64 gained .002 more; a chunk should stay large enough for the link to run at full speed


def beyond_paper(config: Simulation, forecasts: Forecasts | None = None, *, chunks: int = CHUNKS) -> Simulation:
    """`config` with everything on that its forecasts allow, set for its transfer cost.

    `chunks` is 1 for an engine that cannot interrupt a transfer.
    """
    return replace(
        config,
        early=forecasts is not None and forecasts.early is not None,
        refine=forecasts is not None and forecasts.refined is not None,
        chunks=chunks,
        compare=True,
        keep=0.5,
        late=config.transfer_cost < 1,
        extra_tasks=extra_tasks_for(config.transfer_cost),
        threshold=threshold_for(config.transfer_cost, chunks),
    )


def extra_tasks_for(transfer_cost: float) -> int:
    """Tasks per layer beyond K: a link that moves an expert within a layer has room for guesses."""
    return 6 if transfer_cost < 1 else 3


def threshold_for(transfer_cost: float, chunks: int = CHUNKS) -> float:
    """Least confidence of a task. A transfer that cannot be interrupted must be surer: a miss waits for all of it."""
    if chunks > 1:
        return 0.0 if transfer_cost < 1.5 else 0.2
    return 0.3 if transfer_cost < 2 else 0.5
