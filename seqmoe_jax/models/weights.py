"""The dense weights (everything that is not an expert) as pytrees. Matrices are [out, in], as in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """Query, key and value projections are one matrix, rows in that order: one product instead of three."""

    qkv: Float[Array, "NGGD H"]
    o: Float[Array, "H ND"]
    q_norm: Float[Array, " D"]
    k_norm: Float[Array, " D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    gate_up: Float[Array, "FF H"]
    down: Float[Array, "H F"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RouterWeights:
    router: Float[Array, "E H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    attention_norm: Float[Array, " H"]
    attention: AttentionWeights
    mlp_norm: Float[Array, " H"]
    mlp: DenseWeights | RouterWeights


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    embed: Float[Array, "V H"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " H"]
    head: Float[Array, "V H"]  # the same array as `embed` where the model ties them
