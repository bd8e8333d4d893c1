"""A model in memory."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Shaped

from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.models.weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in memory: dense weights on the device, every expert in pinned host memory."""

    spec: ModelSpec
    weights: ModelWeights
    pools: tuple[Shaped[Array, "E n"], ...]
    name: str
