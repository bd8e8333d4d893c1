"""A trained predictor in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from seqmoe_jax.forecast.config import PredictorConfig


@dataclass(frozen=True, kw_only=True)
class TrainedPredictor:
    """A predictor's configuration and its weights, the plain pytree that `inference` runs on."""

    config: PredictorConfig
    weights: dict[str, Any]
    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))
