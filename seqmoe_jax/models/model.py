"""What an engine is made of, in memory: a model, and the predictor that forecasts its routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Shaped

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.models.weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in memory: dense weights on the device, every expert in pinned host memory."""

    spec: ModelSpec
    weights: ModelWeights
    pools: tuple[Shaped[Array, "E n"], ...]
    name: str


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A predictor in memory: its configuration and its weights as a plain pytree."""

    config: PredictorConfig
    weights: dict[str, Any]
    name: str

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))
