"""The dense weights (everything that is not an expert) as one pytree. Matrices are [out, in], as in checkpoints.

The weights of each part are declared beside its arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int32

from seqmoe_jax.display import size
from seqmoe_jax.models.mixers.base import Weights
from seqmoe_jax.models.mlp import DenseWeights, SharedWeights
from seqmoe_jax.models.residual import HyperWeights
from seqmoe_jax.models.routers import RouterWeights


class MoEWeights(NamedTuple):
    router: RouterWeights
    shared: SharedWeights | None


class LayerWeights(NamedTuple):
    input_norm: Float[Array, " H"]
    mixer: Weights  # what the layer's mixer assembles
    post_norm: Float[Array, " H"]
    mlp: DenseWeights | MoEWeights
    mixer_residual: HyperWeights | None = None
    mlp_residual: HyperWeights | None = None


class ModelWeights(NamedTuple):
    embed: Float[Array, "V H"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " H"]
    head: Float[Array, "V H"]  # the same array as `embed` where the model ties them
    streams: HyperWeights | None = None

    def __repr__(self) -> str:
        """Sizes: the numbers themselves would be of no use to anybody."""
        leaves = {
            id(leaf): leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "nbytes")
        }  # a tied head is there once
        dtypes = sorted({str(leaf.dtype) for leaf in leaves.values()})
        held = size(sum(leaf.nbytes for leaf in leaves.values()))
        return f"ModelWeights({len(self.layers)} layers, {held} of {', '.join(dtypes)})"

    @property
    def hash_tables(self) -> dict[int, Int32[Array, "V K"]]:
        """By MoE layer, what `routers.hash_experts` looks tokens up in; empty for most models."""
        moe = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoEWeights)]
        return {index: mlp.router.table for index, mlp in enumerate(moe) if mlp.router.table is not None}
