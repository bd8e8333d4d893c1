"""What a simulation counts after its first steps, which are not counted."""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import compiled


class Counters(NamedTuple):
    """Transfers are in units of a whole one: a part of a transfer counts as that part."""

    hits: np.ndarray  # int64[L]
    routed: np.ndarray  # int64[1]
    time: np.ndarray  # float64[1]: in units of one layer's compute
    steps: np.ndarray  # int64[1]
    prefetched: np.ndarray  # float64[1]
    used: np.ndarray  # float64[1]: those of the prefetched that a layer found when it started
    unused: np.ndarray  # float64[1]: those of the prefetched that were evicted or given up before any use
    demanded: np.ndarray  # float64[1]


def new_counters(layers: int) -> Counters:
    return Counters(
        hits=np.zeros(layers, np.int64),
        routed=np.zeros(1, np.int64),
        time=np.zeros(1),
        steps=np.zeros(1, np.int64),
        prefetched=np.zeros(1),
        used=np.zeros(1),
        unused=np.zeros(1),
        demanded=np.zeros(1),
    )


@compiled
@no_type_check
def reset(counters):
    """Begins the counted part."""
    counters.hits[:] = 0
    counters.routed[0] = 0
    counters.time[0] = 0.0
    counters.steps[0] = 0
    counters.prefetched[0] = 0.0
    counters.used[0] = 0.0
    counters.unused[0] = 0.0
    counters.demanded[0] = 0.0
