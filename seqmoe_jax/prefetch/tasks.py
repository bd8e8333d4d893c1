"""Prefetch tasks as parallel arrays: what may be moved, how surely it is needed, and until when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int, Int64


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """n candidates for transfer. A position is step * L + layer, as in section 3.2 of the paper."""

    key: Int64[np.ndarray, " n"]  # layer * E + expert
    confidence: Float64[np.ndarray, " n"]  # expected contribution to expert hits
    deadline: Int64[np.ndarray, " n"]  # position at which the expert's layer runs
    slot: Int64[np.ndarray, " n"]  # reserved slot, -1 where one is chosen when the transfer starts
    tag: Int64[np.ndarray, " n"]  # grows with every task; a landing counts only while its slot expects its tag

    def __len__(self) -> int:
        return self.key.shape[0]


def tasks_of(
    probability: Float[np.ndarray, "L E"],
    *,
    resident: Int[np.ndarray, " keys"],
    step: int,
    per_layer: int,
    first_layer: int = 0,
    threshold: float = 0.0,
    first_tag: int = 0,
) -> Tasks:
    """The tasks of a forecast for `step` (paper 6.1): the `per_layer` likeliest experts of every layer from
    `first_layer` on, less those in `resident` (keys) and those below `threshold`; in order of deadline."""
    layers, experts = probability.shape
    likeliest = np.argsort(-probability, axis=1, kind="stable")[:, : min(per_layer, experts)]
    key = (np.arange(layers)[:, None] * experts + likeliest)[first_layer:].reshape(-1).astype(np.int64)
    confidence = probability.reshape(-1)[key].astype(np.float64)
    wanted = (confidence >= threshold) & ~np.isin(key, resident)
    key, confidence = key[wanted], confidence[wanted]
    return Tasks(
        key=key,
        confidence=confidence,
        deadline=step * layers + key // experts,
        slot=np.full(key.shape, -1, np.int64),
        tag=first_tag + np.arange(key.shape[0], dtype=np.int64),
    )
