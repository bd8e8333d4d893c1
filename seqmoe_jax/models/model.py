"""A model in memory."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Shaped

from seqmoe_jax.display import size
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.models.weights import ModelWeights


@dataclass(frozen=True, kw_only=True, repr=False)
class Model:
    """A model in memory: dense weights on the device, every expert in pinned host memory."""

    spec: ModelSpec
    weights: ModelWeights
    pools: tuple[Shaped[Array, "E n"], ...]
    name: str

    def __repr__(self) -> str:
        held = size(sum(pool.nbytes for pool in self.pools))
        return (
            f"Model({self.name}: {self.spec.family}, {len(self.spec.layers)} layers, {self.spec.num_keys} experts "
            f"({held} of {self.spec.expert_layout.dtype}), {self.weights!r})"
        )
